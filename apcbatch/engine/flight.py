"""The passes that were begun and not yet read, in the order in which they were begun.

Must not know: what a pass computes, who schedules it. Each device takes the passes in this order, and whatever is
launched later, a copy into a slot or a page too, comes after all of them there. So a slot, a page or a snapshot may be
given to somebody else as soon as the host has no use for it: a pass under way that still reads or writes it does so
before its next owner. Invariants: passes are read in order, so that a sequence's tokens come in order; it is in several
at once only where a later one needs no token that was not read: with chunks of its prompt, or foreseen from the one
before.
"""

from __future__ import annotations

from collections import deque

from apcbatch.engine.runner import Chunk, Pass
from apcbatch.engine.sequence import Sequence


class Flight:
    """The passes under way."""

    def __init__(self) -> None:
        self._passes: deque[Pass] = deque()

    def __len__(self) -> int:
        return len(self._passes)

    def begin(self, one: Pass) -> None:
        """Note a pass that was begun after all others."""
        self._passes.append(one)

    def next(self) -> Pass:
        """The pass that is to be read now; it is under way no more."""
        return self._passes.popleft()

    @property
    def ends(self) -> dict[Sequence, int]:
        """All that are in a pass, and the position that each has reached after its last one."""
        return {chunk.sequence: chunk.end for one in self._passes for chunk in one.chunks}

    def leave_out(self, sequence: Sequence) -> list[Chunk]:
        """The sequence has ended: what is computed for it means nothing. Returns its chunks; a pass of nobody else is
        forgotten."""
        left_out = [chunk for one in self._passes for chunk in one.leave_out(sequence)]
        if left_out:
            self._passes = deque(one for one in self._passes if one.chunks)
        return left_out
