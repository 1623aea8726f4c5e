"""Simulate reuse: where each request resumes, and which snapshots that takes, by the engine's rules on the tree.

Requests run one after the other; later ones may resume from what earlier ones have computed. Invariant: the computed
part of an edge reaches from some position to the edge's end, because every request that enters an edge goes to its end.

An example with block size 4 and the order 0, 1, 2: request 0 has 10 tokens, request 1 has 14 and shares 9 of them with
request 0, request 2 shares 6 with both. If every boundary is kept, 1 resumes from 8 and 2 from 4, so the plan keeps 4
and 8 of request 0, each for one reader; 12 of request 1 has no reader and is not kept.

This is the exact plan without a memory limit; with one, see eviction.py.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from apcbatch.plan.footprint import Footprint, PageLedger, PageRun
from apcbatch.plan.prefix_tree import ROOT
from apcbatch.plan.tree_shape import TreeShape

TreePoint = tuple[int, int]  # a node and a position on its edge
Held = Mapping[int, Sequence[int]]  # by node: positions on its edge, ascending
NOWHERE: TreePoint = (ROOT, 0)  # where a request begins that resumes from no snapshot


def held_by_node(points: Iterable[TreePoint]) -> dict[int, list[int]]:
    """Group points by node, with ascending positions."""
    by_node: dict[int, list[int]] = {}
    for node, position in sorted(set(points)):
        by_node.setdefault(node, []).append(position)
    return by_node


def held_points(held: Held) -> Iterator[TreePoint]:
    """Return the inverse of held_by_node."""
    return ((node, position) for node, positions in held.items() for position in positions)


class Owners:
    """Index of the request that computed each point first."""

    def __init__(self, shape: TreeShape) -> None:
        self._shape = shape
        self._begin = array("i", shape.end)
        # By node: the first request that computes some of its edge, and from where; (begin, request) of the others.
        self._first, self._first_begin = array("i", [0]) * shape.num_nodes, array("i", shape.end)
        self._others: dict[int, list[tuple[int, int]]] = {}

    def computed_from(self, node: int) -> int:
        """Return the position after which a node's edge has been computed; the edge's end if none of it has."""
        return self._begin[node]

    def record(self, index: int, resume_at: int) -> None:
        """Record that a request computes all tokens after the position it resumes at."""
        shape, node = self._shape, self._shape.end_node[index]
        while node != ROOT and shape.end[node] > resume_at:
            begin = max(shape.begin[node], resume_at)
            if begin < self._begin[node]:
                if self._begin[node] == shape.end[node]:
                    self._first_begin[node], self._first[node] = begin, index
                else:
                    self._others.setdefault(node, []).append((begin, index))
                self._begin[node] = begin
            else:
                return  # every token before this edge is computed or held
            node = shape.parent[node]

    def owner(self, point: TreePoint) -> int | None:
        node, position = point
        if self._first_begin[node] < position:
            return self._first[node]
        return next((index for begin, index in self._others.get(node, ()) if begin < position), None)


def find_ideals(shape: TreeShape, order: Sequence[int], held: Held) -> list[int]:
    """Return, by request, the length of its longest prefix that earlier requests of the order, or held positions,
    cover, without the prompt's last token."""
    covered = [False] * shape.num_nodes
    covered[ROOT] = True
    ideals = [0] * shape.num_requests
    for index in order:
        limit, node = shape.length[index] - 1, shape.end_node[index]
        below = _longest_held(shape, held, node, limit)
        while not covered[node]:
            covered[node] = True
            node = shape.parent[node]
        ideals[index] = max(min(shape.end[node], limit), below)
    return ideals


def simulate_all(shape: TreeShape, order: Sequence[int], held: Held) -> tuple[list[TreePoint], Owners]:
    """Return, by request, the point that it resumes from if every computed position is kept."""
    owners, source = Owners(shape), [NOWHERE] * shape.num_requests
    for index in order:
        node, limit = shape.end_node[index], shape.resumable[index]
        while node != ROOT:
            computed = min(shape.end[node], limit)
            best = _last_at_most(held.get(node, ()), limit)
            if computed > owners.computed_from(node):
                best = max(best, computed)
            if best:
                source[index] = (node, best)
                break
            node = shape.parent[node]
        owners.record(index, source[index][1])
    return source, owners


@dataclass(slots=True, eq=False)
class PlannedSnapshot:
    """Snapshot that is live from the request that computes it (owner) to its last reader.

    readers: the requests that resume from it, in running order.
    """

    point: TreePoint
    owner: int
    readers: list[int] = field(default_factory=list)


