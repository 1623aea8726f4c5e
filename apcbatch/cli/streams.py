"""Guard the process's arguments, standard streams and signals.

Invariant: output to a closed or full stream is lost. It never corrupts another file, and never ends in a traceback.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from apcbatch.display import visible
from apcbatch.errors import EXIT_OK, EXIT_STOPPED, UsageError
from apcbatch.process import silence

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def take_standard_descriptors() -> None:
    """Open /dev/null in place of closed standard streams. Otherwise the next opened file would get a stream's
    descriptor, and printed text would go into that file."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def escape_unencodable() -> None:
    """Make standard output print a character that its encoding lacks as an escape, as standard error does."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def check_arguments(arguments: Sequence[str]) -> None:
    """Refuse an argument with a NUL character, which no file name can hold."""
    for argument in arguments:
        if "\0" in argument:
            raise UsageError(f"the argument {argument!r} holds a NUL character; no file or option can be named so")


def check_current_folder() -> None:
    """Raise UsageError if the current folder was removed: relative paths would lead nowhere, and MKL would end the
    process."""
    try:
        os.getcwd()
    except OSError as error:
        sentence = f"the current folder cannot be used: {error.strerror}; go to one that exists, with cd"
        raise UsageError(sentence) from None


@contextmanager
def kept_signals() -> Iterator[None]:
    """Restore the signal handlers at the end of the block."""
    handlers = {number: signal.getsignal(number) for number in HANDLED}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def flush_output(code: int) -> int:
    """Flush standard output and return the exit code; EXIT_STOPPED in place of EXIT_OK if writing failed."""
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
    """Print one sentence on standard error, ignoring write errors."""
    with suppress(OSError):
        print(visible(sentence, "\n"), file=sys.stderr, flush=True)


def program_words() -> list[str]:
    """Return the words of a shell command that starts this program the same way again."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py" and called.resolve().parent.name == "apcbatch":
        return [sys.executable, "-m", "apcbatch"]
    found = shutil.which("apcbatch")
    if called.name == "apcbatch" and called.exists() and not (found and called.samefile(found)):
        return [str(called)]
    return ["apcbatch"]


@dataclass
class Invocation:
    """How this process was started, and its last line. program: the shell words that start this program again.
    last_line: takes the exit code, and returns the command that continues the job or a sentence that nothing is left to
    do; None without a job."""

    program: list[str] = field(default_factory=program_words)
    last_line: Callable[[int], str] | None = None
