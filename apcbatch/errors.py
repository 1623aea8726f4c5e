"""The closed set of error codes, and the exceptions with their exit codes."""

from __future__ import annotations

from typing import Literal, get_args

ErrorCode = Literal[
    "invalid_json",
    "invalid_request",
    "duplicate_id",
    "context_length_exceeded",
    "out_of_memory",
    "non_finite",
    "internal",
    "worker_lost",
    "tool_failed",
]
ERROR_CODES: tuple[str, ...] = get_args(ErrorCode)
RETRYABLE: frozenset[str] = frozenset({"out_of_memory", "internal", "worker_lost", "tool_failed"})

EXIT_OK = 0
EXIT_STOPPED = 1  # stopped early, resumable
EXIT_USAGE = 2  # wrong usage or configuration, or unreadable input
EXIT_REQUEST_ERRORS = 3  # finished, with some error records
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


class ApcbatchError(Exception):
    """Base of every deliberate error of apcbatch. Its text is a sentence for the user."""

    exit_code = EXIT_USAGE


class UsageError(ApcbatchError):
    """A flag, a configuration, a model folder or an input cannot be used; nothing was computed."""


class ModelError(UsageError):
    """A checkpoint is incomplete, damaged or not of a supported family. The text names the tensor or key, and its
    file."""


class StoppedError(ApcbatchError):
    """The job stopped before its end and can be resumed."""

    exit_code = EXIT_STOPPED


class RequestError(ApcbatchError):
    """An input line or request cannot be answered. It becomes an error record, and the job continues.

    code: one of ERROR_CODES. line: the 1-based input line, if known.
    """

    exit_code = EXIT_REQUEST_ERRORS

    def __init__(self, code: ErrorCode, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.code: ErrorCode = code
        self.message = message
        self.line = line

    def __reduce__(self) -> tuple[type[RequestError], tuple[ErrorCode, str, int | None]]:
        """Support copying and pickling: the default of exceptions would lose the message."""
        return type(self), (self.code, self.message, self.line)

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed when it is run again."""
        return self.code in RETRYABLE
