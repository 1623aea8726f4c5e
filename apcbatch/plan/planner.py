"""Make the plan: the order of the requests, where each resumes, and which snapshots it keeps for which readers.

A snapshot is kept, until its last reader, at each position from which a later request resumes: the end of the longest
prefix of its prompt that was computed before. Beyond the memory limit the one is dropped that saves the fewest tokens
per byte and per request until its next use (eviction.py). For the next window those are kept that its requests resume
from, in a fourth of the memory; for future runs the last boundaries of conversations and of the prefixes that they
share. Of these two kinds, those that save the fewest tokens per byte are dropped first (future_runs.py).

Invariants: requests that run one after the other in the plan's order resume exactly where the plan says, and every
snapshot kept for this run is read; without a memory limit each resumes where it would if every position were kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from apcbatch.plan.eviction import EvictionSimulation
from apcbatch.plan.footprint import Footprint
from apcbatch.plan.future_runs import FutureRuns
from apcbatch.plan.prefix_tree import PrefixTree
from apcbatch.plan.reuse_simulation import (
    NOWHERE,
    Held,
    MemoryUse,
    Owners,
    PlannedSnapshot,
    SnapshotPlan,
    TreePoint,
    find_ideals,
    held_by_node,
    measure_memory,
    plan_without_limit,
    simulate_all,
)
from apcbatch.plan.tree_shape import ORDERS, Order, TreeShape
from apcbatch.types import RequestPlan

LARGEST_SHARE = 4  # snapshots for the next window take at most a fourth of the memory for snapshots
LONG_FIRST_SHARE = 2  # snapshots of `long first` take at most half of it, unless those of `short first` take more
MOST_WAITING = 64  # maximum snapshots of a path with `long first`


@dataclass(frozen=True)
class HandedOn:
    """Snapshot that is kept after its window, for a request of the next one. request: index of the first request that
    resumes from it; 0 is the first request after the window. was_read: whether a request has resumed from it."""

    request: int
    position: int
    was_read: bool


class ForLater(NamedTuple):
    """Snapshots kept for future runs. snapshots: number of those kept only for these. num_bytes: bytes of all."""

    snapshots: int
    num_bytes: int


@dataclass(frozen=True)
class Plan:
    """The plan of one window: the first requests of a tree. The others, the requests ahead, are those known so far of
    the next window.

    order: request indexes. requests: by index. leaders: by index, the request that computes the snapshot it resumes
    from; None if it resumes from nothing, or from a snapshot held before. snapshots_written: snapshots kept for this
    run, each read at least once. snapshots_read: those, and the snapshots held before that requests resume from.
    written_bytes: bytes of those kept for this run, each with the KV since the nearest kept ancestor.
    for_later: by block size, what is kept for future runs; the requests have that of the planner's block size.
    peak_live_*: maximum number and bytes of live snapshots at any time if requests run one after the other.

    handed_on: snapshots kept beyond this window's last request. The plan of the request that computes one counts one
    reader more for it. new_readers: by snapshot that the last window handed on, the number of its readers besides that
    one: -1 if there is none.
    """

    order: list[int]
    requests: list[RequestPlan]
    leaders: list[int | None]
    prompt_tokens: int
    unique_tokens: int
    cached_tokens: int
    ideal_tokens: int
    snapshots_written: int
    snapshots_read: int
    written_bytes: int
    for_later: Mapping[int, ForLater]
    peak_live_snapshots: int
    peak_live_bytes: int
    handed_on: list[HandedOn]
    new_readers: list[int]

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


@dataclass(frozen=True)
class Planner:
    """Plans of one input. Snapshots for future runs lie at multiples of block_size.

    capacity_bytes: budget for this run's live snapshots, without those held before; None for no limit. For future
    runs: min_gain_tokens, minimum tokens that a snapshot saves over its nearest kept ancestor; later_budget_bytes,
    maximum bytes of these snapshots on disk (None: no limit, 0: none are kept).
    """

    block_size: int
    order: Order = "short first"
    footprint: Footprint = Footprint(1)
    capacity_bytes: int | None = None
    min_gain_tokens: int = 1
    later_budget_bytes: int | None = 0

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size is {self.block_size}; expected at least 1 token")
        if self.min_gain_tokens < 1:
            raise ValueError(f"min_gain_tokens is {self.min_gain_tokens}; expected at least 1 token")
        if self.order not in ORDERS:
            raise ValueError(f"order is {self.order!r}; expected one of {', '.join(ORDERS)}")

    def plan(
        self,
        tree: PrefixTree,
        held: Iterable[TreePoint] = (),
        num_requests: int | None = None,
        handed_over: Sequence[HandedOn] = (),
        block_sizes: Iterable[int] = (),
    ) -> Plan:
        """Return the plan for the first requests of a tree.

        held: (node, position) of the snapshots that exist before the run and stay; see PrefixTree.keys.
        num_requests: number of requests to plan; those after them are ahead. None: all. handed_over: what the plan of
        the last window handed on. block_sizes: others at which to find what is kept for future runs; nothing else
        depends on the block size.
        """
        shape, stored = TreeShape(tree), set(held)
        num_requests = shape.num_requests if num_requests is None else num_requests
        here = [(shape.node_above(shape.end_node[one.request], one.position), one.position) for one in handed_over]
        held_at = held_by_node([*stored, *here])
        order: list[int] = []
        ahead: list[int] = []
        for index in self._order(shape, held_at):
            (order if index < num_requests else ahead).append(index)
        in_memory = set(here)
        readers_ahead = self._readers_ahead(shape, order, ahead, stored, in_memory)
        lasting = {*in_memory, *readers_ahead}
        lasting_bytes = self._bytes(shape, lasting)
        room = None if self.capacity_bytes is None else max(0, self.capacity_bytes - lasting_bytes)
        snapshots, owners, memory = replace(self, capacity_bytes=room).plan_snapshots(shape, order, held_at)
        later = {
            block_size: FutureRuns(block_size, self.min_gain_tokens, self.later_budget_bytes, self.footprint).choose(
                shape, owners, held_by_node(stored)
            )
            for block_size in {self.block_size, *block_sizes}
        }
        ideals = find_ideals(shape, order, held_at)
        kept_by, this_run = snapshots.kept_by(), {snapshot.point for snapshot in snapshots.kept}
        reads = Counter(snapshots.source[index] for index in order)
        for index in order:
            if snapshots.source[index] in in_memory:  # counted in lasting_bytes
                memory.keep_bytes[index] -= self.footprint.pool_bytes(snapshots.source[index][1])
        was_read = {point for point, one in zip(here, handed_over, strict=True) if one.was_read or reads[point]}
        for point in readers_ahead:
            owner = owners.owner(point) if point not in in_memory else None
            if owner is not None:
                kept_by.setdefault(owner, []).append(PlannedSnapshot(point, owner, [num_requests]))
        later_by = later[self.block_size].by_owner(owners)
        made = {  # in running order, so that a caller frees them in the order of their memory
            index: _request_plan(index, snapshots.source[index][1], kept_by, later_by, ideals, memory, lasting_bytes)
            for index in order
        }
        return Plan(
            order=order,
            requests=[made[index] for index in range(num_requests)],
            leaders=[None if snapshot is None else snapshot.owner for snapshot in snapshots.from_kept[:num_requests]],
            prompt_tokens=sum(shape.length[:num_requests]),
            unique_tokens=shape.unique_tokens,
            cached_tokens=sum(snapshots.source[index][1] for index in order),
            ideal_tokens=sum(ideals[:num_requests]),
            snapshots_written=len(snapshots.kept) + len(set(readers_ahead) - this_run - in_memory),
            snapshots_read=len(snapshots.kept)
            + snapshots.num_held_read
            - sum(one.was_read and reads[point] > 0 for point, one in zip(here, handed_over, strict=True)),
            written_bytes=_written_bytes(snapshots, kept_by, self.footprint),
            for_later={
                block_size: ForLater(sum(point not in this_run for point in kept.points), kept.num_bytes)
                for block_size, kept in later.items()
            },
            peak_live_snapshots=memory.peak_snapshots + len(lasting),
            peak_live_bytes=memory.peak_bytes + lasting_bytes,
            handed_on=[
                HandedOn(index - num_requests, point[1], point in was_read or point in this_run)
                for point, index in readers_ahead.items()
            ],
            new_readers=[reads[point] + (point in readers_ahead) - 1 for point in here],
        )

    def _order(self, shape: TreeShape, held: Held) -> list[int]:
        """Return the running order. `long first` takes the longest parts that fit in half of capacity_bytes."""
        most, share = MOST_WAITING, max(0, self.capacity_bytes or 0) // LONG_FIRST_SHARE
        while self.order == "long first" and self.capacity_bytes is not None and most > 1:
            order = shape.order(self.order, most)
            source, owners = simulate_all(shape, order, held)
            memory = measure_memory(plan_without_limit(source, owners, order, held), order, self.footprint)
            if memory.peak_bytes <= share:
                return order
            most = min(most - 1, most * share // memory.peak_bytes)
        return shape.order(self.order, max(1, most))

    def _readers_ahead(
        self, shape: TreeShape, order: list[int], ahead: list[int], stored: Iterable[TreePoint], here: set[TreePoint]
    ) -> dict[TreePoint, int]:
        """Return the snapshots to hand on, each with the first request ahead that resumes from it: of those that this
        window makes or has, the most valuable ones that fit. stored, here: held before and to stay; handed over."""
        found: dict[TreePoint, int] = {}
        if ahead:
            source, owners = simulate_all(shape, order + ahead, held_by_node([*stored, *here]))
            unmade, later = {NOWHERE, *stored}, set(ahead)
            for index in ahead:
                point = source[index]
                if point not in unmade and (point in here or owners.owner(point) not in later):
                    found.setdefault(point, index)
        most = None if self.capacity_bytes is None else self.capacity_bytes // LARGEST_SHARE
        fitting = FutureRuns(self.block_size, 1, most, self.footprint).fit(shape, found, {})
        return {point: found[point] for point in fitting.points}

    def _bytes(self, shape: TreeShape, points: Collection[TreePoint]) -> int:
        """Return the most bytes that snapshots at these points take together."""
        states = FutureRuns(self.block_size, 1, None, self.footprint).fit(shape, points, {})
        return states.num_bytes + len(points) * self.footprint.page_bytes

    def plan_snapshots(
        self, shape: TreeShape, order: Sequence[int], held: Held
    ) -> tuple[SnapshotPlan, Owners, MemoryUse]:
        """Return the snapshots kept for this run, the request that computes each point, and the memory that they
        use."""
        source, owners = simulate_all(shape, order, held)
        snapshots = plan_without_limit(source, owners, order, held)
        memory = measure_memory(snapshots, order, self.footprint)
        if self.capacity_bytes is not None and memory.peak_bytes > self.capacity_bytes:
            eviction = EvictionSimulation(shape, order, held, self.footprint, self.capacity_bytes)
            snapshots = eviction.run(source)
            owners, memory = snapshots.owners(shape, order), measure_memory(snapshots, order, self.footprint)
        return snapshots, owners, memory


def _request_plan(
    index: int,
    resume_at: int,
    kept_by: Mapping[int, Sequence[PlannedSnapshot]],
    later_by: Mapping[int, Sequence[int]],
    ideals: Sequence[int],
    memory: MemoryUse,
    lasting_bytes: int,
) -> RequestPlan:
    """Make the plan of a request. lasting_bytes: bytes of the snapshots that outlive a window, live all the time."""
    reads: dict[int, int] = {}
    for snapshot in kept_by.get(index, ()):
        position = snapshot.point[1]
        reads[position] = reads.get(position, 0) + len(snapshot.readers)
    return RequestPlan(
        resume_at=resume_at,
        keep=tuple(sorted(reads)),
        reads=tuple(reads[position] for position in sorted(reads)),
        keep_for_later=tuple(later_by.get(index, ())),
        ideal=ideals[index],
        live_bytes=memory.live_bytes[index] + lasting_bytes,
        keep_bytes=memory.keep_bytes[index],
    )


def _written_bytes(
    snapshots: SnapshotPlan, kept_by: Mapping[int, Sequence[PlannedSnapshot]], footprint: Footprint
) -> int:
    """Return the bytes of all snapshots, each with the KV since the nearest ancestor that its owner resumed from or
    kept."""
    total = 0
    for owner, own in kept_by.items():
        above = snapshots.source[owner][1]
        for position in sorted({snapshot.point[1] for snapshot in own}):
            total += footprint.snapshot_bytes(position - above)
            above = position
    return total
