"""StateTable: the states that units have exported, the node that holds each, and its remaining readers.

Invariants:
- The states of a node fit its byte limit.
- A state with unfinished or future readers stays held, even if the worker that made it has ended, unless it is evicted
  for lack of capacity, or lost with its node or in transfer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from apcbatch.cluster.tasks import Item, State
from apcbatch.cluster.wire import Handle


class StateTable:
    """Table of exported states."""

    def __init__(self) -> None:
        self._held: defaultdict[str, set[State]] = defaultdict(set)  # by the node that holds them
        self._num_bytes = Counter[str]()  # by node

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def __iter__(self) -> Iterator[State]:
        return (state for held in self._held.values() for state in held)

    def put(self, state: State, handle: Handle, num_bytes: int, node: str, most_bytes: int) -> None:
        """Hold a state on a node. Above most_bytes, evict the node's states that save the fewest tokens per byte."""
        if state.handle is not None or not state.is_wanted:
            return
        state.handle, state.num_bytes, state.home, state.nodes = handle, num_bytes, node, {node}
        held = self._held[node]
        held.add(state)
        self._num_bytes[node] += num_bytes
        while self._num_bytes[node] > most_bytes:
            self.lose(min(held, key=_value))

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
        if not state.is_wanted:
            self.lose(state)

    def release_all_unwanted(self) -> None:
        """Release every state without unfinished or future readers."""
        for state in list(self):
            self.release_unwanted(state)

    def lose(self, state: State) -> None:
        """Release a held state. Its next reader, if there is one, computes it again."""
        if state.handle is not None:
            self._held[state.home].discard(state)
            self._num_bytes[state.home] -= state.num_bytes
            state.handle, state.home, state.nodes = None, "", set()

    def forget_node(self, node: str) -> None:
        """Release the states of a node, and drop its copies of other nodes' states."""
        for state in list(self):
            state.nodes.discard(node)
            if state.home == node:
                self.lose(state)

    def clear(self) -> None:
        """Release every state."""
        for state in list(self):
            self.lose(state)


def _value(state: State) -> float:
    """Return the tokens of computation that a state saves per byte."""
    above = state.nearest_held()
    tokens = state.position - (above.position if above is not None else 0)
    return tokens * (len(state.readers) + state.future_readers) / max(1, state.num_bytes)
