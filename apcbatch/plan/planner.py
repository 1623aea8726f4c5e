"""Make the plan: the order of the requests, where each resumes, and which snapshots it keeps for which readers.

Invariants: requests that run one after the other in the plan's order resume exactly where the plan says, and every
snapshot kept for this run is read; without a memory limit each resumes where it would if every boundary were kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from apcbatch.plan.eviction import EvictionSimulation
from apcbatch.plan.footprint import Footprint
from apcbatch.plan.future_runs import FutureRuns
from apcbatch.plan.prefix_tree import PrefixTree
from apcbatch.plan.reuse_simulation import (
    Held,
    Ideals,
    MemoryUse,
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


@dataclass(frozen=True)
class Plan:
    """The plan of one window.

    order: request indexes. requests: by index. leaders: by index, the request that computes the snapshot it resumes
    from; None if it resumes from nothing, or from a snapshot held before. snapshots_written: snapshots kept for this
    run, each read at least once. snapshots_read: those, and the snapshots held before that requests resume from.
    snapshots_for_later: snapshots kept only for future runs. later_bytes: bytes of all snapshots kept for future runs.
    peak_live_*: maximum number and bytes of live snapshots at any time if requests run one after the other.
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
    snapshots_for_later: int
    later_bytes: int
    peak_live_snapshots: int
    peak_live_bytes: int

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


@dataclass(frozen=True)
class Planner:
    """Plans for one block size.

    capacity_bytes: budget for this run's live snapshots, without those held before; None for no limit. For future
    runs: min_gain_tokens, minimum tokens that a snapshot saves over its nearest kept ancestor; later_budget_bytes,
    maximum bytes of these snapshots on disk (None: no limit, 0: none are kept).
    """

    block_size: int
    order: Order = "auto"
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

    def plan(self, tree: PrefixTree, held: Iterable[TreePoint] = ()) -> Plan:
        """Return the plan for all requests of a tree.

        held: (node, position) of the boundaries whose snapshots exist before the run and stay; see PrefixTree.keys.
        """
        shape, held_at = TreeShape(tree), held_by_node(held)
        order = shape.order(self.order)
        snapshots, memory = self.plan_snapshots(shape, order, held_at)
        owners = snapshots.owners(shape, order)
        later = self.later.choose(shape, owners, held_at)
        ideals = find_ideals(shape, order, held_at)
        this_run = {snapshot.point for snapshot in snapshots.kept}
        return Plan(
            order=order,
            requests=list(_request_plans(ideals, snapshots, later.by_owner(owners), memory)),
            leaders=[None if snapshot is None else snapshot.owner for snapshot in snapshots.from_kept],
            prompt_tokens=shape.prompt_tokens,
            unique_tokens=shape.unique_tokens,
            cached_tokens=sum(resume_at for _, resume_at in snapshots.source),
            ideal_tokens=sum(ideals.tokens),
            snapshots_written=len(snapshots.kept),
            snapshots_read=len(snapshots.kept) + snapshots.num_held_read,
            snapshots_for_later=sum(point not in this_run for point in later.points),
            later_bytes=later.num_bytes,
            peak_live_snapshots=memory.peak_snapshots,
            peak_live_bytes=memory.peak_bytes,
        )

    @property
    def later(self) -> FutureRuns:
        return FutureRuns(self.block_size, self.min_gain_tokens, self.later_budget_bytes, self.footprint)

    def plan_snapshots(self, shape: TreeShape, order: Sequence[int], held: Held) -> tuple[SnapshotPlan, MemoryUse]:
        """Return the snapshots kept for this run, and the memory that they use."""
        reuse, owners = simulate_all(shape, order, self.block_size, held)
        snapshots = plan_without_limit(reuse, owners, order, held)
        memory = measure_memory(snapshots, order, self.footprint)
        if self.capacity_bytes is not None and memory.peak_bytes > self.capacity_bytes:
            eviction = EvictionSimulation(shape, order, held, self.footprint, self.capacity_bytes)
            snapshots = eviction.run(reuse.source)
            memory = measure_memory(snapshots, order, self.footprint)
        return snapshots, memory


def _request_plans(
    ideals: Ideals, snapshots: SnapshotPlan, later_by: Mapping[int, Sequence[int]], memory: MemoryUse
) -> Iterator[RequestPlan]:
    kept_by = snapshots.kept_by()
    for index, (_, resume_at) in enumerate(snapshots.source):
        own = kept_by.get(index, ())
        yield RequestPlan(
            resume_at=resume_at,
            keep=tuple(snapshot.point[1] for snapshot in own),
            reads=tuple(len(snapshot.readers) for snapshot in own),
            keep_for_later=tuple(later_by.get(index, ())),
            ideal=ideals.tokens[index],
            live_bytes=memory.live_bytes[index],
            keep_bytes=memory.keep_bytes[index],
            forked=ideals.forked[index],
        )
