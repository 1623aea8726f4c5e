"""Turns: one worker for several threads, each of which has a unit done.

Must not know: engines, what units hold. Invariants: one thread at a time touches the worker; what it finds for the
units of others waits for them; a new unit is begun after the pass that runs, not after the units that do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from threading import Condition
from typing import Protocol

from apcbatch.cluster.unit import Done, Key, Message, Unit
from apcbatch.store import Buffer


class Steps(Protocol):
    """What a worker does, one thing at a time."""

    def begin(self, unit: Unit, states: Mapping[Key, Buffer]) -> None:
        """Take a unit on."""

    def step(self) -> list[Message]:
        """One pass over all units that were begun, and what came of them."""


class Turns:
    """Has the units of several threads done by one worker."""

    def __init__(self, worker: Steps) -> None:
        self._worker = worker
        self._change = Condition()
        self._is_stepping = False
        self._num_beginning = 0
        self._said: dict[int, list[Message]] = {}  # by unit: what nobody has taken

    def work(self, unit: Unit, states: Mapping[Key, Buffer]) -> Iterator[Message]:
        """Do a unit, and say what comes of it as it comes; the last word is Done. states: the bytes of its imports."""
        self._begin(unit, states)
        is_done = False
        while not is_done:
            messages = self._taken(unit.number)
            is_done = any(isinstance(message, Done) for message in messages)
            yield from messages
        with self._change:
            del self._said[unit.number]

    def _begin(self, unit: Unit, states: Mapping[Key, Buffer]) -> None:
        with self._change:
            self._num_beginning += 1
            try:
                self._change.wait_for(lambda: not self._is_stepping)
                self._said[unit.number] = []
                self._worker.begin(unit, states)
            finally:
                self._num_beginning -= 1
                self._change.notify_all()

    def _taken(self, number: int) -> list[Message]:
        """What was said of a unit; nothing after a pass that this thread has done for all."""
        with self._change:
            self._change.wait_for(lambda: self._said[number] or not (self._is_stepping or self._num_beginning))
            if self._said[number]:
                messages, self._said[number] = self._said[number], []
                return messages
            self._is_stepping = True
        said: list[Message] = []
        try:
            said = self._worker.step()
        finally:
            with self._change:
                self._is_stepping = False
                for message in said:
                    self._said[message.unit].append(message)
                self._change.notify_all()
        return []
