"""One worker for several threads: no message is lost, and nobody waits for a unit that is not its own."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest

from apcbatch.cluster.turns import Turns
from apcbatch.cluster.unit import Done, Message, Unit, Without

KEY = b"k"


class Slow:
    """A worker that says one word for each of its units in a pass, so many times."""

    def __init__(self, words: Mapping[int, int]) -> None:
        self.left, self.begun, self.alone = dict(words), [], threading.Lock()

    def begin(self, unit: Unit, states: Mapping[bytes, bytes]) -> None:
        assert self.alone.acquire(blocking=False), "two threads are in the worker"
        self.begun.append(unit.number)
        self.alone.release()

    def step(self) -> list[Message]:
        assert self.alone.acquire(blocking=False), "two threads are in the worker"
        said: list[Message] = []
        for number in self.begun:
            if self.left[number] >= 0:
                said.append(Without(number, KEY) if self.left[number] else Done(number, 0.0, 0, 0))
                self.left[number] -= 1
        threading.Event().wait(0.0005)
        self.alone.release()
        return said


def test_each_thread_hears_of_its_own_unit() -> None:
    """Catches words that get lost or go to another unit, two threads in the engine, and one that waits for ever."""
    words = {number: 5 + 7 * (number % 4) for number in range(8)}
    turns, heard = Turns(Slow(words)), {}

    def work(number: int) -> None:
        heard[number] = list(turns.work(Unit(number, ()), {}))

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in words]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert {number: len(said) for number, said in heard.items()} == {n: count + 1 for n, count in words.items()}
    assert all(said == [Without(n, KEY)] * words[n] + [Done(n, 0.0, 0, 0)] for n, said in heard.items())


def test_a_broken_worker_is_told_to_all() -> None:
    """Catches a thread that waits for a worker that will never say anything."""

    class Broken(Slow):
        def step(self) -> list[Message]:
            raise MemoryError

    turns = Turns(Broken({1: 1, 2: 1}))
    first, second = turns.work(Unit(1, ()), {}), turns.work(Unit(2, ()), {})
    for messages in (first, second):
        with pytest.raises(MemoryError):
            next(messages)
