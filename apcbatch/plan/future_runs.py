"""Which snapshots to keep for future runs: where each conversation would go on, and the stems that they share.

An example without KV, with block size 4: three conversations share 20 tokens, then they have 60, 62 and 80. Candidates
are 20, which gains 20 tokens for each of the three, and 56, 60 and 76, which serve one each and gain 36, 40 and 56
over it. A budget for three snapshots drops 56, which saves the fewest tokens for its bytes; a budget for one keeps 20,
which saves 60 tokens, and drops 76, which saves 56.

Must not know: this run's order and what it keeps for itself. Invariants: each saves at least the minimum gain over its
nearest kept ancestor; all together fit the byte budget, and what saves the fewest tokens per byte goes first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from apcbatch.plan.footprint import Footprint
from apcbatch.plan.prefix_tree import ROOT
from apcbatch.plan.reuse import Held, Owners, Point, held_points
from apcbatch.plan.tree_shape import TreeShape
from apcbatch.prefix import last_boundary


@dataclass(slots=True, eq=False)
class _Candidate:
    """serves: conversations that go through it. chosen: still among those to keep. written: it is not held already."""

    point: Point
    serves: int
    above: _Candidate | None = None
    below: dict[_Candidate, None] = field(default_factory=dict)
    chosen: bool = True
    written: bool = True

    @property
    def gain(self) -> int:
        """Tokens that it saves over the nearest one above it."""
        return self.point[1] - (self.above.point[1] if self.above is not None else 0)

    def value(self, footprint: Footprint) -> float:
        """Tokens saved per byte."""
        return self.gain * self.serves / footprint.snapshot_bytes(self.gain)


@dataclass(frozen=True)
class KeptForLater:
    """points: what to keep, each after those above it. num_bytes: what it takes on disk."""

    points: list[Point]
    num_bytes: int

    def by_owner(self, owners: Owners) -> dict[int, list[int]]:
        """The positions by the request that computes them first, ascending."""
        positions: dict[int, list[int]] = {}
        for point in self.points:
            owner = owners.owner(point)
            assert owner is not None, "only what is computed is kept"
            positions.setdefault(owner, []).append(point[1])
        return positions


@dataclass(frozen=True)
class FutureRuns:
    """What future runs get: snapshots that each save at least min_gain_tokens over the nearest kept ancestor, and
    together take no more than budget_bytes on disk (None: no limit)."""

    block_size: int
    min_gain_tokens: int
    budget_bytes: int | None
    footprint: Footprint

    def choose(self, shape: TreeShape, owners: Owners, held: Held) -> KeptForLater:
        """The points to keep. owners: who computes what in this run; held: what is there already, at no cost.

        A conversation is kept at the last boundary from which both its last prompt and one that goes on from it can
        resume.
        """
        if self.budget_bytes == 0:
            return KeptForLater([], 0)
        points = (point for point in self._candidates(shape) if owners.owner(point) is not None)
        candidates = _with_gain(shape, points, held, self.min_gain_tokens)
        total = sum(self.footprint.snapshot_bytes(one.gain) for one in candidates if one.written)
        if self.budget_bytes is not None and total > self.budget_bytes:
            total = _drop_least(candidates, self.footprint, total, self.budget_bytes)
        return KeptForLater([one.point for one in candidates if one.chosen and one.written], total)

    def _candidates(self, shape: TreeShape) -> set[Point]:
        """Where each conversation would go on, and where conversations part."""
        found = set()
        for index in shape.last_prompts:
            boundary = last_boundary(shape.resumable[index], self.block_size)
            found.add((shape.node_above(shape.end_node[index], boundary), boundary))
        for node in range(1, shape.num_nodes):
            if len(shape.children[node]) > 1 and shape.conversations_below[node] > 1:
                boundary = last_boundary(shape.end[node], self.block_size)
                found.add((shape.node_above(node, boundary), boundary))
        return {point for point in found if point[1]}


def _with_gain(shape: TreeShape, points: Iterable[Point], held: Held, min_gain_tokens: int) -> list[_Candidate]:
    """Those that save enough over the nearest one above them, and the held ones, each linked to that one."""
    already = set(held_points(held))
    by_node: dict[int, list[_Candidate]] = {}
    taken = []
    for point in sorted({*points, *already}, key=lambda point: (point[1], point[0])):
        node = point[0]
        while node != ROOT and node not in by_node:
            node = shape.parent[node]
        above = by_node[node][-1] if node != ROOT else None
        candidate = _Candidate(point, shape.conversations_below[point[0]], above, written=point not in already)
        if candidate.gain >= min_gain_tokens or not candidate.written:
            by_node.setdefault(point[0], []).append(candidate)
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
