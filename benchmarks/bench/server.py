"""Run an engine for measurements: make random prompts, and answer them.

`prompts` makes new prompts in every call, so that requests restore only snapshots that a measurement has kept on
purpose.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from apcbatch.config import Config
from apcbatch.engine.engine import Engine
from apcbatch.types import Policy, Request, RequestPlan

Prompt = list[int]


class Server:
    """One engine, with a source of random prompts."""

    def __init__(self, engine: Engine, seed: int = 0) -> None:
        self.engine = engine
        self._random = random.Random(seed)
        self._count = 0

    def prompts(self, count: int, tokens: int) -> list[Prompt]:
        """Return `count` new prompts of `tokens` tokens each."""
        vocabulary = self.engine.vocab_size
        return [[self._random.randrange(vocabulary) for _ in range(tokens)] for _ in range(count)]

    def serve(
        self, prompts: Sequence[Prompt], new_tokens: int = 1, plan: RequestPlan | None = None
    ) -> dict[str, float]:
        """Answer all prompts. Return the engine's seconds of prefill, decode and store, and the elapsed time as
        `wall`."""
        before = dict(self.engine.counters.seconds)
        requests = [self._request(prompt, new_tokens, plan) for prompt in prompts]
        begin = time.perf_counter()
        for result in self.engine.run(requests):
            if result.error is not None:
                raise result.error
        wall = time.perf_counter() - begin
        after = self.engine.counters.seconds
        return {"wall": wall, **{name: after[name] - before[name] for name in after}}

    def _request(self, prompt: Prompt, new_tokens: int, plan: RequestPlan | None) -> Request:
        self._count += 1
        name = f"bench-{self._count}"
        return Request(name, prompt, max_tokens=new_tokens, ignore_eos=True, plan=plan)


@contextmanager
def serving(config: Config, policy: Policy, **options: Any) -> Iterator[Server]:
    """Open a server for the configuration's model and dtype, and close it at the end of the block. options: options of
    Engine. Drafts are off by default, since a model with random weights repeats itself."""
    engine = Engine(config.model, dtype=config.dtype, policy=policy, **{"draft": (), **options})
    try:
        yield Server(engine)
    finally:
        engine.abort()
        engine.close()
