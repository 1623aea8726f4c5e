"""Plan the input: read a window of conversations ahead, plan it, return its requests in the plan's order.

Invariants: the window bounds the read-ahead; each request or failure of the feeder is returned once, the failures of a
window before its requests.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace

from apcbatch.config import Config
from apcbatch.data.model_files import model_files_digest
from apcbatch.job.feed import Feeder
from apcbatch.job.work import JobEngine, Work, WorkSource
from apcbatch.model.locate import locate_model
from apcbatch.plan.footprint import Footprint
from apcbatch.plan.planner import Planner
from apcbatch.plan.prefix_tree import PrefixTree
from apcbatch.plan.tree_shape import Order
from apcbatch.prefix import TokenArray, as_token_array
from apcbatch.store import find_cost
from apcbatch.types import Request, Result

MEASURED = "measured for this store"  # origin of --min-gain-tokens


def order_of(config: Config) -> Order:
    """Return the order of a run: the plan's under policy `planned`, unless --order is `file`; otherwise the file's."""
    return "auto" if config.policy == "planned" and config.order != "file" else "file"


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
    config: Config, footprint: Footprint, *, reserved_bytes: int = 0, later_budget_bytes: int | None = None
) -> Planner:
    """Return the planner of a run with this configuration.

    footprint: sizes of the model's snapshots in bytes. reserved_bytes: part of the pool that the plan leaves free.
    later_budget_bytes: disk space for snapshots of future runs; by default the store's size, or 0 without a store.
    """
    if later_budget_bytes is None:
        later_budget_bytes = config.store_size if config.store is not None else 0
    return Planner(
        block_size=config.block_size,
        order=order_of(config),
        footprint=footprint,
        capacity_bytes=max(0, config.pool_size - reserved_bytes),
        min_gain_tokens=config.gain_tokens,
        later_budget_bytes=later_budget_bytes,
    )


def work_source(config: Config, feeder: Feeder, engine: JobEngine) -> WorkSource:
    """Return the feeder, wrapped in a PlannedFeeder if requests are planned."""
    return PlannedFeeder(config, feeder, engine) if config.is_planned else feeder


class PlannedFeeder:
    """Feeder whose requests carry the prefix plan of their window."""

    def __init__(self, config: Config, feeder: Feeder, engine: JobEngine) -> None:
        self._config, self._feeder, self._engine = config, feeder, engine
        self._ready: deque[Work] = deque()
        self._next: Request | None = None  # the first request of the next window
        self._has_paused = True  # `pause` returned True for the last window
        self.plan_s = 0.0

    @property
    def exhausted(self) -> bool:
        """Whether all work is handed out."""
        return self._feeder.exhausted and not self._ready and self._next is None

    @property
    def num_open_rollouts(self) -> int:
        """Always 0: rollouts are never planned."""
        return 0

    @property
    def total(self) -> int | None:
        """Requests to answer in this run; None until the whole input is read."""
        return self._feeder.total

    def pause(self) -> bool:
        """Return whether the engine should run its requests before more input is read: True once at the end of each
        window. Reading and planning the next one takes seconds, during which a cluster's workers compute the requests
        that they have."""
        if self._ready or self._has_paused or not self._engine.num_unfinished:
            return False
        self._has_paused = True
        return True

    def next(self) -> Work | None:
        """Return the next request or failure; None if there is none at the moment (see exhausted)."""
        if not self._ready:
            self._plan_window()
            self._has_paused = False
        return self._ready.popleft() if self._ready else None

    def follow_up(self, result: Result) -> list[Work]:
        """Return the work that depends on a result."""
        return self._feeder.follow_up(result)

    def _plan_window(self) -> None:
        """Read a window, and queue its failures, then its requests in the plan's order."""
        requests, window = [], Window(self._config)
        while True:
            work = self._next or self._feeder.next()
            self._next = None
            if isinstance(work, Request):
                if not window.takes(work):
                    self._next = work
                    break
                requests.append(work)
            elif work is not None:
                self._ready.append(work)
            elif self._feeder.exhausted:
                break
        begin = time.perf_counter()
        self._ready.extend(self._planned(requests))
        self.plan_s += time.perf_counter() - begin

    def _planned(self, requests: list[Request]) -> list[Request]:
        """Return the requests in the plan's order, each with its plan. Requests that the engine will refuse come first,
        without a plan."""
        engine, config = self._engine, self._config
        usable: list[Request] = []
        refused: list[Request] = []
        for request in requests:
            (usable if engine.can_run(request) else refused).append(request)
        tree = PrefixTree()
        for request in usable:
            tree.add(as_token_array(request.token_ids), request.tag.ticket.line, request.resumable)
        places = list(tree.keys(engine.key_fingerprint, config.block_size)) if config.store else []
        keys = engine.held({key for _, _, key in places})
        held = [(node, position) for node, position, key in places if key in keys]
        # The plan budgets the snapshots that it keeps; one that is read from the store needs pool memory as well.
        largest = max((engine.footprint.pool_bytes(position) for _, position in held), default=0)
        plan = planner_for(config, engine.footprint, reserved_bytes=largest).plan(tree, held)
        return refused + [replace(usable[index], plan=plan.requests[index]) for index in plan.order]


REQUEST_TOKENS = 256  # counted per request besides its tokens: a Request takes about 1 KiB, a token 4 bytes


class Window:
    """Limits of a planning window: --window conversations, --window-tokens tokens. Turns that share one array of tokens
    count it once."""

    def __init__(self, config: Config) -> None:
        self._max_lines, self._max_tokens = config.window, config.window_tokens
        self._num_lines = self._num_tokens = 0
        self._line = 0
        self._latest: TokenArray | None = None

    def takes(self, request: Request) -> bool:
        """Return whether a request belongs to this window; if so, count it."""
        line = request.tag.ticket.line
        if line != self._line:
            if self._num_lines >= self._max_lines or self._num_tokens >= self._max_tokens:
                return False
            self._line, self._num_lines = line, self._num_lines + 1
        tokens = as_token_array(request.token_ids)
        whole = tokens if tokens.base is None else tokens.base
        if whole is not self._latest:
            self._latest = whole
            self._num_tokens += len(whole)
        self._num_tokens += REQUEST_TOKENS
        return True


def windows_note(num_windows: int, config: Config) -> str | None:
    """Return a note on windows for the reader of a forecast, which plans the whole input at once; None if the run has a
    single window."""
    if num_windows < 2:
        return None
    return (
        f"`run` plans this input in {num_windows} windows, each of at most --window {config.window:,} conversations "
        f"and --window-tokens {config.window_tokens:,}; it finds what is predicted here with larger ones"
    )
