"""The parent's side of data/template_child.py: a process that renders one template, and is restarted if it was ended.

Must not know: tokenizers, turns, what the texts are for. Invariants: whatever a template does, it cannot take more than
the child's processor time and memory for a text; nothing is read from the child beyond a bounded length.
"""

from __future__ import annotations

import marshal
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import repeat
from pathlib import Path
from typing import Any

from apcbatch.data.template_frames import (
    ANSWER_HEAD,
    CPU_SECONDS,
    DONE,
    INVALID,
    MAX_CHARACTERS,
    MEMORY_BYTES,
    NO_MEMORY,
    REQUEST_HEAD,
    TOO_LONG,
)
from apcbatch.errors import RequestError
from apcbatch.values import rounded_size

_HERE = str(Path(__file__).resolve().parents[2])
_PROGRAM = "import sys; sys.path[:] = {path!r}; from apcbatch.data.template_child import main; main()"


class InvalidTemplate(Exception):
    """A template that cannot be compiled; the text says why and in which line."""


class BeyondBounds(Exception):
    """A template that exceeds its time or memory; the text ends a sentence about it."""


Outcome = str | RequestError | InvalidTemplate | BeyondBounds


class TemplateProcess:
    """One template, with the variables that it sees besides messages and tools."""

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        self._head = _framed((source, dict(variables), CPU_SECONDS))
        self._child: subprocess.Popen[bytes] | None = None
        self._finish: Callable[[], object] = lambda: None

    def texts(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        counts: Sequence[int],
        variables: Mapping[str, Any] | None = None,
    ) -> Iterator[Outcome]:
        """For each count, the text for that many first messages, or what is wrong with it. variables: what the template
        sees beside them for this request.

        Texts are made while the earlier ones are used. Raises RequestError for messages that no template can be given.
        A child that is left before its last answer is ended, so that no answer is taken for another's.
        """
        request = _framed((list(messages), tools, list(counts), dict(variables or {})))
        child, self._child = self._child or self._begin(), None
        finish = self._finish
        missing = len(counts)
        try:
            _send(child, request)
            while missing and (answer := _receive(child)) is not None:
                missing -= 1
                if not missing:
                    self._child = child
                yield _outcome(*answer)
        finally:
            if self._child is not child:
                finish()
        yield from repeat(BeyondBounds(_why(child.returncode)), missing)

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
            message = f"the process for the chat template cannot be started: {error.strerror}; run it again"
            raise RequestError("out_of_memory", message) from None
        self._finish = weakref.finalize(self, _end, child)
        _send(child, self._head)
        return child


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
    data = child.stdout.read(min(num_bytes, 4 * MAX_CHARACTERS))
    return letter, data.decode("utf-8", "replace")


def _outcome(letter: bytes, text: str) -> Outcome:
    """What an answer says."""
    if letter == DONE:
        return text
    if letter == INVALID:
        return InvalidTemplate(text)
    if letter == NO_MEMORY:
        return BeyondBounds(f"it needs more than {rounded_size(MEMORY_BYTES)} of memory")
    if letter == TOO_LONG:
        return too_long(int(text))
    return RequestError("invalid_request", text)


def _why(status: int | None) -> str:
    """Why a child ended, as the end of a sentence about its template."""
    if status == -signal.SIGPROF:
        return f"it takes more than {CPU_SECONDS} seconds of processor time"
    return f"its process ended with status {status}"


def too_long(num_characters: int) -> RequestError:
    """The error of a text that is too long to be tokenised."""
    message = f"the prompt holds {num_characters:,} characters; at most {MAX_CHARACTERS:,} are tokenised"
    return RequestError("context_length_exceeded", message)


def _framed(value: tuple[Any, ...]) -> bytes:
    """A request as the child reads it. RequestError for values that are not JSON or nested too deeply."""
    try:
        data = marshal.dumps(value)
    except ValueError as error:
        reason = "are nested too deeply" if "nested" in str(error) else "hold a value that JSON does not have"
        raise RequestError("invalid_request", f"the messages or tools {reason}") from None
    return REQUEST_HEAD.pack(len(data)) + data


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
