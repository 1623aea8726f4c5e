"""What prefill, a snapshot, a restore and a write cost on this machine with this model: a few seconds of work.

Must not know: the input, block sizes, how anything is printed. Everything goes through the public Engine, on random
tokens and with a store in a temporary folder.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from apcbatch.config import Config
from apcbatch.engine.room import MAX_REQUEST_TOKENS
from apcbatch.job.engine import JobEngine
from apcbatch.plan.footprint import Footprint
from apcbatch.tuning.workload import Workload
from apcbatch.types import Request, RequestPlan

MANY = 32  # prompts in one pass
SHORT, MEDIUM, LONG = 16, 64, 2048  # tokens of a prompt
SECONDS_FOR_LONG = 0.7
ROUNDS = 3
SECONDS_FOR_ROUNDS = 4.0
NUM_STORED = 8
MOST_CROWDS = 64
NUM_CONTINUED = 16
CONTEXT = 3  # which of the features is the tokens before each token


@dataclass(frozen=True)
class Rate:
    """One kind of prefill that was measured: `sequences` chunks of `chunk` new tokens each, behind `context` restored
    ones."""

    sequences: int
    chunk: int
    context: int
    tokens_per_s: float


@dataclass(frozen=True)
class Measurement:
    """Costs in seconds.

    pass_s: of a pass. chunk_s: of a chunk in it. token_s: of a token. context_s: of a token for each token of context
    before it. snapshot_s: of keeping a snapshot in a pass. restore_ram_s, restore_disk_s: of a restore. write_byte_s:
    of writing one byte. rates: the prefills that the first four explain.
    """

    rates: tuple[Rate, ...]
    pass_s: float
    chunk_s: float
    token_s: float
    context_s: float
    snapshot_s: float
    restore_ram_s: float
    restore_disk_s: float
    write_byte_s: float

    def prefill_s(self, work: Workload, snapshots: int) -> float:
        """Seconds of prefill, including those for the snapshots that are kept."""
        return (
            work.passes * self.pass_s
            + work.chunks * self.chunk_s
            + work.tokens * self.token_s
            + work.context_pairs * self.context_s
            + snapshots * self.snapshot_s
        )

    @property
    def tokens_per_s(self) -> float:
        """The best prefill rate that was measured."""
        return max(rate.tokens_per_s for rate in self.rates)

    @property
    def break_even_ram(self) -> float:
        """The tokens that could be computed in the time of a restore from RAM."""
        return self.restore_ram_s * self.tokens_per_s

    @property
    def break_even_disk(self) -> float:
        """The tokens that could be computed in the time of a restore from disk."""
        return self.restore_disk_s * self.tokens_per_s


def measure(config: Config, footprint: Footprint, warn: Callable[[str], None]) -> Measurement:
    """Measure with the configuration's model, dtype, device and budgets; loads the weights."""
    from apcbatch.job.opening import make_engine

    beside = Path(config.store).absolute().parent if config.store else None
    with tempfile.TemporaryDirectory(dir=beside if beside and beside.is_dir() else None) as folder:
        slots = 2 * MANY + LONG // SHORT
        pool_size = slots * footprint.state_bytes + 8 * LONG * footprint.kv_token_bytes
        own = replace(
            config,
            policy="planned",
            block_size=1,
            store=str(Path(folder) / "store"),
            store_size=4 * pool_size,
            pool_size=pool_size,
            max_running=max(MANY, config.max_running),
            max_request_tokens=MAX_REQUEST_TOKENS,
        )
        engine = make_engine(own, warn)
        try:
            return _Meter(engine).measure()
        finally:
            engine.abort()
            engine.close()


@dataclass(frozen=True)
class _Sample:
    """The features (passes, chunks, tokens, context pairs, snapshots) of one measured thing, and its seconds."""

    features: tuple[float, ...]
    seconds: float


