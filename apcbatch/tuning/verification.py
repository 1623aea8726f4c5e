"""Real runs of the best candidates, to check the prediction.

Must not know: how anything was predicted, how it is printed. A run generates one token per request and writes no
answers; its store, if there is to be one, is temporary.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from apcbatch.config import Config
from apcbatch.data.chat_options import ChatOptions
from apcbatch.data.inputs import Inputs
from apcbatch.data.layouts import LineOptions
from apcbatch.data.render import Renderer
from apcbatch.data.source import open_source
from apcbatch.job.answers import Answers
from apcbatch.job.engine import JobEngine
from apcbatch.job.feed import Feeder
from apcbatch.job.opening import make_engine
from apcbatch.job.planning import work_source
from apcbatch.job.totals import Totals
from apcbatch.job.work import requests_of
from apcbatch.model.locate import locate_model
from apcbatch.tuning.candidate import Candidate, Verified


def verify(
    config: Config,
    inputs: Inputs,
    candidates: list[Candidate],
    count: int,
    warn: Callable[[str], None],
) -> list[Candidate]:
    """The candidates, the `count` fastest of them verified by a real run each."""
    best = sorted(candidates, key=lambda candidate: candidate.total_s)[:count]
    sizes = {candidate.block_size for candidate in best}
    return [
        replace(candidate, verified=real_run(config, inputs, candidate.block_size, warn))
        if candidate.block_size in sizes
        else candidate
        for candidate in candidates
    ]


def real_run(config: Config, inputs: Inputs, block_size: int, warn: Callable[[str], None]) -> Verified:
    """Serve the whole input with one block size; loads the weights."""
    beside = Path(config.store).absolute().parent if config.store else None
    with tempfile.TemporaryDirectory(dir=beside if beside and beside.is_dir() else None) as folder:
        store = str(Path(folder) / "store") if config.store else None
        own = replace(config, block_size=block_size, max_tokens=1, store=store)
        engine = make_engine(own, warn)
        try:
            return _serve_all(own, inputs, engine)
        finally:
            engine.abort()
            engine.close()


def _serve_all(config: Config, inputs: Inputs, engine: JobEngine) -> Verified:
    renderer = Renderer.load(locate_model(config.model), options=ChatOptions.of(config))  # the survey has warned
    feeder = Feeder(config, open_source(inputs, LineOptions.of(config)), renderer, Answers())
    requests = requests_of(work_source(config, feeder, engine))
    totals, begin = Totals(), time.perf_counter()
    for result in engine.run(replace(request, max_tokens=1, min_tokens=0) for request in requests):
        if result.error is None:
            totals.add(result)
    engine.flush()
    total_s = time.perf_counter() - begin
    return Verified(engine.counters.seconds["prefill"], total_s, totals.cached_tokens)
