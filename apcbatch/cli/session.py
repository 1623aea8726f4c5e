"""What the commands tell `main` about the command line that runs."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


def program_words() -> list[str]:
    """How this program was called, as words that call it again from a shell."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py" and called.resolve().parent.name == "apcbatch":
        return [sys.executable, "-m", "apcbatch"]
    found = shutil.which("apcbatch")
    if called.name == "apcbatch" and called.exists() and not (found and called.samefile(found)):
        return [str(called)]
    return ["apcbatch"]


@dataclass
class Session:
    """One command line. continue_command: gives the command that would go on with what it began, if any."""

    program: list[str] = field(default_factory=program_words)
    continue_command: Callable[[], str] | None = None
