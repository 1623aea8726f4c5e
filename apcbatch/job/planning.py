"""Plan the input: read a window of requests ahead, plan it, return its requests in the plan's order.

Invariants: the window bounds the read-ahead; each request or failure of the feeder is returned once, the failures
before the requests of the window in which they are read.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from operator import attrgetter

from apcbatch.config import Config
from apcbatch.data.model_files import model_files_digest
from apcbatch.engine.coverage import CoverageTree, Match
from apcbatch.job.feed import Feeder
from apcbatch.job.record import Ticket
from apcbatch.job.work import JobEngine, Tag, Work, WorkSource
from apcbatch.model.locate import locate_model
from apcbatch.plan.footprint import Footprint
from apcbatch.plan.planner import HandedOn, Planner
from apcbatch.plan.prefix_tree import PrefixTree
from apcbatch.plan.tree_shape import Order
from apcbatch.plan.windows import Windows
from apcbatch.prefix import TokenArray, checked_tokens, prefix_key
from apcbatch.store import find_cost
from apcbatch.types import Request, RequestPlan, Result

MEASURED = "measured for this store"  # origin of --min-gain-tokens


def order_of(config: Config, device: str) -> Order:
    """Return the order of a run: the plan's under policy `planned`, unless --order is `file`; otherwise the file's. The
    plan's is `long first` in one process with a GPU: there a pass of few tokens takes nearly the time of one of many,
    while a CPU gains nothing from the memory."""
    if config.policy != "planned" or config.order == "file":
        return "file"
    return "short first" if device == "cpu" or config.ray is not None else "long first"


def with_measured_gain(config: Config, tokens: int | None) -> Config:
    """Resolve --min-gain-tokens auto to the measured cost of reading a snapshot, in tokens. None: leave it auto."""
    if config.min_gain_tokens is not None or tokens is None:
        return config
    name, origins = "min_gain_tokens", config.origins
    if origins.get(name) == "default":
        origins = {**origins, name: MEASURED}
    return replace(config, min_gain_tokens=tokens, origins=origins)


def with_recorded_gain(config: Config) -> Config:
    """Resolve --min-gain-tokens auto to the cost that --store has for this model and dtype, if it has one."""
    if config.min_gain_tokens is not None or config.store is None:
        return config
    found = find_cost(config.store, model_files_digest(locate_model(config.model)), config.dtype)
    return with_measured_gain(config, None if found is None else found.tokens)


def planner_for(
    config: Config,
    footprint: Footprint,
    device: str,
    *,
    reserved_bytes: int = 0,
    later_budget_bytes: int | None = None,
) -> Planner:
    """Return the planner of a run with this configuration.

    footprint: sizes of the model's snapshots in bytes. device: `cpu`, or another name for a GPU. reserved_bytes: part
    of the pool that the plan leaves free. later_budget_bytes: disk space for snapshots of future runs; by default the
    store's size, or 0 without a store.
    """
    if later_budget_bytes is None:
        later_budget_bytes = config.store_size if config.store is not None else 0
    return Planner(
        block_size=config.block_size,
        order=order_of(config, device),
        footprint=footprint,
        capacity_bytes=max(0, config.pool_size - reserved_bytes),
        min_gain_tokens=config.gain_tokens,
        later_budget_bytes=later_budget_bytes,
    )


def work_source(config: Config, feeder: Feeder, engine: JobEngine) -> WorkSource:
    """Return the feeder, wrapped in a PlannedFeeder if requests are planned."""
    return PlannedFeeder(config, feeder, engine) if config.is_planned else feeder


_FIELDS = attrgetter(*Request.__slots__)
Read = tuple[Request, str | Ticket]  # settings, with the output parser as tag, and the ticket, packed if it can be
Waiting = tuple[int, Request, bytes | Ticket, RequestPlan]  # the same, after the index in the window, and the plan


class PlannedFeeder:
    """Feeder whose requests carry the prefix plan of their window. beyond_window_tokens: tokens that earlier windows
    had and that are computed again; those of the second window, which follows a small first one, do not count."""

    def __init__(self, config: Config, feeder: Feeder, engine: JobEngine) -> None:
        self._config, self._feeder, self._engine = config, feeder, engine
        self._windows: Windows[Read] = Windows(config.window_tokens)
        self._ready: deque[Work] = deque()  # failures, and requests that the engine will refuse
        self._settings: Request | None = None  # of the latest request read
        self._tree, self._num_requests = PrefixTree(), 0  # of the window
        self._handed_on: list[HandedOn] = []  # by the window
        self._num_windows = 0  # planned so far
        self._num_repeated = 0  # requests of the first window, and ahead of it, with the prompt of another one
        self._left: deque[Waiting] = deque()  # requests of the window that are not handed out, in the plan's order
        self._earlier = CoverageTree()  # prompts of the windows before this one
        self._paused_at: float | None = None  # time of the last pause of this window; None: none yet
        self.plan_s = 0.0
        self.beyond_window_tokens = 0

    @property
    def exhausted(self) -> bool:
        return self._feeder.exhausted and not (self._ready or self._left or len(self._windows))

    @property
    def num_open_rollouts(self) -> int:
        """Always 0: rollouts are never planned."""
        return 0

    def opening(self) -> str:
        """Return the feeder's opening line, with the number of requests of the first window that repeat a prompt."""
        repeated = self._num_repeated
        return self._feeder.opening() + (f"; {repeated:,} repeat the prompt of another request" if repeated else "")

    @property
    def total(self) -> int | None:
        return self._feeder.total

    def pause(self) -> bool:
        """Read some of the next window, for as long as the engine's last step took. Return whether the engine should
        run its requests before more is read: True at least once between two windows, so that a cluster's workers
        compute while the next one is read and planned."""
        if self._ready or self._left or not self._engine.num_unfinished:
            return False
        begin = time.perf_counter()
        if self._paused_at is not None:
            end = begin + (begin - self._paused_at)
            while begin < end:
                if self._is_read or self._ready:
                    return False
                self._read()
                begin = time.perf_counter()
        self._paused_at = begin
        return True

    def next(self) -> Work | None:
        while not (self._ready or self._left or self._is_read):
            self._read()
        if self._ready:
            return self._ready.popleft()
        if not self._left and len(self._windows):
            self._plan_window()
        if not self._left:
            return None
        request = self._hand_out(*self._left.popleft())
        if not self._left:
            self._end_window()
        return request

    def follow_up(self, result: Result) -> list[Work]:
        return self._feeder.follow_up(result)

    @property
    def _is_read(self) -> bool:
        """Whether the next window is read, and what follows it."""
        return self._windows.is_complete or self._feeder.exhausted

    def _read(self) -> None:
        """Read one request or failure. Until a request is handed out, its tokens are in the window's tree alone, and it
        shares its settings with those read before it that have the same."""
        work = self._feeder.next()
        if isinstance(work, Request) and self._engine.can_run(work):
            tokens, resumable = checked_tokens(work.token_ids), work.resumable
            ticket: Ticket = work.tag.ticket
            work.id, work.token_ids, work.random_stream, work.tag = "", (), None, work.tag.output_parser
            if work.references or work != self._settings:
                self._settings = work
            packed = ticket.packed() if ticket.prompt is None else ticket
            self._windows.add((self._settings, packed), ticket.line, tokens, resumable)
        elif work is not None:
            self._ready.append(work)

    def _plan_window(self) -> None:
        begin = time.perf_counter()
        engine, config = self._engine, self._config
        window, handed_over = self._windows.take(), self._handed_on
        tree = self._tree = window.tree
        self._num_requests = window.num_requests
        places = list(tree.keys(engine.key_fingerprint, config.block_size)) if config.store else []
        keys = engine.held({key for _, _, key in places})
        held = [(node, position) for node, position, key in places if key in keys]
        # The plan budgets the snapshots that it keeps; one that is read from the store needs pool memory as well.
        largest = max((engine.footprint.pool_bytes(position) for _, position in held), default=0)
        planner = planner_for(config, engine.footprint, engine.device, reserved_bytes=largest)
        plan = planner.plan(tree, held, window.num_requests, handed_over)
        self._handed_on = plan.handed_on
        for one, count in zip(handed_over, plan.new_readers, strict=True):
            key = prefix_key(engine.key_fingerprint, self._prompt(one.request)[: one.position], one.position)
            if count:
                engine.add_readers(key, count)
        if not self._num_windows:
            self._num_repeated = tree.num_requests - len(set(tree.end_node))
        self._num_windows += 1
        for index in plan.order:
            settings, packed = window.items[index]
            # Allocated anew in the order in which it is freed, so that whole pages of memory become free meanwhile.
            ticket = packed.encode() if isinstance(packed, str) else packed
            self._left.append((index, settings, ticket, plan.requests[index]))
        self._paused_at = None
        self.plan_s += time.perf_counter() - begin

    def _end_window(self) -> None:
        """Forget the window, but for its prompts if another one follows."""
        begin = time.perf_counter()
        if not self.exhausted:
            add_prompts(self._earlier, self._tree, self._num_requests)
        self._tree = PrefixTree()
        self.plan_s += time.perf_counter() - begin

    def _hand_out(self, index: int, settings: Request, packed: bytes | Ticket, plan: RequestPlan) -> Request:
        """Return a request of the window with its prompt and plan. Its ideal counts the prompts of all windows so
        far."""
        tokens = self._prompt(index)
        covered = self._earlier.match(tokens)
        length = min(covered.length, len(tokens) - 1)
        if self._num_windows > 2:
            self.beyond_window_tokens += max(0, min(length, self._tree.resumable[index]) - plan.resume_at)
        ticket = Ticket.unpack(packed) if isinstance(packed, bytes) else packed
        request = Request(*_FIELDS(settings))
        request.id, request.token_ids, request.random_stream = ticket.request_id, tokens, ticket.random_stream
        request.plan, request.tag = with_earlier(plan, covered, len(tokens)), Tag(ticket, None, settings.tag)
        return request

    def _prompt(self, index: int) -> TokenArray:
        """Return the prompt of a request of the window, or ahead of it, (tokens,) int32."""
        return self._tree.path_tokens(self._tree.end_node[index])


def add_prompts(earlier: CoverageTree, tree: PrefixTree, num_requests: int) -> None:
    """Add the prompts of a window that is over, the first requests of its tree, to those of earlier windows."""
    for node in dict.fromkeys(tree.end_node[:num_requests]):
        earlier.insert(tree.path_tokens(node))


def with_earlier(plan: RequestPlan, covered: Match, num_tokens: int) -> RequestPlan:
    """Return a request's plan with the ideal of all windows so far. covered: the match of its prompt, of `num_tokens`
    tokens, with the prompts of earlier windows."""
    length = min(covered.length, num_tokens - 1)
    if length <= plan.ideal and covered.exact:
        return plan
    return replace(plan, ideal=max(plan.ideal, length), is_ideal_exact=covered.exact)


def windows_note(num_windows: int, config: Config) -> str | None:
    """Return a note on windows for the reader of a forecast; None for one window, or the first and one other."""
    if num_windows < 3:
        return None
    return (
        f"the input is planned in {num_windows} windows, each of at most --window-tokens {config.window_tokens:,}; "
        "larger ones restore more of what lies far apart"
    )
