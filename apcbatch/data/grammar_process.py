"""The parent's side of data/grammar_child.py: a process that tries grammars, and is restarted if it was ended.

Must not know: tokenizers, what a grammar is for. Invariant: whatever a grammar is, trying it takes no more than the
child's processor time and memory, and no harm comes to the run.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping

from apcbatch.data.child_process import ChildProcess
from apcbatch.data.frames import DONE, framed
from apcbatch.data.grammar_bounds import CPU_SECONDS


class GrammarProcess:
    """Tries grammars for a vocabulary of so many tokens. special: the names of its special tokens."""

    def __init__(self, num_tokens: int, special: Mapping[int, str]) -> None:
        self._head = framed((num_tokens, dict(special)))
        self._child: ChildProcess | None = None

    def check(self, form: str, text: str) -> str:
        """A text of one of the library's formats, as the grammar that it compiles; ValueError says what is wrong."""
        child, self._child = self._child or self._begin(), None
        child.send(framed((form, text)))
        answer = child.receive()
        if answer is None:
            child.end()
            raise ValueError(_why(child.status))
        self._child = child
        letter, text = answer
        if letter != DONE:
            raise ValueError(text)
        return text

    def _begin(self) -> ChildProcess:
        child = ChildProcess("apcbatch.data.grammar_child", "the process that tries grammars")
        child.send(self._head)
        return child


def _why(status: int | None) -> str:
    """Why a child ended, as a clause about its grammar."""
    if status == -signal.SIGPROF:
        return f"it takes more than {CPU_SECONDS} seconds of processor time"
    if status in (-signal.SIGSEGV, -signal.SIGABRT):
        return "it takes too much memory, or is nested too deeply"
    return f"the process that tried it ended with status {status}"
