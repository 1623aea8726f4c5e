"""Forecast the reuse of every policy at every block size while an input is read: the tables of `plan` and
`tune-block-size`.

Invariants: if nothing is held before the run, the engine reports the same numbers, request by request, with any number
of concurrent requests; for `all` and `last` only if memory holds all snapshots that they keep. Peaks of memory assume
that requests run one after the other. What is held is a window of the input and two trees of its prompts, which are
bounded: where they forgot some, the numbers are bounds.

An example under `last` with block size 4 and three prompts: the first has 10 tokens, the second has 14 and shares 9 of
them, the third shares 6 with both. The first keeps 8, from which the second resumes; the third finds nothing.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from apcbatch.engine.coverage import CoverageTree, Node
from apcbatch.job.planning import add_prompts, with_earlier
from apcbatch.plan.footprint import Footprint
from apcbatch.plan.planner import HandedOn, Plan, Planner
from apcbatch.plan.prefix_tree import PrefixTree
from apcbatch.plan.windows import Windows
from apcbatch.prefix import TokenArray, common_length, last_boundary
from apcbatch.types import Policy

POSITION_BITS = 40
POSITIONS = (1 << POSITION_BITS) - 1


@dataclass(frozen=True)
class PolicyForecast:
    """One policy at one block size.

    cached_tokens: tokens that requests resume from. snapshots_written: snapshots kept for this run. snapshots_read:
    snapshots that requests resume from, each counted once. snapshots_for_later: snapshots kept only for future runs; 0
    for policies other than `planned`. written_bytes: bytes of the written snapshots, each with the KV since the nearest
    kept ancestor. store_bytes: bytes of a store after the run. floor_tokens: tokens that an earlier request covers and
    that are not cached, because no snapshot is kept at the right position. peak_live_*: maximum number and bytes of the
    snapshots in memory at any time; for `all` and `last`, which evict nothing, those of all snapshots. ideal_is_bound:
    more tokens may be covered, since a bounded tree of prompts forgot some.
    """

    policy: Policy
    prompt_tokens: int
    cached_tokens: int
    snapshots_written: int
    snapshots_read: int
    snapshots_for_later: int
    written_bytes: int
    store_bytes: int
    peak_live_snapshots: int
    peak_live_bytes: int
    floor_tokens: int
    ideal_is_bound: bool = False

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

    unique_tokens_is_bound: there may be fewer, since a bounded tree of prompts forgot some. ideal_tokens: prompt tokens
    that an earlier request covers, in the order of `planned`. num_windows: windows of `planned`. rewritten_prompts:
    prompts that do not begin with the whole previous prompt of their conversation; rewritten_tokens: tokens computed
    again for that; thought_tokens: part of them where the template takes earlier reasoning out.
    """

    requests: int
    prompt_tokens: int
    unique_tokens: int
    unique_tokens_is_bound: bool
    ideal_tokens: int
    ideal_is_bound: bool
    num_windows: int
    rewritten_prompts: int
    rewritten_tokens: int
    thought_tokens: int
    grids: dict[int, dict[Policy, PolicyForecast]]

    @property
    def ideal_hit_rate(self) -> float:
        """The share of ideal_tokens in all prompt tokens, which no policy can exceed."""
        return _share(self.ideal_tokens, self.prompt_tokens)


@dataclass(frozen=True, slots=True)
class Served:
    """One request of a forecast. index: from 0, in the order of the input. length: of its prompt. resume_at: its cached
    tokens. ideal: tokens that an earlier request covers, in the order of the policy."""

    index: int
    conversation: int
    length: int
    resume_at: int
    ideal: int


Watch = Callable[[Policy, int, Served], None]  # (policy, block size, request)
WatchWindow = Callable[[PrefixTree, Plan], None]


@dataclass(slots=True)
class _Rewritten:
    """A prompt that does not begin with the whole previous one of its conversation. most: tokens of the previous one
    from which it could resume. drops_thoughts: the template takes reasoning out of the conversation's history."""

    most: int
    drops_thoughts: bool


