"""Which states are there for others, on which nodes, and for how many readers.

Must not know: units, workers, how states travel. Invariants: the states whose home is a node are within that node's
bound, and all of them within the bound on their number; a state is held only as long as somebody will read it, and
until its home is gone: it outlives the worker that made it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from apcbatch.cluster.items import Item, State
from apcbatch.cluster.unit import Handle

TIGHT = 0.8  # of either bound


@dataclass(slots=True)
class _Node:
    """held: the states whose home a node is. promised: those that units at work there have yet to make."""

    held: set[State] = field(default_factory=set)
    num_bytes: int = 0
    num_promised: int = 0
    promised_bytes: int = 0


class States:
    """Table of the states held on nodes. num_dropped: evicted for lack of memory; num_lost: lost with their node or in
    transfer."""

    def __init__(self, most_states: int) -> None:
        self._most_states = most_states
        self._nodes: dict[str, _Node] = {}  # by name; those that have a state or wait for one
        self._num_held = self._num_promised = 0
        self.num_dropped = self.num_lost = self.peak_states = 0

    def __len__(self) -> int:
        return self._num_held

    def __iter__(self) -> Iterator[State]:
        return (state for node in self._nodes.values() for state in node.held)

    def num_bytes(self, name: str) -> int:
        """Bytes of the states whose home a node is."""
        return self._nodes[name].num_bytes if name in self._nodes else 0

    def room(self, name: str, most_bytes: int) -> float:
        """How many states more may have their home on a node, besides those that are promised; infinity as long as
        there is plenty of room. most_bytes: the node's bound."""
        node = self._nodes.get(name, _Node())
        num_bytes, here = node.num_bytes + node.promised_bytes, len(node.held) + node.num_promised
        left = self._most_states - self._num_held - self._num_promised
        if num_bytes <= TIGHT * most_bytes and left >= (1 - TIGHT) * self._most_states:
            return float("inf")
        return min(left, (most_bytes - num_bytes) * here / num_bytes if num_bytes else float("inf"))

    def promise(self, name: str, num_bytes: int) -> None:
        """A unit at work on a node will make a state of this size."""
        node = self._nodes.setdefault(name, _Node())
        node.num_promised += 1
        node.promised_bytes += num_bytes
        self._num_promised += 1

    def settle(self, name: str, num_bytes: int) -> None:
        """A state that was promised is there, or will not come."""
        node = self._nodes[name]
        node.num_promised -= 1
        node.promised_bytes -= num_bytes
        self._num_promised -= 1
        self._drop_empty(name)

    def put(self, state: State, handle: Handle, num_bytes: int, name: str, most_bytes: int) -> None:
        """A state is there, on a node. Beyond the bounds the states go that save least, maybe this one."""
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
        """A request has ended: it reads and makes nothing any more. The states that others wait for it to make, and
        that nobody will make now. What a failed one leaves, a reader beside it in its group makes."""
        if item.resume is not None:
            item.resume.readers.discard(item)
        forsaken, heir = list[State](), None
        for position, state in sorted(item.keeps.items(), reverse=True):
            if state.maker is item:
                state.maker = None
                if has_failed and state.handle is None:
                    beside = [reader for reader in state.readers if reader.group is item.group]
                    heir = min(beside, key=lambda reader: reader.number, default=heir)
                if heir is not None and state.handle is None:
                    state.maker, heir.keeps[position] = heir, state
                elif state.handle is None and state.waiting:
                    forsaken.append(state)
        return forsaken

    def release_unwanted(self, state: State) -> None:
        """Let go of a state that nobody will read."""
        if state.handle is not None and not state.is_wanted:
            self._forget(state)

    def release_all_unwanted(self) -> None:
        """Let go of every state that nobody will read."""
        for state in list(self):
            self.release_unwanted(state)

    def lose(self, state: State) -> None:
        """A state could not be had where it was needed: whoever else needs it makes it again."""
        if state.handle is not None:
            self._forget(state)
            self.num_lost += 1

    def forget_node(self, name: str) -> None:
        """A node is gone, and what had its home there."""
        for state in list(self):
            state.nodes.discard(name)
            if state.home == name:
                self.lose(state)

    def clear(self) -> None:
        """Let go of everything."""
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
        if not node.held and not node.num_promised:
            del self._nodes[name]


def _value(state: State) -> float:
    """The tokens that a byte of it saves."""
    above = state.nearest_held()
    tokens = state.position - (above.position if above is not None else 0)
    return tokens * (len(state.readers) + state.unseen) / max(1, state.num_bytes)
