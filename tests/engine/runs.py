"""Requests of the engine's tests, and what comes back of them."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from apcbatch import Engine, Request, Result
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
