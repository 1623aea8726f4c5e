"""What requests can resume from, and what is kept for that: the engine's rules played on the tree.

Requests are taken one after the other: all that come later in the order may resume from what one has computed.
Invariant: on a node's edge the positions computed so far are those from some position to its end, because every
request that comes by goes to the end of it.

An example with block size 4 and the order 0, 1, 2: request 0 has 10 tokens, 1 shares 9 of them and goes on to 14, 2
shares 6 with both. If every boundary is kept, 1 resumes from 8 and 2 from 4, so the plan keeps 4 and 8 of request 0,
each for one reader; 12 of request 1 is read by nobody and not kept. Under `last` 0 keeps only 8: 1 resumes from it, and
2 finds nothing.

Must not know: tokens. This is the exact plan if memory is no limit; see rationing.py for the other case.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from apcbatch.plan.footprint import Footprint, Ledger, Segment
from apcbatch.plan.prefix_tree import ROOT
from apcbatch.plan.tree_shape import TreeShape
from apcbatch.prefix import last_boundary

Point = tuple[int, int]  # of the tree: a node and a position on its edge
Held = Mapping[int, Sequence[int]]  # by node: positions on its edge, ascending
NOWHERE: Point = (ROOT, 0)


def held_by_node(points: Iterable[Point]) -> dict[int, list[int]]:
    """Places by node, each node's ascending."""
    by_node: dict[int, list[int]] = {}
    for node, position in sorted(set(points)):
        by_node.setdefault(node, []).append(position)
    return by_node


def held_points(held: Held) -> Iterator[Point]:
    """Every held point: held_by_node the other way round."""
    return ((node, position) for node, positions in held.items() for position in positions)


@dataclass(slots=True)
class Reach:
    """How far requests get. source: by request, the point it resumes from. num_kept: the snapshots that were kept.
    num_kv_tokens: the tokens whose KV they hold, each from its nearest kept ancestor on."""

    source: list[Point]
    num_kept: int = 0
    num_kv_tokens: int = 0


class Owners:
    """Which request computed a point first."""

    def __init__(self, shape: TreeShape) -> None:
        self._shape = shape
        self._begin = list(shape.end)
        self._runs: dict[int, list[tuple[int, int]]] = {}  # by node: (begin, request), as they came

    def computed_from(self, node: int) -> int:
        """A node's edge has been computed from this position on; it is the edge's end if nothing has."""
        return self._begin[node]

    def record(self, index: int, resume_at: int) -> None:
        """Note that a request computes everything after the position it resumes at."""
        shape, node = self._shape, self._shape.end_node[index]
        while node != ROOT and shape.end[node] > resume_at:
            begin = max(shape.begin[node], resume_at)
            if begin < self._begin[node]:
                self._begin[node] = begin
                self._runs.setdefault(node, []).append((begin, index))
            elif begin == shape.begin[node]:
                return  # whoever computed this had all before it: computed, or held
            node = shape.parent[node]

    def owner(self, point: Point) -> int | None:
        """The first request that computed a point; None for none."""
        node, position = point
        return next((index for begin, index in self._runs.get(node, ()) if begin < position), None)


@dataclass(slots=True)
class Ideals:
    """By request. tokens: the longest prefix that an earlier one of the order or a held position covers, without the
    prompt's last token. forked: whether an earlier one goes on otherwise from where the prompt leaves all of them."""

    tokens: list[int]
    forked: list[bool]


def find_ideals(shape: TreeShape, order: Sequence[int], held: Held) -> Ideals:
    """What earlier requests of the order, and what was held before, cover of each one."""
    covered, goes_on = [False] * shape.num_nodes, [False] * shape.num_nodes
    covered[ROOT] = True
    ideals = Ideals([0] * shape.num_requests, [False] * shape.num_requests)
    for index in order:
        limit, node = shape.length[index] - 1, shape.end_node[index]
        below = _longest_held(shape, held, node, limit)
        while not covered[node]:
            covered[node] = True
            node = shape.parent[node]
            ideals.forked[index], goes_on[node] = goes_on[node], True
        ideals.tokens[index] = max(min(shape.end[node], limit), below)
    return ideals


def reach_all(shape: TreeShape, order: Sequence[int], block_size: int, held: Held) -> tuple[Reach, Owners]:
    """Policy `all`: every boundary that is computed is kept."""
    owners, source = Owners(shape), [NOWHERE] * shape.num_requests
    for index in order:
        node, limit = shape.end_node[index], shape.resumable[index]
        while node != ROOT:
            computed = last_boundary(min(shape.end[node], limit), block_size)
            best = _last_at_most(held.get(node, ()), limit)
            if computed > owners.computed_from(node):
                best = max(best, computed)
            if best:
                source[index] = (node, best)
                break
            node = shape.parent[node]
        owners.record(index, source[index][1])
    reach = Reach(source)
    for node in range(1, shape.num_nodes):
        reach.num_kept += shape.end[node] // block_size - owners.computed_from(node) // block_size
    reach.num_kv_tokens = reach.num_kept * block_size
    return reach, owners


