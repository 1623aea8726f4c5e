"""The parent's side of data/template_child.py: a process that renders one template, and is restarted if it was ended.

Must not know: tokenizers, turns, what the texts are for. Invariants: whatever a template does, it cannot take more than
the child's processor time and memory for a text; nothing is read from the child beyond a bounded length.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any

from apcbatch.data.child_process import ChildProcess
from apcbatch.data.frames import DONE, framed
from apcbatch.data.template_bounds import (
    CPU_SECONDS,
    INVALID,
    MAX_CHARACTERS,
    MEMORY_BYTES,
    NO_MEMORY,
    TOO_LONG,
)
from apcbatch.errors import RequestError
from apcbatch.values import rounded_size


class InvalidTemplate(Exception):
    """A template that cannot be compiled; the text says why and in which line."""


class BeyondBounds(Exception):
    """A template that exceeds its time or memory; the text ends a sentence about it."""


Outcome = str | RequestError | InvalidTemplate | BeyondBounds


class TemplateProcess:
    """One template, with the variables that it sees besides messages and tools."""

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        self._head = _framed((source, dict(variables), CPU_SECONDS))
        self._child: ChildProcess | None = None

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
        missing = len(counts)
        try:
            child.send(request)
            while missing and (answer := child.receive(4 * MAX_CHARACTERS)) is not None:
                missing -= 1
                if not missing:
                    self._child = child
                yield _outcome(*answer)
        finally:
            if self._child is not child:
                child.end()
        yield from repeat(BeyondBounds(_why(child.status)), missing)

    def _begin(self) -> ChildProcess:
        child = ChildProcess("apcbatch.data.template_child", "the process for the chat template")
        child.send(self._head)
        return child


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
        return framed(value)
    except ValueError as error:
        reason = "are nested too deeply" if "nested" in str(error) else "hold a value that JSON does not have"
        raise RequestError("invalid_request", f"the messages or tools {reason}") from None
