"""Choose the snapshots to keep for future runs: the ends of conversations, and the prefixes that they share.

An example without KV, with block size 4: three conversations of 60, 62 and 80 tokens share their first 20. One
candidate is boundary 20, which saves 20 tokens for each of the three. The others are the last boundaries before the
ends: 56, 60 and 76, which serve one conversation each and save 36, 40 and 56 tokens more than 20 does. A budget for
three snapshots drops 56, which saves the fewest tokens for its bytes; a budget for one keeps 20, which saves 60 tokens,
and drops 76, which saves 56.

Invariants: each snapshot saves at least the minimum gain over its nearest kept ancestor; together they fit the byte
budget, and those that save the fewest tokens per byte are dropped first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from apcbatch.plan.footprint import Footprint
from apcbatch.plan.prefix_tree import ROOT
from apcbatch.plan.reuse_simulation import Held, Owners, TreePoint, held_points
from apcbatch.plan.tree_shape import TreeShape
from apcbatch.prefix import last_boundary


@dataclass(slots=True, eq=False)
class _Candidate:
    """Candidate for keeping. above: its nearest candidate ancestor. serves: number of conversations that pass it.
    chosen: not dropped yet. written: not held already, so keeping it costs bytes."""

    point: TreePoint
    serves: int
    above: _Candidate | None
    written: bool
    below: dict[_Candidate, None] = field(default_factory=dict)
    chosen: bool = True

    @property
    def gain(self) -> int:
        """Tokens that it saves each conversation over its nearest candidate ancestor."""
        return self.point[1] - (self.above.point[1] if self.above is not None else 0)

    def value(self, footprint: Footprint) -> float:
        """Return the tokens saved per byte."""
        return self.gain * self.serves / footprint.snapshot_bytes(self.gain)


@dataclass(frozen=True)
class KeptForLater:
    """Snapshots to keep for future runs. points: (node, position) of each, ancestors first. num_bytes: bytes of all on
    disk."""

    points: list[TreePoint]
    num_bytes: int

    def by_owner(self, owners: Owners) -> dict[int, list[int]]:
        """Return the positions by the request that computes them first, ascending."""
        positions: dict[int, list[int]] = {}
        for point in self.points:
            owner = owners.owner(point)
            assert owner is not None, "only points that this run computes are kept"
            positions.setdefault(owner, []).append(point[1])
        return positions


@dataclass(frozen=True)
class FutureRuns:
    """Limits of the snapshots kept for future runs. min_gain_tokens: minimum tokens that each saves over its nearest
    kept ancestor. budget_bytes: maximum bytes of all on disk (None: no limit)."""

    block_size: int
    min_gain_tokens: int
    budget_bytes: int | None
    footprint: Footprint

    def choose(self, shape: TreeShape, owners: Owners, held: Held) -> KeptForLater:
        """Return the points to keep. owners: which request computes each point in this run. held: points whose
        snapshots are in the store already, at no cost.

        A conversation is kept at the last boundary from which both its last prompt and a continuation of it can
        resume.
        """
        if self.budget_bytes == 0:
            return KeptForLater([], 0)
        return self.fit(shape, (point for point in self._candidates(shape) if owners.owner(point) is not None), held)

    def fit(self, shape: TreeShape, points: Iterable[TreePoint], held: Held) -> KeptForLater:
        """Return those of the points that have the minimum gain and fit the budget together. held: as in `choose`."""
        candidates = _with_gain(shape, points, held, self.min_gain_tokens)
        total = sum(self.footprint.snapshot_bytes(one.gain) for one in candidates if one.written)
        if self.budget_bytes is not None and total > self.budget_bytes:
            total = _drop_least(candidates, self.footprint, total, self.budget_bytes)
        return KeptForLater([one.point for one in candidates if one.chosen and one.written], total)

    def _candidates(self, shape: TreeShape) -> set[TreePoint]:
        """Return the last boundary of each conversation, and the last one before each branch between conversations."""
        found = set()
        for index in shape.last_prompts:
            boundary = last_boundary(shape.resumable[index], self.block_size)
            found.add((shape.node_above(shape.end_node[index], boundary), boundary))
        for node, children in shape.children.items():
            if len(children) > 1 and shape.conversations_below[node] > 1:
                boundary = last_boundary(shape.end[node], self.block_size)
                found.add((shape.node_above(node, boundary), boundary))
        return {point for point in found if point[1]}


def _with_gain(shape: TreeShape, points: Iterable[TreePoint], held: Held, min_gain_tokens: int) -> list[_Candidate]:
    """Return the candidates that save at least min_gain_tokens over their nearest candidate ancestor, and all held
    ones. Each is linked to that ancestor."""
    already = set(held_points(held))
    by_node: dict[int, list[_Candidate]] = {}
    taken = []
    for point in sorted({*points, *already}, key=lambda point: (point[1], point[0])):
        node = point[0]
        while node != ROOT and node not in by_node:
            node = shape.parent[node]
        above = by_node[node][-1] if node != ROOT else None
        candidate = _Candidate(point, shape.conversations_below[point[0]], above, point not in already)
        if candidate.gain >= min_gain_tokens or not candidate.written:
            by_node.setdefault(point[0], []).append(candidate)
            taken.append(candidate)
            if above is not None:
                above.below[candidate] = None
    return taken


def _drop_least(candidates: list[_Candidate], footprint: Footprint, total: int, budget_bytes: int) -> int:
    """Drop the candidates that save the fewest tokens per byte until the rest fits; returns the bytes of the rest."""
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