class _Meter:
    """Drives one engine. Every prompt is new, so nothing is found except what was put there."""

    def __init__(self, engine: JobEngine) -> None:
        self._engine = engine
        self._random = random.Random(0)
        self._vocab = min(engine.vocab_size, 1 << 15)
        self._longest = (engine.context_length or LONG + MANY + 2) - MANY - 2
        self._has_attention = engine.footprint.kv_token_bytes > 0
        self._count = 0

    def measure(self) -> Measurement:
        """Measure everything; see Measurement."""
        long = self._long_chunk()
        write_byte_s, restore_disk_s = self._store_costs(long)  # first: later the pool is full of awaited snapshots
        kinds = [(1, long), (1, MEDIUM), (MANY, MEDIUM), (MANY, SHORT)]
        taken: dict[tuple[int, int, int], list[float]] = {}
        keeping: list[float] = []
        restores: list[float] = []
        stem = self._kept_stem(max(MEDIUM, min(2 * long, self._longest - MEDIUM)))
        keep = tuple(range(SHORT, long, SHORT))
        begin = time.perf_counter()
        for number in range(ROUNDS):
            if number and time.perf_counter() - begin > SECONDS_FOR_ROUNDS:
                break
            for count, length in kinds:
                seconds = self._prefill(self._prompts(count, length))
                taken.setdefault((count, length, 0), []).append(seconds)
            seconds, restore_s = self._continued(stem)
            restores.append(restore_s)
            taken.setdefault((NUM_CONTINUED, MEDIUM, len(stem)), []).append(seconds)
            keeping.append(self._keeping(long, keep))
        samples = [_Sample(_features(*kind, 0), statistics.median(seconds)) for kind, seconds in taken.items()]
        samples.append(_Sample(_features(1, long, 0, len(keep)), statistics.median(keeping)))
        pass_s, chunk_s, token_s, context_s, snapshot_s = _fit(samples, self._has_attention)
        rates = tuple(
            Rate(count, chunk, context, count * chunk / max(1e-9, statistics.median(seconds)))
            for (count, chunk, context), seconds in taken.items()
        )
        return Measurement(
            rates=rates,
            pass_s=pass_s,
            chunk_s=chunk_s,
            token_s=token_s,
            context_s=context_s,
            snapshot_s=snapshot_s,
            restore_ram_s=statistics.median(restores),
            restore_disk_s=restore_disk_s,
            write_byte_s=write_byte_s,
        )

    def _long_chunk(self) -> int:
        """A length between MEDIUM and LONG whose prefill takes about a second. The first passes warm everything up."""
        self._prefill(self._prompts(1, MEDIUM))
        seconds = self._prefill(self._prompts(4, MEDIUM))
        affordable = int(SECONDS_FOR_LONG * 4 * MEDIUM / max(1e-9, seconds))
        return max(2, min(LONG, self._longest, max(MEDIUM, affordable)))

    def _prompts(self, count: int, length: int) -> list[list[int]]:
        return [[self._random.randrange(self._vocab) for _ in range(length)] for _ in range(count)]

    def _run(self, prompts: Sequence[Sequence[int]], plan: RequestPlan) -> tuple[float, float]:
        """The seconds of these requests under one plan, as (prefill, store)."""
        before = dict(self._engine.counters.seconds)
        requests = []
        for prompt in prompts:
            self._count += 1
            requests.append(Request(f"measure-{self._count}", prompt, max_tokens=1, plan=plan))
        for result in self._engine.run(requests):
            if result.error is not None:
                raise result.error
        after = self._engine.counters.seconds
        return after["prefill"] - before["prefill"], after["store"] - before["store"]

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> float:
        return self._run(prompts, RequestPlan())[0]

    def _kept_stem(self, length: int) -> list[int]:
        """A prompt whose end is kept for all prompts that will continue it."""
        [stem] = self._prompts(1, length)
        self._run([stem], RequestPlan(keep=(length,), reads=(ROUNDS * NUM_CONTINUED + 1,)))
        return stem

    def _continued(self, stem: list[int]) -> tuple[float, float]:
        """Continue a kept prompt with new ends; (seconds of prefill, seconds of one restore from RAM)."""
        ends = self._prompts(NUM_CONTINUED, MEDIUM)
        plan = RequestPlan(resume_at=len(stem), ideal=len(stem))
        prefill_s, store_s = self._run([stem + end for end in ends], plan)
        return prefill_s, store_s / NUM_CONTINUED

    def _keeping(self, length: int, keep: tuple[int, ...]) -> float:
        """Seconds of one long prompt that keeps snapshots at these positions."""
        return self._run(self._prompts(1, length), RequestPlan(keep=keep, reads=(1,) * len(keep)))[0]

    def _store_costs(self, length: int) -> tuple[float, float]:
        """(seconds of writing one byte, seconds of one restore from disk)."""
        length = max(2, min(length, LONG // 4))
        prompts = self._prompts(NUM_STORED, length)
        self._engine.flush()
        before = self._engine.counters.store_bytes_written
        self._run(prompts, RequestPlan(keep_for_later=(length,)))
        begin = time.perf_counter()
        self._engine.flush()
        write_s = time.perf_counter() - begin
        written = self._engine.counters.store_bytes_written - before
        self._crowd_out()
        return write_s / max(1, written), self._restore_disk_s(prompts)

    def _restore_disk_s(self, stored: Sequence[Sequence[int]]) -> float:
        """Seconds of one restore of prompts that are on disk alone. A device brings a snapshot in while the host goes
        on, so that the pass which reads it takes longer than one that finds it in memory."""
        length = len(stored[0])
        plan = RequestPlan(resume_at=length, ideal=length)

        def resumed() -> tuple[float, float]:
            return self._run([[*prompt, *self._prompts(1, 1)[0]] for prompt in stored], plan)

        if self._engine.device == "cpu":
            return resumed()[1] / NUM_STORED
        self._prefill(self._prompts(NUM_STORED, 1))  # a pass of this size for the first time takes longer
        from_disk, from_memory = resumed(), resumed()
        waited_s = max(0.0, from_disk[0] - from_memory[0])
        return (from_disk[1] + waited_s) / NUM_STORED

    def _crowd_out(self) -> None:
        """Fill the pool with other snapshots, so that the stored ones are on disk alone."""
        evicted = self._engine.counters.snapshots_evicted + NUM_STORED
        for _ in range(MOST_CROWDS):
            if self._engine.counters.snapshots_evicted >= evicted:
                return
            self._run(self._prompts(MANY, 4), RequestPlan(keep_for_later=(1, 2, 3, 4)))
            self._engine.flush()  # what is being written cannot be dropped


def _features(count: int, length: int, context: int, snapshots: int) -> tuple[float, ...]:
    """The features of one pass with `count` chunks of `length` tokens."""
    return (1, count, count * length, count * length * (context + length / 2), snapshots)


def _fit(samples: Sequence[_Sample], has_attention: bool) -> list[float]:
    """The costs, none below 0, that explain the samples best by relative error."""
    matrix = np.array([[value / sample.seconds for value in sample.features] for sample in samples])
    active = [column for column in range(matrix.shape[1]) if has_attention or column != CONTEXT]
    costs = np.zeros(matrix.shape[1])
    while active:
        scale = np.abs(matrix[:, active]).max(axis=0)
        found = np.linalg.lstsq(matrix[:, active] / scale, np.ones(len(samples)), rcond=None)[0] / scale
        if found.min() >= 0:
            costs[active] = found
            break
        del active[int((found * scale).argmin())]
    return [float(cost) for cost in costs]
