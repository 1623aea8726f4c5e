"""From cut groups to groups that could begin: who waits for which state, and who makes a lost one again.

Must not know: workers, units. Invariants: every group is in one of two places, waiting or ready, until it is taken; a
group waits only for states that an unfinished request outside it will make; a lost state is made again once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from apcbatch.cluster.items import Group, State
from apcbatch.cluster.queue import ReadyQueue


class Placing:
    """The groups that are at no worker. num_forced: groups that had to begin without waiting any longer."""

    def __init__(self) -> None:
        self.queue = ReadyQueue()
        self._waiting: dict[Group, None] = {}
        self.num_forced = 0

    @property
    def waiting(self) -> Collection[Group]:
        """The groups that wait for a state."""
        return self._waiting.keys()

    @property
    def seconds(self) -> float:
        """The work in all groups."""
        return self.queue.seconds + sum(group.seconds for group in self._waiting)

    def place(self, group: Group) -> None:
        """Let a group wait for what is being made, and begin if there is nothing to wait for. What nobody will make,
        its own first reader makes."""
        self._forget(group)
        for state in group.outside():
            if state.handle is not None:
                continue
            if state.maker is None:
                group.first_reader(state).lead(state)
            elif state.maker.group is not group:
                group.pending.add(state)
        group.note_states()
        for state in group.pending:
            state.waiting.add(group)
        if group.pending:
            self._waiting[group] = None
        else:
            self.queue.push(group)

    def take(self, node: str, room: float, is_idle: bool = True) -> Group | None:
        """The next group for a worker, with all that it needs; None if there is none. See ReadyQueue.pop."""
        while (group := self.queue.pop(node, room, is_idle)) is not None:
            if all(state.handle is not None for state in group.needs):
                return group
            self.place(group)
        return None

    def made(self, state: State) -> None:
        """A state is there."""
        for group in sorted(state.waiting, key=lambda group: group.number):
            state.waiting.discard(group)
            group.pending.discard(state)
            if not group.pending:
                self.place(group)

    def forsaken(self, states: Iterable[State]) -> None:
        """Nobody will make these any more: the first group that waits makes each of them, for the others too."""
        for state in states:
            for group in sorted(state.waiting, key=lambda group: group.number):
                self.place(group)

    def force(self) -> None:
        """Nothing runs and nothing is ready: the first group that waits makes itself what it waits for."""
        group = min(self._waiting, key=lambda group: group.number)
        self.num_forced += 1
        for state in list(group.pending):
            group.first_reader(state).lead(state)
        self.place(group)

    def clear(self) -> list[Group]:
        """Take everything out."""
        groups = self.queue.clear() + list(self._waiting)
        for group in groups:
            self._forget(group)
        return groups

    def _forget(self, group: Group) -> None:
        self._waiting.pop(group, None)
        for state in group.pending:
            state.waiting.discard(group)
        group.pending.clear()
