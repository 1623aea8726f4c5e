"""Verify the prediction by real runs of the best candidates.

A run generates one token per request and writes no answers; its store, if --store is given, is temporary.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from apcbatch.config import Config
from apcbatch.data.chat.render import Renderer
from apcbatch.data.input.inputs import Inputs
from apcbatch.data.input.layouts import LineOptions
from apcbatch.data.input.source import open_source
from apcbatch.data.template_options import ChatOptions
from apcbatch.job.feed import Feeder
from apcbatch.job.planning import work_source
from apcbatch.job.previous_answers import PreviousAnswers
from apcbatch.job.totals import Totals
from apcbatch.job.work import requests_of
from apcbatch.model.locate import locate_model
from apcbatch.tuning.choice import Candidate, Verified
from apcbatch.tuning.measurement import temporary_engine


def verify(
    config: Config,
    inputs: Inputs,
    candidates: list[Candidate],
    count: int,
    warn: Callable[[str], None],
) -> list[Candidate]:
    """Run the `count` fastest candidates for real, once each. Return all candidates, these with their measurements."""
    best = sorted(candidates, key=lambda candidate: candidate.total_s)[:count]
    sizes = {candidate.block_size for candidate in best}
    return [
        replace(candidate, verified=real_run(config, inputs, candidate.block_size, warn))
        if candidate.block_size in sizes
        else candidate
        for candidate in candidates
    ]


def real_run(config: Config, inputs: Inputs, block_size: int, warn: Callable[[str], None]) -> Verified:
    """Serve the whole input with one block size, and measure it; loads the weights."""
    own = replace(config, block_size=block_size, max_tokens=1)
    with temporary_engine(own, warn, has_store=bool(config.store)) as engine:
        renderer = Renderer.load(locate_model(own.model), options=ChatOptions.of(own))  # the survey has warned
        feeder = Feeder(own, open_source(inputs, LineOptions.of(own)), renderer, PreviousAnswers())
        requests = requests_of(work_source(own, feeder, engine))
        totals, begin = Totals(), time.perf_counter()
        for result in engine.run(replace(request, max_tokens=1, min_tokens=0) for request in requests):
            if result.error is None:
                totals.add(result)
        engine.flush()
        total_s = time.perf_counter() - begin
        return Verified(engine.counters.seconds["prefill"], total_s, totals.cached_tokens)
