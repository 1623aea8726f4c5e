"""Measure whole runs over the beginning of a dataset: cold, warm from disk, warm from RAM.

The first three runs are processes: one with the policy of the configuration, then two that keep every boundary and
share a store. For the last two, one engine answers the same requests twice. Drafts are off, since the second of these
two would draft from the answers of the first.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from apcbatch.config import Config
from apcbatch.data.chat.render import Renderer
from apcbatch.data.input.layouts import LineOptions
from apcbatch.data.input.source import open_source
from apcbatch.data.template_options import ChatOptions
from apcbatch.job.feed import Feeder
from apcbatch.job.opening import make_engine
from apcbatch.job.previous_answers import PreviousAnswers
from apcbatch.job.work import requests_of
from apcbatch.model.locate import locate_model
from apcbatch.types import Policy, Request

from .figures import Figure

GROUP = "run"


def figures(config: Config, input: str) -> Iterator[Figure]:
    """Run the first `limit` conversations of INPUT five times, and yield a figure for each run."""
    with tempfile.TemporaryDirectory() as folder:
        kinds: tuple[tuple[str, Policy], ...] = (
            (f"cold, policy {config.policy}", config.policy),
            ("cold, every boundary to disk", "all"),
            ("warm from disk", "all"),
        )
        for kind, policy in kinds:
            summary = _run(replace(config, policy=policy), input, Path(folder))
            yield _figure(kind, summary["seconds"]["total"] - summary["seconds"]["load"], summary)
    yield from _in_memory(config, input)


def _run(config: Config, input: str, folder: Path) -> dict[str, Any]:
    """Run `apcbatch run` once and return its summary; each policy has its own store in the folder."""
    command = [sys.executable, "-m", "apcbatch", "run", input, "-o", str(folder / "out.jsonl"), "--overwrite"]
    command += ["--store", str(folder / config.policy), "--quiet", "--progress", "none", "--draft", "none"]
    for name in ("model", "dtype", "policy", "limit", "max_tokens"):
        value = getattr(config, name)
        if value is not None:
            command += ["--" + name.replace("_", "-"), str(value)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return summary


def _in_memory(config: Config, input: str) -> Iterator[Figure]:
    """Answer the same requests twice with one engine, and yield a figure for each time."""
    engine = make_engine(
        replace(config, policy="all", store=None, draft="none", draft_from=None), lambda sentence: None
    )
    requests = requests_in(config, input)
    try:
        for kind in ("cold, every boundary to RAM", "warm from RAM"):
            before = dict(engine.counters.seconds)
            begin = time.perf_counter()
            results = list(engine.run(requests))
            seconds = time.perf_counter() - begin
            spent = {name: engine.counters.seconds[name] - before[name] for name in before}
            counts = {
                name: sum(getattr(r, name) for r in results)
                for name in ("prompt_tokens", "cached_tokens", "computed_tokens")
            }
            yield _figure(kind, seconds, {"requests": len(results), **counts, "seconds": spent})
    finally:
        engine.close()


def requests_in(config: Config, input: str) -> list[Request]:
    """Return the requests of the first `limit` conversations of INPUT, in its order."""
    renderer = Renderer.load(locate_model(config.model), options=ChatOptions.of(config))
    return list(requests_of(Feeder(config, open_source(input, LineOptions.of(config)), renderer, PreviousAnswers())))


def _figure(kind: str, seconds: float, summary: dict[str, Any]) -> Figure:
    """Return the figure of one run. seconds: its duration without loading the model. The detail `in_steps` is the share
    of prefill and decode in it."""
    spent = summary["seconds"]
    details = {name: summary[name] for name in ("requests", "prompt_tokens", "cached_tokens", "computed_tokens")}
    details["in_steps"] = (spent["prefill"] + spent["decode"]) / seconds
    return Figure(GROUP, f"run, {kind}", seconds, "s", details)
