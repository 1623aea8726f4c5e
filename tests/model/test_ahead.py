"""What is made ahead of the asking: the same things, in bounded memory, and no thread left."""

from __future__ import annotations

import random
import threading

import pytest

from apcbatch.model.prefetch import Ahead
from tests.effort import table

NAMES = [f"thing {i}" for i in range(200)]


def things(threads: int, most_bytes: int, make=lambda name: name.upper()) -> Ahead[str]:
    return Ahead(make, dict.fromkeys(NAMES, 10), threads=threads, most_bytes=most_bytes)


@table("threads", [1, 4])
@table("most_bytes", [0, 25, 10_000])
def test_any_order_of_asking(threads: int, most_bytes: int) -> None:
    """Catches a thing that is made twice or never, and an asking that waits for ever: nothing fits, or what was made
    first is asked for last."""
    made: list[str] = []

    def make(name: str) -> str:
        made.append(name)
        return name.upper()

    ahead = things(threads, most_bytes, make)
    order = random.sample(NAMES, len(NAMES))
    assert [ahead.take(name) for name in order] == [name.upper() for name in order]
    ahead.close()
    assert sorted(made) == sorted(NAMES)


def test_as_much_is_made_as_fits() -> None:
    """Catches threads that read a whole checkpoint before any of it is taken, room that is left empty from the
    beginning, or that is lost with each thing that is taken."""
    made = threading.Semaphore(0)
    ahead = things(1, 41, lambda name: made.release() or name)
    assert all(made.acquire(timeout=5) for _ in range(5)), "below 41 bytes one more of 10 is begun"
    assert not made.acquire(timeout=0.02)
    for name in NAMES[:3]:
        ahead.take(name)
        assert made.acquire(timeout=5)
    assert not made.acquire(timeout=0.02)
    ahead.close()


def test_what_fails_fails_where_it_is_asked_for() -> None:
    """Catches a failure that is lost in a thread, that comes for another thing, or that ends the making."""

    def make(name: str) -> str:
        if name == NAMES[3]:
            raise ValueError(name)
        return name

    ahead = things(2, 1000, make)
    for name in NAMES[:10]:
        if name == NAMES[3]:
            with pytest.raises(ValueError, match=name):
                ahead.take(name)
        else:
            assert ahead.take(name) == name
    ahead.close()


def test_no_thread_is_left_or_waited_for() -> None:
    """Catches threads that continue reading after a checkpoint was found to be damaged, and a process that cannot end
    while a tensor is read."""
    go_on, before = threading.Event(), threading.active_count()
    ahead = things(2, 30, lambda name: name if go_on.wait(10) else "")
    begun = [thread for thread in threading.enumerate() if thread.name == "apcbatch-ahead"]
    go_on.set()
    ahead.take(NAMES[0])
    ahead.close()
    assert begun and all(thread.daemon for thread in begun) and threading.active_count() == before
