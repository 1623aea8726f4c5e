"""The parent's side of data/grammar_child.py: a process that tries grammars, and is restarted if it was ended.

Must not know: tokenizers, what a grammar is for. Invariant: whatever a grammar is, trying it takes no more than the
child's processor time and memory, and no harm comes to the run.
"""

from __future__ import annotations

import marshal
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from apcbatch.data.grammar_frames import ANSWER_HEAD, CPU_SECONDS, DONE, REQUEST_HEAD
from apcbatch.errors import RequestError

_HERE = str(Path(__file__).resolve().parents[2])
_PROGRAM = "import sys; sys.path[:] = {path!r}; from apcbatch.data.grammar_child import main; main()"


class GrammarProcess:
    """Tries grammars for a vocabulary of so many tokens. special: the names of its special tokens."""

    def __init__(self, num_tokens: int, special: Mapping[int, str]) -> None:
        self._head = _framed((num_tokens, dict(special)))
        self._child: subprocess.Popen[bytes] | None = None
        self._finish: Callable[[], object] = lambda: None

    def check(self, form: str, text: str) -> str:
        """A text of one of the library's formats, as the grammar that it compiles; ValueError says what is wrong."""
        child = self._child or self._begin()
        self._child = None
        _send(child, _framed((form, text)))
        answer = _receive(child)
        if answer is None:
            self._finish()
            raise ValueError(_why(child.returncode))
        self._child = child
        letter, text = answer
        if letter != DONE:
            raise ValueError(text)
        return text

    def _begin(self) -> subprocess.Popen[bytes]:
        """Start the child, out of reach of the terminal's signals. It ends when its standard input ends."""
        try:
            child = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM.format(path=[_HERE, *sys.path])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            message = f"the process that tries grammars cannot be started: {error.strerror}; run it again"
            raise RequestError("out_of_memory", message) from None
        self._finish = weakref.finalize(self, _end, child)
        _send(child, self._head)
        return child


def _framed(value: tuple[Any, ...]) -> bytes:
    data = marshal.dumps(value)
    return REQUEST_HEAD.pack(len(data)) + data


def _send(child: subprocess.Popen[bytes], request: bytes) -> None:
    """Write a request. If the child dies before it reads it, its answer will be missing."""
    assert child.stdin is not None
    with suppress(BrokenPipeError):
        child.stdin.write(request)
        child.stdin.flush()


def _receive(child: subprocess.Popen[bytes]) -> tuple[bytes, str] | None:
    """The letter and the text of one answer; None if the child has ended."""
    assert child.stdout is not None
    head = child.stdout.read(ANSWER_HEAD.size)
    if len(head) < ANSWER_HEAD.size:
        return None
    letter, num_bytes = ANSWER_HEAD.unpack(head)
    return letter, child.stdout.read(num_bytes).decode()


def _why(status: int | None) -> str:
    """Why a child ended, as a clause about its grammar."""
    if status == -signal.SIGPROF:
        return f"it takes more than {CPU_SECONDS} seconds of processor time"
    if status in (-signal.SIGSEGV, -signal.SIGABRT):
        return "it takes too much memory, or is nested too deeply"
    return f"the process that tried it ended with status {status}"


def _end(child: subprocess.Popen[bytes]) -> None:
    """Let the child go, and end one that is still at work."""
    assert child.stdin is not None and child.stdout is not None
    with suppress(BrokenPipeError):
        child.stdin.close()
    child.stdout.close()
    try:
        child.wait(timeout=1)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
