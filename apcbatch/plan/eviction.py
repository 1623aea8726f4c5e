"""Eviction under a memory budget: simulate the order and drop the least valuable snapshot while they exceed the budget.

As in Belady's algorithm, all future uses are known. Each later request is served by the deepest live snapshot on its
path, where it would resume. A snapshot's value is the tokens that it saves over the nearest live ancestor, per byte,
divided by the number of requests until its next use. The value is 0 while deeper snapshots serve all requests that pass
this one. So a prefix that all requests fall back to is dropped last.

An example without KV and a budget of two snapshots. The snapshot at 40 is on the path of all requests and serves the
request 2 steps ahead; 64 is below it and serves the request 4 steps ahead. A request has just computed 100, below 64,
which serves the request 3 steps ahead.
    40 saves 40 tokens, next used in 2: 40 / 2 = 20
    64 saves 24 over 40, next used in 4: 24 / 4 = 6
    100 saves 36 over 64, next used in 3: 36 / 3 = 12
64 is dropped. The request that it served falls back to 40, and 100 now saves 60: 60 / 3 = 20.

Invariant: live snapshots never exceed the capacity, except for the snapshot that is being read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from apcbatch.plan.footprint import Footprint, PageLedger, PageRun
from apcbatch.plan.prefix_tree import ROOT
from apcbatch.plan.reuse_simulation import NOWHERE, Held, PlannedSnapshot, SnapshotPlan, TreePoint, held_points
from apcbatch.plan.tree_shape import TreeShape

NEVER = float("inf")
FAR = 1e18
FIRST_ROWS = 64


@dataclass(slots=True, eq=False)
class _LiveSnapshot:
    """A live snapshot.

    above: its nearest live ancestor. below: the snapshots whose nearest live ancestor it is (a dict for its order).
    planned: None for a snapshot held before the plan, which costs nothing and stays. uses: a heap of the ranks
    (indexes into the order) that it serves; some are out of date. row: its row in the table of values.
    """

    point: TreePoint
    above: _LiveSnapshot | None
    planned: PlannedSnapshot | None = None
    pages: PageRun | None = None
    uses: list[int] = field(default_factory=list)
    below: dict[_LiveSnapshot, None] = field(default_factory=dict)
    row: int = -1


class _Values:
    """The values of the live snapshots, one row each: one vector operation finds the least valuable."""

    def __init__(self) -> None:
        self._gain = np.full(FIRST_ROWS, NEVER)  # tokens saved per byte; NEVER in rows that are free
        self._next_use = np.full(FIRST_ROWS, FAR)
        self._live: list[_LiveSnapshot | None] = [None] * FIRST_ROWS
        self._free = list(range(FIRST_ROWS - 1, -1, -1))

    def add(self, live: _LiveSnapshot) -> None:
        if not self._free:
            size = len(self._live)
            self._free = list(range(2 * size - 1, size - 1, -1))
            self._gain = np.concatenate([self._gain, np.full(size, NEVER)])
            self._next_use = np.concatenate([self._next_use, np.full(size, FAR)])
            self._live += [None] * size
        live.row = self._free.pop()
        self._live[live.row] = live

    def set(self, live: _LiveSnapshot, gain: float, next_use: float) -> None:
        """Set the value of a live snapshot. gain: tokens saved per byte. next_use: rank of the next request that the
        snapshot serves; NEVER if there is no such request."""
        self._gain[live.row], self._next_use[live.row] = gain, next_use

    def remove(self, live: _LiveSnapshot) -> None:
        self._live[live.row] = None
        self._gain[live.row], self._next_use[live.row] = NEVER, FAR
        self._free.append(live.row)
        live.row = -1

    def least(self, now: int, pinned: _LiveSnapshot) -> _LiveSnapshot | None:
        """Return the least valuable snapshot except the pinned one; None if there is no other. now: rank of the request
        that runs."""
        value = self._gain / (self._next_use - now)
        if pinned.row >= 0:
            value[pinned.row] = NEVER
        row = int(value.argmin())
        return self._live[row] if value[row] < NEVER else None


class EvictionSimulation:
    """One pass over the order with a limit on the bytes of live snapshots.

    Snapshots live at candidate points: those that requests would resume from without a limit."""

    def __init__(
        self,
        shape: TreeShape,
        order: Sequence[int],
        held: Held,
        footprint: Footprint,
        capacity: int,
    ) -> None:
        self._shape, self._order, self._footprint, self._capacity = shape, order, footprint, capacity
        self._root = _LiveSnapshot(NOWHERE, None)
        self._serving = [self._root] * len(order)  # by rank
        self._live_at: dict[int, dict[int, _LiveSnapshot]] = {}
        self._values, self._ledger = _Values(), PageLedger(footprint)
        self._ending: dict[int, list[_LiveSnapshot]] = {}  # rank -> live snapshots that no later request passes
        self._kept: list[PlannedSnapshot] = []
        self._candidates: dict[int, list[int]] = {}
        self._enter, self._leave = _intervals(shape)
        self._passing: dict[int, list[int]] = {}
        self._held = held

    def run(self, wanted: Sequence[TreePoint]) -> SnapshotPlan:
        """Run the simulation and return its plan.

        wanted: points at which requests would resume without a limit. They include the last boundary before each
        branch, to which requests fall back when deeper snapshots are dropped.
        """
        self._prepare(wanted)
        count = self._shape.num_requests
        source: list[TreePoint] = [NOWHERE] * count
        from_kept: list[PlannedSnapshot | None] = [None] * count
        for rank, index in enumerate(self._order):
            start = self._serving[rank]
            source[index], from_kept[index] = start.point, start.planned
            if start.planned is not None:
                start.planned.readers.append(index)
                self._refresh(start, rank)
            self._keep_from(index, rank, start)
            while self._ledger.live_bytes > self._capacity:
                least = self._values.least(rank, start)
                if least is None:
                    break
                self._drop(least, rank)
            for live in self._ending.pop(rank, ()):
                if live.row >= 0:
                    self._drop(live, rank)
        return SnapshotPlan(self._kept, source, from_kept)

    def _prepare(self, wanted: Sequence[TreePoint]) -> None:
        """Find the requests that pass each candidate. Assign each request to the deepest snapshot held before the plan
        from which it can resume."""
        shape = self._shape
        for node, position in sorted(set(wanted) - {NOWHERE}):
            if position not in self._held.get(node, ()):
                self._candidates.setdefault(node, []).append(position)
        for rank, index in enumerate(self._order):
            node = shape.end_node[index]
            while node != ROOT:
                if node in self._candidates or node in self._held:
                    self._passing.setdefault(node, []).append(rank)
                node = shape.parent[node]
        for node, position in sorted(held_points(self._held), key=lambda point: point[1]):
            ranks = self._passing_after(node, position, -1)
            if ranks:
                live = _LiveSnapshot((node, position), self._serving[ranks[0]])
                for rank in ranks:
                    self._serving[rank] = live

    def _passing_after(self, node: int, position: int, now: int) -> list[int]:
        """Return the ranks after `now` of the requests that could resume from a point."""
        passing = self._passing.get(node, ())  # none of them, where only requests ahead do
        later = passing[bisect_right(passing, now) :]
        return [rank for rank in later if self._shape.resumable[self._order[rank]] >= position]

    def _keep_from(self, index: int, rank: int, start: _LiveSnapshot) -> None:
        """Keep the candidates that a request computes and a later one would resume from, the deepest first."""
        shape, node, begin = self._shape, self._shape.end_node[index], start.point[1]
        pages: PageRun | None = None
        while node != ROOT and shape.end[node] > begin:
            for position in reversed(self._candidates.get(node, ())):
                if position <= begin or position in self._live_at.get(node, ()):
                    continue
                passing = self._passing_after(node, position, rank)
                uses = [later for later in passing if self._serving[later] is start]
                if uses:
                    if pages is None:
                        pages = self._ledger.begin(start.pages, begin)
                    point = (node, position)
                    live = _LiveSnapshot(point, start, PlannedSnapshot(point, index), pages, uses)
                    self._ending.setdefault(passing[-1], []).append(live)
                    self._add(live, start, rank)
            node = shape.parent[node]

    def _add(self, live: _LiveSnapshot, start: _LiveSnapshot, rank: int) -> None:
        node, position = live.point
        self._live_at.setdefault(node, {})[position] = live
        assert live.pages is not None, "only snapshots held before the plan have no pages"
        self._ledger.hold(live.pages, position)
        self._values.add(live)
        for use in live.uses:
            self._serving[use] = live
        for other in [other for other in start.below if self._is_above(live, other)]:
            del start.below[other]
            live.below[other] = None
            other.above = live
            self._refresh(other, rank)
        start.below[live] = None
        self._refresh(live, rank)
        self._refresh(start, rank)

    def _drop(self, live: _LiveSnapshot, rank: int) -> None:
        """Drop a snapshot: the requests that it served fall back to its nearest live ancestor."""
        above = live.above
        assert above is not None and live.planned is not None and live.pages is not None, "the root is never dropped"
        node, position = live.point
        del self._live_at[node][position]
        self._ledger.release(live.pages, position)
        self._values.remove(live)
        for use in live.uses:
            if use > rank and self._serving[use] is live:
                self._serving[use] = above
                heappush(above.uses, use)
        del above.below[live]
        for other in live.below:
            other.above = above
            above.below[other] = None
            self._refresh(other, rank)
        self._refresh(above, rank)
        if live.planned.readers:
            self._kept.append(live.planned)

    def _refresh(self, live: _LiveSnapshot, rank: int) -> None:
        """Update a snapshot's value."""
        if live.planned is None:
            live.uses.clear()
            return
        while live.uses and (live.uses[0] <= rank or self._serving[live.uses[0]] is not live):
            heappop(live.uses)
        assert live.above is not None, "the root has no value"
        saved = live.point[1] - live.above.point[1]
        next_use = live.uses[0] if live.uses else NEVER
        self._values.set(live, saved / self._footprint.snapshot_bytes(saved), next_use)

    def _is_above(self, live: _LiveSnapshot, other: _LiveSnapshot) -> bool:
        (node, position), (lower, further) = live.point, other.point
        if node == lower:
            return position < further
        return self._enter[node] < self._enter[lower] < self._leave[node]


def _intervals(shape: TreeShape) -> tuple[list[int], list[int]]:
    """Return each node's number in a depth-first walk, and the number after its last descendant's."""
    enter, leave = [0] * shape.num_nodes, [0] * shape.num_nodes
    stack, count = [ROOT], 0
    while stack:
        node = stack.pop()
        if node < 0:
            leave[~node] = count
            continue
        enter[node] = count
        count += 1
        stack += [~node, *shape.children.get(node, ())]
    return enter, leave
