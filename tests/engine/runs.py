"""Requests of the engine's tests, and what comes back of them."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from apcbatch import Engine, Request, Result
from apcbatch.plan.planner import HandedOn, Planner
from apcbatch.plan.windows import Window
from apcbatch.prefix import prefix_key
from apcbatch.types import RequestPlan
from tests.plan.plan_oracle import Dataset
from tests.tiny import VOCAB


def tokens(count: int, seed: int) -> list[int]:
    """`count` random token ids, other than the stop token."""
    source = random.Random(seed)
    return [source.randrange(1, VOCAB) for _ in range(count)]


def by_id(results: Iterable[Result]) -> dict[str, Result]:
    return {result.id: result for result in results}


def serve(engine: Engine, requests: Iterable[Request]) -> dict[str, Result]:
    """The results by id, of an engine that is closed then."""
    results = by_id(engine.run(requests))
    engine.close()
    return results


def told(result: Result) -> list[tuple[Any, ...]]:
    """What does not depend on time or on reuse, of each answer, bit for bit."""
    return [
        (one.token_ids, one.logprobs, one.top_logprobs, one.scores, one.finish_reason, one.stop_reason,
         one.error and one.error.code)
        for one in result.answers
    ]  # fmt: skip


def ending(folder: Path, target: Path, eos: list[int]) -> Path:
    """A copy of a checkpoint whose answers end with any of these tokens."""
    shutil.copytree(folder, target)
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    return target


def planned_by_window(
    engine: Any, data: Dataset, windows: Iterable[Window[int]], planner: Planner
) -> Iterator[tuple[Request, RequestPlan]]:
    """Requests of windows that are planned one after the other, when the last one is submitted, as a run does it."""
    handed_over: list[HandedOn] = []
    for window in windows:
        plan = planner.plan(window.tree, (), window.num_requests, handed_over)
        for one, count in zip(handed_over, plan.new_readers, strict=True):
            prefix = np.array(data.prompts[window.items[one.request]][: one.position], np.int32)
            key = prefix_key(engine.key_fingerprint, prefix, one.position)
            if count:
                engine.add_readers(key, count)
        for index in plan.order:
            number, todo = window.items[index], plan.requests[index]
            tokens = np.array(data.prompts[number], np.int32)
            made = Request(str(number), tokens, max_tokens=1, keep_answer=False, ignore_eos=True, plan=todo)
            yield made, todo
        handed_over = plan.handed_on
