"""Which states are there for others, where, and for how many readers.

Must not know: units, how states travel. Invariants: the states that are held are within the bounds; a state is held
only as long as somebody will read it; of a worker that is gone nothing is held.
"""

from __future__ import annotations

from apcbatch.cluster.items import Item, State
from apcbatch.cluster.seam import WorkerId
from apcbatch.cluster.unit import Handle

TIGHT = 0.8  # of either bound


class States:
    """The states that lie somewhere. num_promised, promised_bytes: of those that units at work have yet to make.
    num_dropped: for lack of room; num_lost: with their workers."""

    def __init__(self, most_bytes: int, most_states: int) -> None:
        self._most_bytes, self._most_states = most_bytes, most_states
        self._held: set[State] = set()
        self.num_promised = self.promised_bytes = 0
        self.num_bytes = self.num_dropped = self.num_lost = self.peak_bytes = self.peak_states = 0

    def __len__(self) -> int:
        return len(self._held)

    @property
    def is_tight(self) -> bool:
        """Whether there is little room left, with those that are promised."""
        num_bytes, number = self.num_bytes + self.promised_bytes, len(self._held) + self.num_promised
        return num_bytes > TIGHT * self._most_bytes or number > TIGHT * self._most_states

    @property
    def room(self) -> float:
        """How many states more there is room for, besides those that are promised."""
        num_bytes, number = self.num_bytes + self.promised_bytes, len(self._held) + self.num_promised
        by_bytes = (self._most_bytes - num_bytes) * number / num_bytes if num_bytes else float("inf")
        return min(by_bytes, self._most_states - number)

    def promise(self, num_bytes: int) -> None:
        """A unit at work will make a state of this size."""
        self.num_promised += 1
        self.promised_bytes += num_bytes

    def settle(self, num_bytes: int) -> None:
        """A state that was promised is there, or will not come."""
        self.num_promised -= 1
        self.promised_bytes -= num_bytes

    def put(self, state: State, handle: Handle, num_bytes: int, owner: WorkerId, node: str) -> None:
        """A state is there. Beyond the bounds the states go that save least, maybe this one."""
        if state.handle is not None or not state.is_wanted:
            return
        state.handle, state.num_bytes, state.owner, state.nodes = handle, num_bytes, owner, {node}
        self._held.add(state)
        self.num_bytes += num_bytes
        while self.num_bytes > self._most_bytes or len(self._held) > self._most_states:
            self._forget(min(self._held, key=_value))
            self.num_dropped += 1
        self.peak_bytes, self.peak_states = max(self.peak_bytes, self.num_bytes), max(self.peak_states, len(self._held))

    def ended(self, item: Item) -> list[State]:
        """A request has ended: it reads and makes nothing any more. The states that others wait for it to make, and
        that nobody will make now."""
        if item.resume is not None:
            item.resume.readers.discard(item)
            self.release_unwanted(item.resume)
        forsaken = []
        for state in item.keeps.values():
            if state.maker is item:
                state.maker = None
                if state.handle is None and state.waiting:
                    forsaken.append(state)
        return forsaken

    def release_unwanted(self, state: State) -> None:
        """Let go of a state that nobody will read."""
        if state in self._held and not state.is_wanted:
            self._forget(state)

    def release_all_unwanted(self) -> None:
        """Let go of every state that nobody will read."""
        for state in [state for state in self._held if not state.is_wanted]:
            self._forget(state)

    def forget_worker(self, worker: WorkerId) -> None:
        """What a worker owned is gone."""
        for state in [state for state in self._held if state.owner == worker]:
            self._forget(state)
            self.num_lost += 1

    def forget_family(self, families: set[int]) -> None:
        """What was made for these families is of no use to the workers that are left."""
        for state in [state for state in self._held if state.family in families]:
            self._forget(state)
            self.num_lost += 1

    def clear(self) -> None:
        """Let go of everything."""
        for state in list(self._held):
            self._forget(state)

    def _forget(self, state: State) -> None:
        self._held.discard(state)
        self.num_bytes -= state.num_bytes
        state.handle, state.owner, state.nodes = None, -1, set()


def _value(state: State) -> float:
    """The tokens that a byte of it saves."""
    above = state.nearest_held()
    tokens = state.position - (above.position if above is not None else 0)
    return tokens * (len(state.readers) + state.unseen) / max(1, state.num_bytes)
