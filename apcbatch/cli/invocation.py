"""One call of the program: how it was called, and how to continue what it began."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


def program_words() -> list[str]:
    """The words that call this program again from a shell, as it was called."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py" and called.resolve().parent.name == "apcbatch":
        return [sys.executable, "-m", "apcbatch"]
    found = shutil.which("apcbatch")
    if called.name == "apcbatch" and called.exists() and not (found and called.samefile(found)):
        return [str(called)]
    return ["apcbatch"]


@dataclass
class Invocation:
    """program: the words that call this program again. last_line: for an exit code, the command that goes on with what
    this one began, or that nothing is left to do; None if it began nothing."""

    program: list[str] = field(default_factory=program_words)
    last_line: Callable[[int], str] | None = None
