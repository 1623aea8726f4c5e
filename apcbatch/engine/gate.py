"""When waiting sequences are let in, where a pass with prompts in it costs several passes without.

A CUDA device replays a decode pass as one graph; a pass with prompts is launched op by op. Letting in each sequence as
soon as a place is free would make nearly every pass such a one; waiting leaves places free.
An example with 32 places, where a pass with prompts costs 3 others:
    8 sequences end at once: 8 places are free, a quarter of all, and the gate opens.
    One ends every 4 passes: the 7th opens it, for by then 4 * (1 + ... + 6) = 84 places, and those of 2 passes more,
    stood empty, as many as 3 passes have.
    One ends every 100 passes: the gate opens 96 passes later.

Must not know: sequences, tensors. Invariant: a closed gate opens at last, if places are free.
"""

from __future__ import annotations

# Passes. Measured on an H200 when a pass with prompts took 22 to 30 ms of the host, against 6 ms, and not since.
COST_ON_DEVICE = 3
AT_ONCE = 4  # the gate opens if one of so many places is free


class Gate:
    """cost: of a pass with prompts, in passes beyond one; 0 for a gate that is always open."""

    def __init__(self, num_places: int, cost: int) -> None:
        self._many, self._most_lost = num_places / AT_ONCE, cost * num_places
        self._lost = 0
        self._is_open = False

    def opens(self, num_free: int) -> bool:
        """Whether sequences may be let in by the pass that is put together now; asked once for each pass."""
        if not self._is_open:
            self._lost += num_free
            self._is_open = num_free >= self._many or self._lost >= self._most_lost
        return self._is_open

    @property
    def is_open(self) -> bool:
        """Whether sequences may be let in already."""
        return self._is_open

    def close(self) -> None:
        """Nobody more can be let in for now."""
        self._is_open, self._lost = False, 0
