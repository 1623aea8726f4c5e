"""StateTable: the states that units have exported, the node that holds each, and its remaining readers.

Invariants:
- The states of a node fit its byte limit, and all states fit the maximum number.
- A state with unfinished or future readers stays held, even if the worker that made it has ended, unless it is evicted
  for lack of capacity, or lost with its node or in transfer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from apcbatch.cluster.tasks import Item, State
from apcbatch.cluster.wire import Handle

TIGHT = 0.8  # share of either limit up to which room is infinite


@dataclass(slots=True)
class _Node:
    """States on one node. held: states whose home is the node. num_reserved, reserved_bytes: states still to be made
    there by assigned units."""

    held: set[State] = field(default_factory=set)
    num_bytes: int = 0
    num_reserved: int = 0
    reserved_bytes: int = 0


class StateTable:
    """Table of exported states. num_dropped: states evicted for lack of capacity. num_lost: states lost with their node
    or in transfer. peak_states: maximum number of states held at once."""

    def __init__(self, most_states: int) -> None:
        self._most_states = most_states
        self._nodes: dict[str, _Node] = {}  # by name; only nodes with held or reserved states
        self._num_held = self._num_reserved = 0
        self.num_dropped = self.num_lost = self.peak_states = 0

    def __len__(self) -> int:
        return self._num_held

    def __iter__(self) -> Iterator[State]:
        return (state for node in self._nodes.values() for state in node.held)

    def room(self, name: str, most_bytes: int) -> float:
        """Return how many more states fit on a node besides the reserved ones; infinity unless the node's bytes or the
        total number of states exceed the share TIGHT of their limit.

        name: the node. most_bytes: its byte limit.
        """
        node = self._nodes.get(name, _Node())
        num_bytes, here = node.num_bytes + node.reserved_bytes, len(node.held) + node.num_reserved
        left = self._most_states - self._num_held - self._num_reserved
        if num_bytes <= TIGHT * most_bytes and left >= (1 - TIGHT) * self._most_states:
            return float("inf")
        return min(left, (most_bytes - num_bytes) * here / num_bytes if num_bytes else float("inf"))

    def reserve(self, name: str, num_bytes: int) -> None:
        """Reserve capacity on a node for a state that an assigned unit will make."""
        node = self._nodes.setdefault(name, _Node())
        node.num_reserved += 1
        node.reserved_bytes += num_bytes
        self._num_reserved += 1

    def unreserve(self, name: str, num_bytes: int) -> None:
        """Free reserved capacity: the state has arrived, or will not come."""
        node = self._nodes[name]
        node.num_reserved -= 1
        node.reserved_bytes -= num_bytes
        self._num_reserved -= 1
        self._drop_empty(name)

    def put(self, state: State, handle: Handle, num_bytes: int, name: str, most_bytes: int) -> None:
        """Hold a state on a node. Above a limit, evict the states that save the fewest tokens per byte."""
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
        """Remove a finished request from its states. Return the states without a maker that groups wait for.

        has_failed: each state that the request did not make gets a new maker: the state's first reader in the same
        group. If it has none there, the new maker of the next deeper state makes it too, on the way to that state.
        """
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
        """Release a held state if it has no unfinished or future reader."""
        if state.handle is not None and not state.is_wanted:
            self._forget(state)

    def release_all_unwanted(self) -> None:
        """Release every state without unfinished or future readers."""
        for state in list(self):
            self.release_unwanted(state)

    def lose(self, state: State) -> None:
        """Mark a state as lost. Its next reader makes it again."""
        if state.handle is not None:
            self._forget(state)
            self.num_lost += 1

    def forget_node(self, name: str) -> None:
        """Mark the states of a node as lost, and drop the copies there."""
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
    """Return the tokens of computation that a state saves per byte."""
    above = state.nearest_held()
    tokens = state.position - (above.position if above is not None else 0)
    return tokens * (len(state.readers) + state.future_readers) / max(1, state.num_bytes)
