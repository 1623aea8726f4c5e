"""What a process is given: its arguments, its standard streams, its signals.

Must not know: commands. Invariant: a stream that is closed or full loses what would have been printed there. It never
corrupts another file and never ends in a traceback.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from apcbatch.display import visible
from apcbatch.errors import EXIT_OK, EXIT_STOPPED, UsageError
from apcbatch.job.silence import silence

HANDLED = (signal.SIGINT, signal.SIGTERM)


def take_standard_descriptors() -> None:
    """Open /dev/null in place of closed standard streams. Otherwise the next file to be opened would take the stream's
    number, and what is printed would go into that file."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def check_arguments(arguments: Sequence[str]) -> None:
    """Refuse an argument with a NUL character, which no file name can hold."""
    for argument in arguments:
        if "\0" in argument:
            raise UsageError(f"the argument {argument!r} holds a NUL character; no file or option can be named so")


@contextmanager
def kept_signals() -> Iterator[None]:
    """Restore the signal handlers at the end, whatever a command has set."""
    handlers = {number: signal.getsignal(number) for number in HANDLED}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def flush_output(code: int) -> int:
    """Flush standard output. The exit code, or EXIT_STOPPED in place of EXIT_OK if it could not be written."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        silence(sys.stdout)
        if not isinstance(error, BrokenPipeError):
            say(f"apcbatch: standard output cannot be written: {error.strerror}")
        return EXIT_STOPPED if code == EXIT_OK else code
    return code


def say(sentence: str) -> None:
    """One sentence on standard error, if it can be written."""
    with suppress(OSError):
        print(visible(sentence, "\n"), file=sys.stderr, flush=True)
