"""A command run in a terminal of some width, as a person would see it."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path

from tests.conftest import ROOT


def in_terminal(
    arguments: Sequence[str], columns: int, folder: Path, module: str = "apcbatch", **environment: str
) -> tuple[int, str]:
    """(exit code, everything on the screen) of a module's command line, standard output and error together."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    child = subprocess.Popen(
        [sys.executable, "-m", module, *arguments], cwd=folder, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs,
        env={**kept, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", **environment},
    )  # fmt: skip
    os.close(theirs)
    data = b""
    while True:
        try:
            data += (piece := os.read(ours, 65536))
        except OSError:  # the other side is closed
            break
        if not piece:
            break
    os.close(ours)
    return child.wait(timeout=60), data.decode().replace("\r\n", "\n")
