"""The plan: in which order to work, where each request resumes, what each one keeps, for whom, and for how long.

Must not know: text, files, states. Invariants: requests one after the other in the plan's order resume exactly where
the plan says, and what it keeps is read; without a limit on memory each resumes where it would if everything were kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from apcbatch.plan.footprint import Footprint
from apcbatch.plan.future_runs import FutureRuns, KeptForLater
from apcbatch.plan.prefix_tree import PrefixTree
from apcbatch.plan.rationing import Rationing
from apcbatch.plan.reuse import (
    Held,
    Ideals,
    Keeping,
    Live,
    Point,
    find_ideals,
    held_by_node,
    keep_all_read,
    measure_live,
    reach_all,
)
from apcbatch.plan.tree_shape import ORDERS, Order, TreeShape
from apcbatch.types import RequestPlan


@dataclass(frozen=True)
class Plan:
    """order: request indexes. requests: by index. leaders: by index, the request that computes the snapshot
    it resumes from; None if it resumes from nothing, or from what was held before.

    snapshots_written: kept for this run, each of them read at least once; snapshots_read: these, and the held
    ones that are read; snapshots_for_later: kept for future runs alone. later_bytes: everything that is kept
    for future runs. peak_live_*: the most that is live at a time, one request after the other.
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
        """Prompt tokens that are computed."""
        return self.prompt_tokens - self.cached_tokens


@dataclass(frozen=True)
class Planner:
    """Plans for one grid.

    capacity_bytes: room for live snapshots of this run, None for no limit; held ones are not part of it. For
    future runs: min_gain_tokens, what a snapshot must save over its nearest kept ancestor, and
    later_budget_bytes, what they may take on disk (None: no limit, 0: none are kept).
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

    def plan(self, tree: PrefixTree, held: Iterable[Point] = ()) -> Plan:
        """The plan for all requests of a tree.

        held: (node, position) of the boundaries that are there before the run and stay; see PrefixTree.keys.
        """
        shape, there = TreeShape(tree), held_by_node(held)
        order = shape.order(self.order)
        keeping, live = self.keep(shape, order, there)
        owners = keeping.owners(shape, order)
        later = self.later.choose(shape, owners, there)
        ideals = find_ideals(shape, order, there)
        return _assemble(shape, order, ideals, keeping, later, later.by_owner(owners), live)

    @property
    def later(self) -> FutureRuns:
        """What is kept for future runs."""
        return FutureRuns(self.block_size, self.min_gain_tokens, self.later_budget_bytes, self.footprint)

    def keep(self, shape: TreeShape, order: Sequence[int], held: Held) -> tuple[Keeping, Live]:
        """What is kept for this run, and what it weighs."""
        reach, owners = reach_all(shape, order, self.block_size, held)
        keeping = keep_all_read(reach, owners, order, held)
        live = measure_live(keeping, order, self.footprint)
        if self.capacity_bytes is not None and live.peak_bytes > self.capacity_bytes:
            rationing = Rationing(shape, order, held, self.footprint, self.capacity_bytes)
            keeping = rationing.run(reach.source)
            live = measure_live(keeping, order, self.footprint)
        return keeping, live


def _assemble(
    shape: TreeShape,
    order: list[int],
    ideals: Ideals,
    keeping: Keeping,
    later: KeptForLater,
    later_by: Mapping[int, Sequence[int]],
    live: Live,
) -> Plan:
    this_run = {snapshot.point for snapshot in keeping.kept}
    return Plan(
        order=order,
        requests=list(_request_plans(ideals, keeping, later_by, live)),
        leaders=[None if snapshot is None else snapshot.owner for snapshot in keeping.from_kept],
        prompt_tokens=shape.prompt_tokens,
        unique_tokens=shape.unique_tokens,
        cached_tokens=sum(resume_at for _, resume_at in keeping.source),
        ideal_tokens=sum(ideals.tokens),
        snapshots_written=len(keeping.kept),
        snapshots_read=len(keeping.kept) + keeping.num_held_read,
        snapshots_for_later=sum(point not in this_run for point in later.points),
        later_bytes=later.num_bytes,
        peak_live_snapshots=live.peak_snapshots,
        peak_live_bytes=live.peak_bytes,
    )


def _request_plans(
    ideals: Ideals, keeping: Keeping, later_by: Mapping[int, Sequence[int]], live: Live
) -> Iterator[RequestPlan]:
    kept_by = keeping.kept_by()
    for index, (_, resume_at) in enumerate(keeping.source):
        own = kept_by.get(index, ())
        yield RequestPlan(
            resume_at=resume_at,
            keep=tuple(snapshot.point[1] for snapshot in own),
            reads=tuple(len(snapshot.readers) for snapshot in own),
            keep_for_later=tuple(later_by.get(index, ())),
            ideal=ideals.tokens[index],
            live_bytes=live.live_bytes[index],
            keep_bytes=live.keep_bytes[index],
            forked=ideals.forked[index],
        )
