"""Forecast the reuse of every policy at every block size: the tables of `plan` and `tune-block-size`.

Invariant: if nothing is held before the run, the engine reports the same numbers, request by request, with any number
of concurrent requests; for `all` and `last` only if memory holds all snapshots that they keep. Peaks of memory assume
that requests run one after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from apcbatch.plan.footprint import Footprint
from apcbatch.plan.planner import Plan, Planner
from apcbatch.plan.prefix_tree import PrefixTree
from apcbatch.plan.reuse_simulation import NOWHERE, Reuse, find_ideals, simulate_all, simulate_last
from apcbatch.plan.tree_shape import Order, TreeShape
from apcbatch.plan.windows import Window
from apcbatch.types import Policy


@dataclass(frozen=True)
class PolicyForecast:
    """One policy at one block size.

    resume_at: by request, its cached tokens. snapshots_written: snapshots kept for this run. snapshots_read: snapshots
    that requests resume from, each counted once. snapshots_for_later: snapshots kept only for future runs; 0 for
    policies other than `planned`. written_bytes: bytes of the written snapshots, each with the KV since the nearest
    kept ancestor. store_bytes: bytes of a store after the run. floor_tokens: tokens that an earlier request covers and
    that are not cached, because no snapshot is kept at the right position. peak_live_*: maximum number and bytes of the
    snapshots in memory at any time; for `all` and `last`, which evict nothing, those of all snapshots.
    """

    policy: Policy
    prompt_tokens: int
    resume_at: list[int]
    snapshots_written: int
    snapshots_read: int
    snapshots_for_later: int
    written_bytes: int
    store_bytes: int
    peak_live_snapshots: int
    peak_live_bytes: int
    floor_tokens: int

    @property
    def cached_tokens(self) -> int:
        return sum(self.resume_at)

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens

    @property
    def hit_rate(self) -> float:
        """Cached share of all prompt tokens."""
        return _share(self.cached_tokens, self.prompt_tokens)

    @property
    def ideal_hit_rate(self) -> float:
        """Share of all prompt tokens that an earlier request covers, in the order of this policy."""
        return _share(self.cached_tokens + self.floor_tokens, self.prompt_tokens)


@dataclass(frozen=True)
class Forecast:
    """Shared prefixes of a dataset, and the reuse of each policy: grids[block_size][policy], ascending.

    order: the requests in the order of `planned`. ideal_tokens: prompt tokens that an earlier request covers.
    rewritten_prompts: prompts that do not begin with the whole previous prompt of their conversation; rewritten_tokens:
    tokens computed again for that.
    unstable_templates: conversations whose template rewrites its own past (counted by the caller); without_thoughts:
    those of them in which it takes earlier reasoning out; thought_tokens: part of rewritten_tokens in these.
    """

    requests: int
    prompt_tokens: int
    unique_tokens: int
    ideals: list[int]
    rewritten_prompts: int
    rewritten_tokens: int
    unstable_templates: int
    without_thoughts: int
    thought_tokens: int
    grids: dict[int, dict[Policy, PolicyForecast]]
    order: list[int] = field(default_factory=list)

    @property
    def ideal_tokens(self) -> int:
        """Prompt tokens that an earlier request covers."""
        return sum(self.ideals)

    @property
    def ideal_hit_rate(self) -> float:
        """The share of ideal_tokens in all prompt tokens, which no policy can exceed."""
        return _share(self.ideal_tokens, self.prompt_tokens)


def forecast(
    tree: PrefixTree,
    block_sizes: Iterable[int],
    planner: Planner,
    unstable_templates: int = 0,
    without_thoughts: Collection[int] = (),
    windows: Sequence[Window[None]] = (),
) -> Forecast:
    """Forecast all policies at every block size, with the order, footprint and limits of `planner` (not its block
    size). `all` and `last` have no plan, so a run takes the file's order. unstable_templates: see Forecast.
    without_thoughts: the conversations whose earlier reasoning the template takes out. windows: the prompts of the tree
    as a run plans them; none: all at once."""
    windows = windows or [Window(tree, [], tree.num_requests)]
    shape = TreeShape(tree)
    order = _order(windows, planner.order)
    in_file = find_ideals(shape, shape.order("file"), {})
    ideals = find_ideals(shape, order, {})
    rewritten = list(_rewritten(shape, ideals))
    return Forecast(
        requests=shape.num_requests,
        prompt_tokens=shape.prompt_tokens,
        unique_tokens=shape.unique_tokens,
        ideals=ideals,
        rewritten_prompts=len(rewritten),
        rewritten_tokens=sum(tokens for _, tokens in rewritten),
        unstable_templates=unstable_templates,
        without_thoughts=len(without_thoughts),
        thought_tokens=sum(tokens for conversation, tokens in rewritten if conversation in without_thoughts),
        grids={
            block_size: _grid(shape, windows, sum(ideals), sum(in_file), replace(planner, block_size=block_size))
            for block_size in sorted(set(block_sizes))
        },
        order=order,
    )


def _grid(
    shape: TreeShape, windows: Sequence[Window[None]], ideal: int, ideal_in_file: int, planner: Planner
) -> dict[Policy, PolicyForecast]:
    size, footprint, in_file = planner.block_size, planner.footprint, shape.order("file")
    return {
        "all": _forecast_unplanned("all", shape, simulate_all(shape, in_file, size, {})[0], ideal_in_file, footprint),
        "last": _forecast_unplanned("last", shape, simulate_last(shape, in_file, size, {}), ideal_in_file, footprint),
        "planned": _forecast_planned(windows, ideal, planner),
    }


def _forecast_unplanned(
    policy: Policy, shape: TreeShape, reuse: Reuse, ideal: int, footprint: Footprint
) -> PolicyForecast:
    """Forecast a policy without a plan (`all`, `last`): each kept snapshot stays, and is stored."""
    num_bytes = reuse.num_kept * footprint.state_bytes + reuse.num_kv_tokens * footprint.kv_token_bytes
    resume_at = [position for _, position in reuse.source]
    return PolicyForecast(
        policy=policy,
        prompt_tokens=shape.prompt_tokens,
        resume_at=resume_at,
        snapshots_written=reuse.num_kept,
        snapshots_read=len(set(reuse.source) - {NOWHERE}),
        snapshots_for_later=0,
        written_bytes=num_bytes,
        store_bytes=num_bytes,
        peak_live_snapshots=reuse.num_kept,
        peak_live_bytes=num_bytes,
        floor_tokens=ideal - sum(resume_at),
    )


def _forecast_planned(windows: Sequence[Window[None]], ideal: int, planner: Planner) -> PolicyForecast:
    plans: list[Plan] = []
    for window in windows:
        handed_over = plans[-1].handed_on if plans else []
        plans.append(planner.plan(window.tree, (), window.num_requests, handed_over))
    resume_at = [request.resume_at for plan in plans for request in plan.requests]
    return PolicyForecast(
        policy="planned",
        prompt_tokens=sum(plan.prompt_tokens for plan in plans),
        resume_at=resume_at,
        snapshots_written=sum(plan.snapshots_written for plan in plans),
        snapshots_read=sum(plan.snapshots_read for plan in plans),
        snapshots_for_later=sum(plan.snapshots_for_later for plan in plans),
        written_bytes=sum(plan.written_bytes for plan in plans),
        store_bytes=sum(plan.later_bytes for plan in plans),
        peak_live_snapshots=max((plan.peak_live_snapshots for plan in plans), default=0),
        peak_live_bytes=max((plan.peak_live_bytes for plan in plans), default=0),
        floor_tokens=ideal - sum(resume_at),
    )


def _order(windows: Iterable[Window[None]], order: Order) -> list[int]:
    """Return all requests in running order: window after window."""
    found: list[int] = []
    for window in windows:
        begin = len(found)
        found += [begin + index for index in TreeShape(window.tree).order(order) if index < window.num_requests]
    return found


def _rewritten(shape: TreeShape, ideals: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Yield, for each prompt that does not begin with the whole previous prompt of its conversation, the conversation,
    and how many more of the prompt's tokens would be covered if it did."""
    before: dict[int, int] = {}
    for index, conversation in enumerate(shape.conversation):
        other = before.get(conversation)
        before[conversation] = index
        if other is not None and not shape.extends(index, other):
            yield conversation, max(0, min(shape.length[other], shape.resumable[index]) - ideals[index])


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
