"""Settings of this process: how threads wait and allocate (set before torch is loaded), garbage collection, exit, and
the last words of a process that is ended from outside."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from contextlib import suppress
from typing import IO, Any

_LAST_WORDS = r"""
import os, signal, sys
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
os.write(2, sys.stdin.buffer.read().rpartition(b"\0")[2])
"""


def settle_thread_waiting() -> None:
    """Make waiting threads yield the processor after about 50 us. Call it before torch is loaded.

    By default the OpenMP runtime spins for milliseconds, so on a busy machine every parallel step waits for a time
    slice (measured: 10 times slower with one busy neighbour). A user's own setting takes precedence.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ):
        os.environ["GOMP_SPINCOUNT"] = "10000"


def settle_allocator() -> None:
    """Make all threads of this process allocate from one arena. Call it before there are threads.

    By default the GNU C library gives each thread an arena, which retains memory that other threads free. Over 20,000
    requests memory grew by 150 MB (measured), although nothing was held. With other C libraries this call does nothing.
    """
    m_arena_max = -8
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_ARENA_MAX" not in os.environ:
        mallopt(m_arena_max, 1)


def settle_collector() -> None:
    """Run the garbage collector after 50,000 new objects instead of 700.

    This is for a process with hundreds of thousands of objects and hardly any cycles. The driver of a cluster spent a
    third of its time in garbage collection (measured).
    """
    gc.set_threshold(50_000, 10, 10)


def settle_leaving() -> None:
    """Freeze all objects, so that the interpreter exits without a last garbage collection. Call it at the very end.

    It saves about 0.45 s in each command that has loaded torch (measured).
    """
    gc.freeze()


def silence(stream: IO[Any]) -> None:
    """Redirect a broken stream to /dev/null, so that flushing its buffer on close cannot fail."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


class LastWords:
    """Lines that are printed on the standard error if this process ends without `close`: if it is killed, or if C++
    code of a library ends it.

    A child process prints them, once the pipe from this process ends. It has its own session, so that a signal to this
    process's group does not end it.
    """

    def __init__(self, lines: str) -> None:
        command = [sys.executable, "-I", "-S", "-c", _LAST_WORDS]
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )
        self.replace(lines)

    def replace(self, lines: str) -> None:
        """Replace the lines. Print nothing if there are none. A signal handler may call it."""
        if self._child.stdin is not None:
            with suppress(OSError):  # the child was ended: nothing will be printed
                os.write(self._child.stdin.fileno(), b"\0" + os.fsencode(lines))

    def close(self) -> None:
        """Print nothing, and wait for the child process to end."""
        self.replace("")
        self._child.communicate()