def reach_last(shape: TreeShape, order: Sequence[int], block_size: int, held: Held) -> Reach:
    """Policy `last`: of each prompt the last boundary is kept, if it lies beyond what was resumed from."""
    reach = Reach([NOWHERE] * shape.num_requests)
    kept = {node: list(positions) for node, positions in held.items()}
    for index in order:
        end_node, length = shape.end_node[index], shape.length[index]
        node = end_node
        while node != ROOT:
            best = _last_at_most(kept.get(node, ()), shape.resumable[index])
            if best:
                reach.source[index] = (node, best)
                break
            node = shape.parent[node]
        resume_at, last = reach.source[index][1], last_boundary(length, block_size)
        positions = kept.setdefault(shape.node_above(end_node, last), [])
        if resume_at < last and last not in positions:
            insort(positions, last)
            reach.num_kept += 1
            reach.num_kv_tokens += last - resume_at
    return reach


@dataclass(slots=True, eq=False)
class Kept:
    """One snapshot, live from the request that computes it to the last one that resumes from it.

    owner: the request that computes it. readers: those that resume from it, in the order of the work.
    """

    point: Point
    owner: int
    readers: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Keeping:
    """What a plan keeps for requests of this run. kept: the snapshots, each read at least once. source: by request,
    the point it resumes from. from_kept: by request, the snapshot of `kept` that it resumes from; None for nothing, or
    a position that was held before."""

    kept: list[Kept]
    source: list[Point]
    from_kept: list[Kept | None]

    def kept_by(self) -> dict[int, list[Kept]]:
        """By owner, ascending."""
        by_owner: dict[int, list[Kept]] = {}
        for snapshot in sorted(self.kept, key=lambda snapshot: snapshot.point[1]):
            by_owner.setdefault(snapshot.owner, []).append(snapshot)
        return by_owner

    def owners(self, shape: TreeShape, order: Sequence[int]) -> Owners:
        """Who computes what first if the requests resume at `source`."""
        owners = Owners(shape)
        for index in order:
            owners.record(index, self.source[index][1])
        return owners

    @property
    def num_held_read(self) -> int:
        """Distinct points that were held before and are read."""
        pairs = zip(self.source, self.from_kept, strict=True)
        return len({point for point, kept in pairs if kept is None} - {NOWHERE})


def keep_all_read(reach: Reach, owners: Owners, order: Sequence[int], held: Held) -> Keeping:
    """Keep exactly what is resumed from under policy `all`."""
    found: dict[Point, Kept] = {}
    from_kept: list[Kept | None] = [None] * len(reach.source)
    for index in order:
        point = reach.source[index]
        owner = None if point[1] in held.get(point[0], ()) else owners.owner(point)
        if owner is not None:
            snapshot = found.setdefault(point, Kept(point, owner))
            snapshot.readers.append(index)
            from_kept[index] = snapshot
    return Keeping(list(found.values()), reach.source, from_kept)


@dataclass(slots=True)
class Live:
    """What is live if the requests run one after the other. live_bytes: by request, when it begins; keep_bytes: by
    request, what it adds. peak_*: the most at a time, without what was held before. A request that resumes from
    something held before adds the bytes that this takes in the pool."""

    live_bytes: list[int]
    keep_bytes: list[int]
    peak_snapshots: int = 0
    peak_bytes: int = 0


def measure_live(keeping: Keeping, order: Sequence[int], footprint: Footprint) -> Live:
    """Play the plan through, one request after the other.

    A request's new snapshots are written while the one it resumed from is still there.
    """
    ledger, live = Ledger(footprint), Live([0] * len(keeping.source), [0] * len(keeping.source))
    kept_by = keeping.kept_by()
    segments: dict[int, Segment] = {}
    for index in order:
        start, resume_at = keeping.from_kept[index], keeping.source[index][1]
        own = kept_by.get(index, ())
        live.live_bytes[index] = ledger.live_bytes
        if own:
            parent = segments[start.owner] if start is not None else None
            segments[index] = ledger.begin(parent, resume_at)
        for snapshot in own:
            ledger.hold(segments[index], snapshot.point[1])
        live.keep_bytes[index] = ledger.live_bytes - live.live_bytes[index]
        live.peak_snapshots = max(live.peak_snapshots, ledger.num_live)
        live.peak_bytes = max(live.peak_bytes, ledger.live_bytes)
        if start is None and resume_at:
            live.keep_bytes[index] += footprint.pool_bytes(resume_at)
        elif start is not None and start.readers[-1] == index:
            ledger.release(segments[start.owner], start.point[1])
    return live


def _longest_held(shape: TreeShape, held: Held, node: int, limit: int) -> int:
    """The longest held position on the path to a node, up to a limit."""
    while held and node != ROOT:
        best = _last_at_most(held.get(node, ()), limit)
        if best:
            return best
        node = shape.parent[node]
    return 0


def _last_at_most(ascending: Sequence[int], limit: int) -> int:
    """The largest of the numbers up to the limit; 0 for none."""
    count = bisect_right(ascending, limit)
    return ascending[count - 1] if count else 0