class Forecaster:
    """Forecast of all policies at every block size, with the order, footprint and limits of `planner` (not its block
    size), in windows of `window_tokens`. `all` and `last` have no plan, so a run takes the order of the input.

    watch: called with each request in the running order of each policy; for `planned`, which resumes alike at every
    block size, only with the planner's. watch_window: called with the tree and the plan of each window."""

    def __init__(
        self,
        planner: Planner,
        block_sizes: Iterable[int],
        window_tokens: int,
        watch: Watch | None = None,
        watch_window: WatchWindow | None = None,
    ) -> None:
        self._planner, self._sizes = planner, sorted(set(block_sizes))
        self._watch, self._watch_window = watch, watch_window
        self._unplanned = _Unplanned(self._sizes, planner.footprint, watch)
        self._windows: Windows[_Rewritten | None] = Windows(window_tokens)
        self._earlier = CoverageTree()  # prompts of the windows before this one
        self._handed_on: list[HandedOn] = []
        nothing = PolicyForecast("planned", 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
        self._planned = dict.fromkeys(self._sizes, nothing)
        self._num_windows = self._num_planned = self._ideal_tokens = 0
        self._rewritten_prompts = self._rewritten_tokens = self._thought_tokens = 0
        self._line, self._previous = 0, np.empty(0, np.int32)

    def add(self, tokens: TokenArray, line: int, resumable: int, drops_thoughts: bool = False) -> None:
        """Add the next request of the input. tokens: its prompt, (tokens,) int32. line: its input line, ascending, the
        number of its conversation. resumable: as in PrefixTree.add. drops_thoughts: see _Rewritten."""
        previous = self._previous if line == self._line else tokens
        self._line, self._previous = line, tokens
        is_rewritten = common_length(previous, tokens) < len(previous)
        item = _Rewritten(min(len(previous), resumable), drops_thoughts) if is_rewritten else None
        self._unplanned.add(tokens, line, resumable)
        self._windows.add(item, line, tokens, resumable)
        while self._windows.is_complete:
            self._plan_window()

    def finish(self) -> Forecast:
        """Return the forecast, after the last request."""
        while len(self._windows):
            self._plan_window()
        unplanned, planned = self._unplanned, self._planned.values()
        return Forecast(
            requests=unplanned.num_requests,
            prompt_tokens=unplanned.prompt_tokens,
            unique_tokens=unplanned.unique_tokens,
            unique_tokens_is_bound=unplanned.has_forgotten,
            ideal_tokens=self._ideal_tokens,
            ideal_is_bound=any(one.ideal_is_bound for one in planned),
            num_windows=self._num_windows,
            rewritten_prompts=self._rewritten_prompts,
            rewritten_tokens=self._rewritten_tokens,
            thought_tokens=self._thought_tokens,
            grids={size: {**unplanned.forecasts(size), "planned": self._planned[size]} for size in self._sizes},
        )

    def _plan_window(self) -> None:
        window, planner = self._windows.take(), self._planner
        tree, first = window.tree, self._num_planned
        plan = planner.plan(tree, (), window.num_requests, self._handed_on, self._sizes)
        if self._watch_window is not None:
            self._watch_window(tree, plan)
        cached_tokens, ideal_tokens, is_exact = 0, 0, True
        for index in plan.order:
            tokens, rewritten = tree.path_tokens(tree.end_node[index]), window.items[index]
            request = with_earlier(plan.requests[index], self._earlier.match(tokens), len(tokens))
            cached_tokens += request.resume_at
            ideal_tokens += request.ideal
            is_exact &= request.is_ideal_exact
            if rewritten is not None:
                again = max(0, rewritten.most - request.ideal)
                self._rewritten_prompts += 1
                self._rewritten_tokens += again
                self._thought_tokens += again * rewritten.drops_thoughts
            if self._watch is not None:
                served = Served(first + index, tree.conversation[index], len(tokens), request.resume_at, request.ideal)
                self._watch("planned", planner.block_size, served)
        add_prompts(self._earlier, tree, window.num_requests)
        self._num_windows += 1
        self._num_planned += window.num_requests
        self._ideal_tokens += ideal_tokens
        self._handed_on = plan.handed_on
        for size, sums in self._planned.items():
            later = plan.for_later[size]
            self._planned[size] = PolicyForecast(
                policy="planned",
                prompt_tokens=sums.prompt_tokens + plan.prompt_tokens,
                cached_tokens=sums.cached_tokens + cached_tokens,
                snapshots_written=sums.snapshots_written + plan.snapshots_written,
                snapshots_read=sums.snapshots_read + plan.snapshots_read,
                snapshots_for_later=sums.snapshots_for_later + later.snapshots,
                written_bytes=sums.written_bytes + plan.written_bytes,
                store_bytes=sums.store_bytes + later.num_bytes,
                peak_live_snapshots=max(sums.peak_live_snapshots, plan.peak_live_snapshots),
                peak_live_bytes=max(sums.peak_live_bytes, plan.peak_live_bytes),
                floor_tokens=sums.floor_tokens + ideal_tokens - cached_tokens,
                ideal_is_bound=sums.ideal_is_bound or not is_exact,
            )


MakeForecaster = Callable[[Footprint], Forecaster]


class _MarkedTree(CoverageTree):
    """Coverage tree whose edges hold marks: a kind and a position in one number. They go with a dropped branch."""

    def path(self, tokens: TokenArray) -> list[tuple[Node, int]]:
        """Return the nodes that hold a covered prompt, the deepest first, each with the position at which its edge
        begins."""
        node, begin, on_edge = self._walk(tokens)
        found = []
        while node.parent is not None:
            begin -= on_edge
            found.append((node, begin))
            node = node.parent
            on_edge = len(node.edge_bytes) // 4
        return found

    def _split(self, node: Node, at: int) -> Node:
        upper = super()._split(node, at)
        if node.marks:
            upper.marks = array("q", [mark for mark in node.marks if mark & POSITIONS <= at])
            node.marks = array("q", [mark - at for mark in node.marks if mark & POSITIONS > at])
        return upper


def _mark(path: list[tuple[Node, int]], kind: int, position: int) -> bool:
    """Mark a position, from 1, of a path; return False if it has this kind of mark, or was dropped at once."""
    node, begin = next(((node, begin) for node, begin in path if begin < position), (None, 0))
    if node is None:
        return False
    mark = kind << POSITION_BITS | position - begin
    if node.marks is None:
        node.marks = array("q")
    at = bisect_left(node.marks, mark)
    if node.marks[at : at + 1] == array("q", [mark]):
        return False
    node.marks.insert(at, mark)
    return True


def _last_marked(path: list[tuple[Node, int]], kind: int, limit: int) -> int:
    """Return the last position, up to the limit, of a path that has a kind of mark; 0 for none."""
    for node, begin in path:
        if node.marks and begin < limit:
            at = bisect_right(node.marks, kind << POSITION_BITS | limit - begin)
            if at and node.marks[at - 1] >> POSITION_BITS == kind:
                return begin + (node.marks[at - 1] & POSITIONS)
    return 0


@dataclass(slots=True)
class _Kept:
    """Sums of a policy without a plan at one block size. written: snapshots. kv_tokens: tokens of KV in them, each with
    the KV since its nearest kept ancestor. read: snapshots that requests resume from."""

    cached_tokens: int = 0
    written: int = 0
    kv_tokens: int = 0
    read: int = 0


class _Unplanned:
    """Reuse of the policies without a plan, `all` and `last`, in the order of the input. Each kept snapshot stays, and
    is stored."""

    def __init__(self, block_sizes: list[int], footprint: Footprint, watch: Watch | None) -> None:
        self._sizes, self._footprint, self._watch = block_sizes, footprint, watch
        self._tree = _MarkedTree()
        self._sums: dict[Policy, dict[int, _Kept]] = {
            policy: {size: _Kept() for size in block_sizes} for policy in ("all", "last")
        }
        self._is_exact = True
        self.num_requests = self.prompt_tokens = self.unique_tokens = self._ideal_tokens = 0

    @property
    def has_forgotten(self) -> bool:
        return self._tree.has_forgotten

    def add(self, tokens: TokenArray, line: int, resumable: int) -> None:
        """Add the next request: see Forecaster.add."""
        match, length = self._tree.match(tokens), len(tokens)
        self._tree.insert(tokens)
        path, ideal = self._tree.path(tokens), min(match.length, length - 1)
        for number, size in enumerate(self._sizes):
            of_last, read_by_all, read_by_last = range(3 * number, 3 * number + 3)
            every, kept = self._sums["all"][size], self._sums["last"][size]
            num_new = length // size - match.length // size
            every.written += num_new
            every.kv_tokens += num_new * size
            last, resume_last = last_boundary(length, size), _last_marked(path, of_last, resumable)
            if resume_last < last and _mark(path, of_last, last):
                kept.written += 1
                kept.kv_tokens += last - resume_last
            resume_all = last_boundary(min(match.length, resumable), size)
            resumed: tuple[tuple[Policy, _Kept, int, int], ...] = (
                ("all", every, resume_all, read_by_all),
                ("last", kept, resume_last, read_by_last),
            )
            for policy, sums, resume_at, kind in resumed:
                sums.cached_tokens += resume_at
                sums.read += resume_at > 0 and _mark(path, kind, resume_at)
                if self._watch is not None:
                    self._watch(policy, size, Served(self.num_requests, line, length, resume_at, ideal))
        self.num_requests += 1
        self.prompt_tokens += length
        self.unique_tokens += length - match.length
        self._ideal_tokens += ideal
        self._is_exact &= match.exact

    def forecasts(self, block_size: int) -> dict[Policy, PolicyForecast]:
        """Return the forecast of each policy at a block size."""
        return {policy: self._forecast(policy, sums[block_size]) for policy, sums in self._sums.items()}

    def _forecast(self, policy: Policy, kept: _Kept) -> PolicyForecast:
        num_bytes = kept.written * self._footprint.state_bytes + kept.kv_tokens * self._footprint.kv_token_bytes
        return PolicyForecast(
            policy=policy,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=kept.cached_tokens,
            snapshots_written=kept.written,
            snapshots_read=kept.read,
            snapshots_for_later=0,
            written_bytes=num_bytes,
            store_bytes=num_bytes,
            peak_live_snapshots=kept.written,
            peak_live_bytes=num_bytes,
            floor_tokens=self._ideal_tokens - kept.cached_tokens,
            ideal_is_bound=not self._is_exact,
        )


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