@dataclass(slots=True)
class SnapshotPlan:
    """The snapshots kept for requests of this run.

    kept: these snapshots; each is read at least once. source: by request, the point that it resumes from. from_kept: by
    request, the snapshot of `kept` that it resumes from; None if it resumes from nothing, or from a snapshot held
    before.
    """

    kept: list[PlannedSnapshot]
    source: list[TreePoint]
    from_kept: list[PlannedSnapshot | None]

    def kept_by(self) -> dict[int, list[PlannedSnapshot]]:
        """Return the kept snapshots by owner, positions ascending."""
        by_owner: dict[int, list[PlannedSnapshot]] = {}
        for snapshot in sorted(self.kept, key=lambda snapshot: snapshot.point[1]):
            by_owner.setdefault(snapshot.owner, []).append(snapshot)
        return by_owner

    def owners(self, shape: TreeShape, order: Sequence[int]) -> Owners:
        """Return the request that computes each point first if requests resume at `source`."""
        owners = Owners(shape)
        for index in order:
            owners.record(index, self.source[index][1])
        return owners

    @property
    def num_held_read(self) -> int:
        """Number of snapshots held before that requests resume from."""
        pairs = zip(self.source, self.from_kept, strict=True)
        return len({point for point, kept in pairs if kept is None} - {NOWHERE})


def plan_without_limit(source: list[TreePoint], owners: Owners, order: Sequence[int], held: Held) -> SnapshotPlan:
    """Keep exactly the snapshots that requests resume from. source: the points, by request."""
    found: dict[TreePoint, PlannedSnapshot] = {}
    from_kept: list[PlannedSnapshot | None] = [None] * len(source)
    for index in order:
        point = source[index]
        owner = None if point[1] in held.get(point[0], ()) else owners.owner(point)
        if owner is not None:
            snapshot = found.setdefault(point, PlannedSnapshot(point, owner))
            snapshot.readers.append(index)
            from_kept[index] = snapshot
    return SnapshotPlan(list(found.values()), source, from_kept)


@dataclass(slots=True)
class MemoryUse:
    """Live snapshots if requests run one after the other. live_bytes: by request, the bytes when it begins. keep_bytes:
    by request, the bytes that it adds; if it resumes from a snapshot held before, also the bytes of that snapshot in
    the pool. peak_*: maximum number and bytes at any time, without snapshots held before."""

    live_bytes: list[int]
    keep_bytes: list[int]
    peak_snapshots: int = 0
    peak_bytes: int = 0


def measure_memory(snapshots: SnapshotPlan, order: Sequence[int], footprint: Footprint) -> MemoryUse:
    """Simulate the plan, one request after the other.

    A request's new snapshots are written while the one it resumed from is still live.
    """
    ledger, memory = PageLedger(footprint), MemoryUse([0] * len(snapshots.source), [0] * len(snapshots.source))
    kept_by = snapshots.kept_by()
    pages: dict[int, PageRun] = {}  # by owner
    for index in order:
        start, resume_at = snapshots.from_kept[index], snapshots.source[index][1]
        own = kept_by.get(index, ())
        memory.live_bytes[index] = ledger.live_bytes
        if own:
            parent = pages[start.owner] if start is not None else None
            pages[index] = ledger.begin(parent, resume_at)
        for snapshot in own:
            ledger.hold(pages[index], snapshot.point[1])
        memory.keep_bytes[index] = ledger.live_bytes - memory.live_bytes[index]
        memory.peak_snapshots = max(memory.peak_snapshots, ledger.num_live)
        memory.peak_bytes = max(memory.peak_bytes, ledger.live_bytes)
        if start is None and resume_at:
            memory.keep_bytes[index] += footprint.pool_bytes(resume_at)
        elif start is not None and start.readers[-1] == index:
            ledger.release(pages[start.owner], start.point[1])
    return memory


def _longest_held(shape: TreeShape, held: Held, node: int, limit: int) -> int:
    """Return the deepest held position on the path to a node that is at most `limit`; 0 for none."""
    while held and node != ROOT:
        best = _last_at_most(held.get(node, ()), limit)
        if best:
            return best
        node = shape.parent[node]
    return 0


def _last_at_most(ascending: Sequence[int], limit: int) -> int:
    """Return the largest of the numbers up to the limit; 0 for none."""
    count = bisect_right(ascending, limit)
    return ascending[count - 1] if count else 0
