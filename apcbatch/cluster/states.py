"""StateTable: the states that units have exported, the node that holds each, and its remaining readers.

Must not know: units, workers, how states are sent. Invariants: the states of a node are within the node's bytes, and
all states within their maximum number; a state is held as long as it has readers to come and its node lives, also after
the worker that made it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from apcbatch.cluster.tasks import Item, State
from apcbatch.cluster.wire import Handle

TIGHT = 0.8  # share of either bound up to which nothing is limited


@dataclass(slots=True)
class _Node:
    """held: states whose home is the node. reserved: for states that assigned units have yet to make there."""

    held: set[State] = field(default_factory=set)
    num_bytes: int = 0
    num_reserved: int = 0
    reserved_bytes: int = 0


class StateTable:
    """num_dropped: states evicted for lack of room; num_lost: lost with their node or in transfer."""

    def __init__(self, most_states: int) -> None:
        self._most_states = most_states
        self._nodes: dict[str, _Node] = {}  # by name; those with held or reserved states
        self._num_held = self._num_reserved = 0
        self.num_dropped = self.num_lost = self.peak_states = 0

    def __len__(self) -> int:
        return self._num_held

    def __iter__(self) -> Iterator[State]:
        return (state for node in self._nodes.values() for state in node.held)

    def room(self, name: str, most_bytes: int) -> float:
        """How many more states fit on a node beside the reserved ones; infinity up to TIGHT. most_bytes: the node's
        bound."""
        node = self._nodes.get(name, _Node())
        num_bytes, here = node.num_bytes + node.reserved_bytes, len(node.held) + node.num_reserved
        left = self._most_states - self._num_held - self._num_reserved
        if num_bytes <= TIGHT * most_bytes and left >= (1 - TIGHT) * self._most_states:
            return float("inf")
        return min(left, (most_bytes - num_bytes) * here / num_bytes if num_bytes else float("inf"))

    def reserve(self, name: str, num_bytes: int) -> None:
        """Reserve room on a node for a state that an assigned unit will make."""
        node = self._nodes.setdefault(name, _Node())
        node.num_reserved += 1
        node.reserved_bytes += num_bytes
        self._num_reserved += 1

    def unreserve(self, name: str, num_bytes: int) -> None:
        """Free reserved room: the state has arrived, or will not come."""
        node = self._nodes[name]
        node.num_reserved -= 1
        node.reserved_bytes -= num_bytes
        self._num_reserved -= 1
        self._drop_empty(name)

    def put(self, state: State, handle: Handle, num_bytes: int, name: str, most_bytes: int) -> None:
        """Hold a state on a node. Beyond the bounds, evict the states that save the fewest tokens per byte."""
        if state.handle is not None or not state.is_wanted:
            return
        state.handle, state.num_bytes, state.home, state.nodes = handle, num_bytes, name, {name}
        node = self._nodes.setdefault(name, _Node())
        node.held.add(state)
        node.num_bytes += num_bytes
        self._num_held += 1
        while node.num_bytes > most_bytes or self._num_held > self._most_states:
            self._forget(min(node.held if node.num_bytes > most_bytes else self, key=_value))
            self.num_dropped += 1
        self.peak_states = max(self.peak_states, self._num_held)

    def ended(self, item: Item, has_failed: bool = False) -> list[State]:
        """Remove a request that has ended from its states. Return the states that groups wait for and that have no
        maker now. The states of a failed request get the first reader in its group as maker, if there is one: its
        worker makes them for the unit."""
        if item.resume is not None:
            item.resume.readers.discard(item)
        orphaned, successor = list[State](), None
        for position, state in sorted(item.keeps.items(), reverse=True):
            if state.maker is item:
                state.maker = None
                if has_failed and state.handle is None:
                    beside = [reader for reader in state.readers if reader.group is item.group]
                    successor = min(beside, key=lambda reader: reader.number, default=successor)
                if successor is not None and state.handle is None:
                    state.maker, successor.keeps[position] = successor, state
                elif state.handle is None and state.waiting:
                    orphaned.append(state)
        return orphaned

    def release_unwanted(self, state: State) -> None:
        """Release a state if it has no readers to come."""
        if state.handle is not None and not state.is_wanted:
            self._forget(state)

    def release_all_unwanted(self) -> None:
        """Release every state without readers to come."""
        for state in list(self):
            self.release_unwanted(state)

    def lose(self, state: State) -> None:
        """Note that a state is lost; its next reader makes it again."""
        if state.handle is not None:
            self._forget(state)
            self.num_lost += 1

    def forget_node(self, name: str) -> None:
        """Lose the states whose home is a node that is gone."""
        for state in list(self):
            state.nodes.discard(name)
            if state.home == name:
                self.lose(state)

    def clear(self) -> None:
        """Release every state."""
        for state in list(self):
            self._forget(state)

    def _forget(self, state: State) -> None:
        node = self._nodes[state.home]
        node.held.discard(state)
        node.num_bytes -= state.num_bytes
        self._num_held -= 1
        self._drop_empty(state.home)
        state.handle, state.home, state.nodes = None, "", set()

    def _drop_empty(self, name: str) -> None:
        node = self._nodes[name]
        if not node.held and not node.num_reserved:
            del self._nodes[name]


def _value(state: State) -> float:
    """Tokens of computation saved per byte."""
    above = state.nearest_held()
    tokens = state.position - (above.position if above is not None else 0)
    return tokens * (len(state.readers) + state.future_readers) / max(1, state.num_bytes)
