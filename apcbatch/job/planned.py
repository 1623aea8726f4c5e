"""The input as planned work: read a window ahead, plan it, hand it out in the plan's order.

Must not know: how a plan is made, how requests run. Invariants: the window bounds what is read ahead; every piece of
work that the feeder gives comes out once; failures come out first.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from typing import Any

from apcbatch.config import Config
from apcbatch.plan.planner import Planner
from apcbatch.plan.prefix_tree import PrefixTree
from apcbatch.job.feed import Feeder, Work
from apcbatch.job.window import Window
from apcbatch.prefix import as_token_array
from apcbatch.types import Request, Result


class PlannedFeeder:
    """A Feeder whose requests carry the prefix plan of their window. `plan_s`: seconds spent on planning."""

    def __init__(self, config: Config, feeder: Feeder, engine: Any) -> None:
        self._config, self._feeder, self._engine = config, feeder, engine
        self._ready: deque[Work] = deque()
        self._next: Request | None = None  # the first of the next window
        self.plan_s = 0.0

    @property
    def exhausted(self) -> bool:
        """Whether everything was handed out."""
        return self._feeder.exhausted and not self._ready and self._next is None

    @property
    def num_chains(self) -> int:
        """Rollout conversations under way: none, their future is not known and they are never planned."""
        return 0

    @property
    def total(self) -> int | None:
        """Requests to be answered in this run, where the whole input is read."""
        return self._feeder.total

    def next(self) -> Work | None:
        """The next piece of work; None where there is none at the moment (see exhausted)."""
        if not self._ready:
            self._plan_window()
        return self._ready.popleft() if self._ready else None

    def follow(self, result: Result) -> list[Work]:
        """What a result makes possible: nothing, all requests are known."""
        return self._feeder.follow(result)

    def _plan_window(self) -> None:
        """Read a window, and queue its requests as planned."""
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
        engine, config = self._engine, self._config
        usable: list[Request] = []
        refused: list[Request] = []
        for request in requests:
            (usable if engine.can_run(request) else refused).append(request)
        tree = PrefixTree()
        for request in usable:
            tree.add(as_token_array(request.token_ids), request.tag.ticket.line)
        places = list(tree.keys(engine.key_fingerprint, config.block_size)) if config.store else []
        keys = engine.held({key for _, _, key in places})
        held = [(node, position) for node, position, key in places if key in keys]
        # The plan counts what it keeps itself; what comes from the store needs a place in the pool while it is read.
        restored = max((engine.footprint.pool_bytes(position) for _, position in held), default=0)
        planner = Planner(
            config.block_size,
            "file" if config.order == "file" else "auto",
            engine.footprint,
            max(0, config.pool_size - restored),
            config.min_gain_tokens,
            config.store_size if config.store is not None else 0,
        )
        plan = planner.plan(tree, held)
        return refused + [replace(usable[index], plan=plan.requests[index]) for index in plan.order]
