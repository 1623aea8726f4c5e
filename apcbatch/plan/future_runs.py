"""Which snapshots to keep for future runs: where each conversation would go on, and the stems that
conversations share.

Must not know: this run's order and what it keeps for itself. Invariants: each saves at least the minimum gain
over its nearest kept ancestor; all together fit the byte budget, the ones that save the most tokens per byte
first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from apcbatch.plan.footprint import Footprint
from apcbatch.plan.prefix_tree import ROOT
from apcbatch.plan.reach import Held, Owners, Place, held_places
from apcbatch.plan.tree_shape import TreeShape
from apcbatch.prefix import last_boundary


@dataclass(slots=True, eq=False)
class _Candidate:
    """serves: conversations that go through it. chosen: still among those to keep. written: not held
    already."""

    place: Place
    serves: int
    above: _Candidate | None = None
    below: dict[_Candidate, None] = field(default_factory=dict)
    chosen: bool = True
    written: bool = True

    @property
    def gain(self) -> int:
        """Tokens that it saves over the nearest one above it."""
        return self.place[1] - (self.above.place[1] if self.above is not None else 0)

    def value(self, footprint: Footprint) -> float:
        """Tokens saved per byte."""
        return self.gain * self.serves / footprint.snapshot_bytes(self.gain)


@dataclass(frozen=True)
class ForLater:
    """places: what to keep, each after those above it. num_bytes: what it takes on disk."""

    places: list[Place]
    num_bytes: int

    def by_owner(self, owners: Owners) -> dict[int, list[int]]:
        """The positions by the request that computes them first, ascending."""
        positions: dict[int, list[int]] = {}
        for place in self.places:
            owner = owners.owner(place)
            assert owner is not None, "only what is computed is kept"
            positions.setdefault(owner, []).append(place[1])
        return positions


@dataclass(frozen=True)
class LaterPolicy:
    """What future runs get: snapshots that save at least min_gain_tokens over their nearest kept ancestor and
    take budget_bytes on disk at most (None: no limit)."""

    block_size: int
    min_gain_tokens: int
    budget_bytes: int | None
    footprint: Footprint

    def choose(self, shape: TreeShape, owners: Owners, held: Held) -> ForLater:
        """The positions to keep. owners: who computes what in this run; held: what is there already, for
        nothing.

        A conversation is kept at the last boundary from which both its last prompt and one that goes on from
        it can resume.
        """
        if self.budget_bytes == 0:
            return ForLater([], 0)
        places = (place for place in self._candidates(shape) if owners.owner(place) is not None)
        candidates = _with_gain(shape, places, held, self.min_gain_tokens)
        total = sum(self.footprint.snapshot_bytes(one.gain) for one in candidates if one.written)
        if self.budget_bytes is not None and total > self.budget_bytes:
            total = _drop_least(candidates, self.footprint, total, self.budget_bytes)
        return ForLater([one.place for one in candidates if one.chosen and one.written], total)

    def _candidates(self, shape: TreeShape) -> set[Place]:
        """Where conversations would go on, and where they part."""
        found = set()
        for index in shape.last_prompts:
            boundary = last_boundary(shape.length[index] - 1, self.block_size)
            found.add((shape.node_above(shape.end_node[index], boundary), boundary))
        for node in range(1, shape.num_nodes):
            if len(shape.children[node]) > 1 and shape.conversations_below[node] > 1:
                boundary = last_boundary(shape.end[node], self.block_size)
                found.add((shape.node_above(node, boundary), boundary))
        return {place for place in found if place[1]}


def _with_gain(
    shape: TreeShape, places: Iterable[Place], held: Held, min_gain_tokens: int
) -> list[_Candidate]:
    """Those that save enough over the nearest one above them, linked, with the held ones among them."""
    already = set(held_places(held))
    by_node: dict[int, list[_Candidate]] = {}
    taken = []
    for place in sorted({*places, *already}, key=lambda place: (place[1], place[0])):
        node = place[0]
        while node != ROOT and node not in by_node:
            node = shape.parent[node]
        above = by_node[node][-1] if node != ROOT else None
        candidate = _Candidate(
            place, shape.conversations_below[place[0]], above, written=place not in already
        )
        if candidate.gain >= min_gain_tokens or not candidate.written:
            by_node.setdefault(place[0], []).append(candidate)
            taken.append(candidate)
            if above is not None:
                above.below[candidate] = None
    return taken


def _drop_least(candidates: list[_Candidate], footprint: Footprint, total: int, budget_bytes: int) -> int:
    """Take out what saves the fewest tokens per byte until the rest fits; returns its bytes."""
    entries = [(one.value(footprint), number) for number, one in enumerate(candidates) if one.written]
    number_of = {one: number for number, one in enumerate(candidates)}
    heapify(entries)
    while total > budget_bytes and entries:
        value, number = heappop(entries)
        least = candidates[number]
        if not least.chosen or value != least.value(footprint):
            continue
        least.chosen = False
        total -= footprint.snapshot_bytes(least.gain)
        for one in least.below:
            before = one.gain
            one.above = least.above
            if one.written:
                total += footprint.snapshot_bytes(one.gain) - footprint.snapshot_bytes(before)
                heappush(entries, (one.value(footprint), number_of[one]))
        if least.above is not None:
            del least.above.below[least]
            least.above.below |= least.below
    return total
