"""What every policy would reuse on every grid, and what stands in the way: the tables of `plan` and `tune-block-size`.

Must not know: text, files, time. The tree is built once; all grids and policies are read off it. Invariant: with
nothing held before, the engine has the same numbers, request by request. That is so however many run side by side, and
for `all` and `last` with room for all they keep. What is live at once is that of one request after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from apcbatch.plan.footprint import Footprint
from apcbatch.plan.planner import Planner
from apcbatch.plan.prefix_tree import PrefixTree
from apcbatch.plan.reuse import NOWHERE, Keeping, Reach, find_ideals, reach_all, reach_last
from apcbatch.plan.tree_shape import TreeShape
from apcbatch.types import Policy


@dataclass(frozen=True)
class PolicyForecast:
    """One policy on one grid.

    resume_at: by request, its cached tokens. snapshots_written: those kept in this run; snapshots_read:
    distinct ones that are resumed from; snapshots_for_later: kept for future runs alone (`planned`).
    written_bytes: what the written ones take, the KV of a token once for each path. store_bytes: what a store would
    hold after the run. floor_tokens: tokens that an earlier request covers and that are not cached, because no snapshot
    is kept at the right position. peak_live_*: the most that is held at a time; `all` and `last` let go of nothing.
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
        """Prompt tokens that are served from a snapshot."""
        return sum(self.resume_at)

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that are computed."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def hit_rate(self) -> float:
        """Cached share of all prompt tokens."""
        return _share(self.cached_tokens, self.prompt_tokens)

    @property
    def ideal_hit_rate(self) -> float:
        """The share that an earlier request covers in the order of this policy."""
        return _share(self.cached_tokens + self.floor_tokens, self.prompt_tokens)


@dataclass(frozen=True)
class Forecast:
    """What a dataset has to share, and what each policy makes of it: grids[block_size][policy], grids ascending.

    ideal_tokens: prompt tokens that an earlier request covers. rewritten_prompts: prompts that do not begin
    with the whole one before them in their conversation; rewritten_tokens: what is computed again for that.
    unstable_templates: conversations whose template rewrites its own past (told by who rendered them).
    """

    requests: int
    prompt_tokens: int
    unique_tokens: int
    ideals: list[int]
    rewritten_prompts: int
    rewritten_tokens: int
    unstable_templates: int
    grids: dict[int, dict[Policy, PolicyForecast]]

    @property
    def ideal_tokens(self) -> int:
        """Prompt tokens that an earlier request covers."""
        return sum(self.ideals)

    @property
    def ideal_hit_rate(self) -> float:
        """Their share of all prompt tokens: what no policy can exceed."""
        return _share(self.ideal_tokens, self.prompt_tokens)


def forecast(tree: PrefixTree, block_sizes: Iterable[int], planner: Planner, unstable_templates: int = 0) -> Forecast:
    """All policies on every grid, in the order, with the footprint and the limits of `planner` (its own grid
    aside). `all` and `last` have no plan, so that a run takes the file's order."""
    shape = TreeShape(tree)
    order = shape.order(planner.order)
    in_file = find_ideals(shape, shape.order("file"), {}).tokens
    ideals = find_ideals(shape, order, {}).tokens
    rewritten = list(_rewritten(shape, ideals))
    return Forecast(
        requests=shape.num_requests,
        prompt_tokens=shape.prompt_tokens,
        unique_tokens=shape.unique_tokens,
        ideals=ideals,
        rewritten_prompts=len(rewritten),
        rewritten_tokens=sum(rewritten),
        unstable_templates=unstable_templates,
        grids={
            block_size: _grid(shape, order, sum(ideals), sum(in_file), replace(planner, block_size=block_size))
            for block_size in sorted(set(block_sizes))
        },
    )


def _grid(
    shape: TreeShape, order: Sequence[int], ideal: int, ideal_in_file: int, planner: Planner
) -> dict[Policy, PolicyForecast]:
    size, footprint, in_file = planner.block_size, planner.footprint, shape.order("file")
    return {
        "all": _keeps_everything("all", shape, reach_all(shape, in_file, size, {})[0], ideal_in_file, footprint),
        "last": _keeps_everything("last", shape, reach_last(shape, in_file, size, {}), ideal_in_file, footprint),
        "planned": _planned(shape, order, ideal, planner),
    }


def _keeps_everything(
    policy: Policy, shape: TreeShape, reach: Reach, ideal: int, footprint: Footprint
) -> PolicyForecast:
    """A policy that does not know what will be read: all it keeps stays, and goes to the store."""
    num_bytes = reach.num_kept * footprint.state_bytes + reach.num_kv_tokens * footprint.kv_token_bytes
    resume_at = [position for _, position in reach.source]
    return PolicyForecast(
        policy=policy,
        prompt_tokens=shape.prompt_tokens,
        resume_at=resume_at,
        snapshots_written=reach.num_kept,
        snapshots_read=len(set(reach.source) - {NOWHERE}),
        snapshots_for_later=0,
        written_bytes=num_bytes,
        store_bytes=num_bytes,
        peak_live_snapshots=reach.num_kept,
        peak_live_bytes=num_bytes,
        floor_tokens=ideal - sum(resume_at),
    )


def _planned(shape: TreeShape, order: Sequence[int], ideal: int, planner: Planner) -> PolicyForecast:
    keeping, live = planner.keep(shape, order, {})
    later = planner.later.choose(shape, keeping.owners(shape, order), {})
    points = {snapshot.point for snapshot in keeping.kept}
    resume_at = [position for _, position in keeping.source]
    return PolicyForecast(
        policy="planned",
        prompt_tokens=shape.prompt_tokens,
        resume_at=resume_at,
        snapshots_written=len(keeping.kept),
        snapshots_read=len(keeping.kept),
        snapshots_for_later=sum(point not in points for point in later.points),
        written_bytes=_written_bytes(keeping, planner.footprint),
        store_bytes=later.num_bytes,
        peak_live_snapshots=live.peak_snapshots,
        peak_live_bytes=live.peak_bytes,
        floor_tokens=ideal - sum(resume_at),
    )


def _written_bytes(keeping: Keeping, footprint: Footprint) -> int:
    """Every snapshot with the KV since the nearest one above it that its owner resumed from or kept."""
    total = 0
    for owner, own in keeping.kept_by().items():
        above = keeping.source[owner][1]
        for snapshot in own:
            total += footprint.snapshot_bytes(snapshot.point[1] - above)
            above = snapshot.point[1]
    return total


def _rewritten(shape: TreeShape, ideals: Sequence[int]) -> Iterable[int]:
    """For each prompt that does not begin with the whole one before it in its conversation: the tokens that
    would have been covered if it did, and are not."""
    before: dict[int, int] = {}
    for index, conversation in enumerate(shape.conversation):
        other = before.get(conversation)
        before[conversation] = index
        if other is not None and not shape.extends(index, other):
            yield max(0, min(shape.length[other], shape.resumable[index]) - ideals[index])


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
