"""Make values ahead of their use, on several threads, in bounded memory.

Invariant: the values begun and not yet taken have at most `most_bytes` together, plus one value for each thread and
each caller of `take`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from threading import Condition, Thread
from typing import Generic, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """Prefetcher of values by name. make: name -> value. sizes: name -> bytes, in the approximate order of use."""

    def __init__(self, make: Callable[[str], T], sizes: Mapping[str, int], *, threads: int, most_bytes: int) -> None:
        self._make, self._sizes, self._most_bytes = make, sizes, most_bytes
        self._waiting = dict.fromkeys(sizes)  # names not begun, as an ordered set
        self._begun: dict[str, Future[T]] = {}
        self._held = 0  # bytes of the values begun and not yet taken
        self._changed = Condition()
        self._threads = [Thread(target=self._go_on, name="apcbatch-ahead", daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def take(self, name: str) -> T:
        """Return the value of a name, which may be taken only once. If no thread has begun to make it, the caller makes
        it. Raises what `make` raised."""
        with self._changed:
            future = self._begun.get(name)
            mine = future is None
            if future is None:
                future = self._begin(name)
        if mine:
            self._finish(name, future)
        try:
            return future.result()
        finally:
            with self._changed:
                del self._begun[name]
                self._held -= self._sizes[name]
                self._changed.notify_all()

    def close(self) -> None:
        """Drop the values that were not taken, and wait for the threads to end."""
        with self._changed:
            self._waiting.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._begun.clear()

    def _go_on(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._waiting or self._held < self._most_bytes)
                name = next(iter(self._waiting), None)
                if name is None:
                    return
                future = self._begin(name)
            self._finish(name, future)

    def _begin(self, name: str) -> Future[T]:
        self._waiting.pop(name, None)
        self._held += self._sizes[name]
        future = self._begun[name] = Future()
        return future

    def _finish(self, name: str, future: Future[T]) -> None:
        try:
            future.set_result(self._make(name))
        except BaseException as error:  # `take` raises it
            future.set_exception(error)
