"""Measure the cost of prefill, snapshots, restores and writes on this machine with this model, in a few seconds.

All measurements go through the public Engine, on random tokens and with a store in a temporary folder.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from apcbatch.config import Config
from apcbatch.engine.validation import MAX_REQUEST_TOKENS
from apcbatch.job.work import JobEngine
from apcbatch.plan.footprint import Footprint
from apcbatch.types import Request, RequestPlan

MANY = 32  # prompts in one pass
SHORT, MEDIUM, LONG = 16, 64, 2048  # tokens of a prompt
SECONDS_FOR_LONG = 0.7
ROUNDS = 3
SECONDS_FOR_ROUNDS = 4.0
NUM_STORED = 8
MAX_FILL_RUNS = 64
NUM_CONTINUED = 16
CONTEXT = 3  # index of context pairs among the features
Sample = tuple[tuple[float, ...], float]  # features of the work of a measurement, and its seconds


@dataclass(frozen=True)
class Rate:
    """Measured prefill rate of a pass with `sequences` chunks, each of `chunk` new tokens after `context` restored
    tokens."""

    sequences: int
    chunk: int
    context: int
    tokens_per_s: float


@dataclass(frozen=True)
class Measurement:
    """Measured costs in seconds.

    pass_s: one pass. chunk_s: one chunk in a pass. token_s: one token. context_s: attention of one token to one token
    of context. snapshot_s: keeping one snapshot in a pass. restore_ram_s, restore_disk_s: one restore. write_byte_s:
    writing one byte. rates: prefills that the first four costs were fitted to.
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

    @property
    def tokens_per_s(self) -> float:
        """Best measured prefill rate."""
        return max(rate.tokens_per_s for rate in self.rates)

    @property
    def break_even_ram(self) -> float:
        """Tokens that prefill computes in the time of a restore from RAM."""
        return self.restore_ram_s * self.tokens_per_s

    @property
    def break_even_disk(self) -> float:
        """Tokens that prefill computes in the time of a restore from disk."""
        return self.restore_disk_s * self.tokens_per_s


def measure(config: Config, footprint: Footprint, warn: Callable[[str], None]) -> Measurement:
    """Measure with the configuration's model, dtype, device and budgets; loads the weights."""
    slots = 2 * MANY + LONG // SHORT
    pool_size = slots * footprint.state_bytes + 8 * LONG * footprint.kv_token_bytes
    own = replace(
        config,
        policy="planned",
        block_size=1,
        store_size=4 * pool_size,
        pool_size=pool_size,
        max_running=max(MANY, config.max_running),
        max_request_tokens=MAX_REQUEST_TOKENS,
    )
    with temporary_engine(own, warn, has_store=True) as engine:
        return _Meter(engine).measure()


@contextmanager
def temporary_engine(config: Config, warn: Callable[[str], None], *, has_store: bool) -> Iterator[JobEngine]:
    """Load an engine of this configuration without drafts. has_store: give it a store in a temporary folder (beside
    config.store, if its parent folder exists), which is deleted at the end."""
    from apcbatch.job.opening import make_engine

    parent = Path(config.store).absolute().parent if config.store else None
    config = replace(config, draft="none", draft_from=None, min_gain_tokens=config.gain_tokens)
    with tempfile.TemporaryDirectory(dir=parent if parent and parent.is_dir() else None) as folder:
        store = str(Path(folder) / "store") if has_store else None
        engine = make_engine(replace(config, store=store), warn)
        try:
            yield engine
        finally:
            engine.abort()
            engine.close()


class _Meter:
    """Measurements on one engine. Every prompt is random, so only snapshots kept on purpose are found."""

    def __init__(self, engine: JobEngine) -> None:
        self._engine = engine
        self._random = random.Random(0)
        self._vocab = min(engine.vocab_size, 1 << 15)
        self._longest = (engine.context_length or LONG + MANY + 2) - MANY - 2
        self._has_attention = engine.footprint.kv_token_bytes > 0
        self._count = 0

    def measure(self) -> Measurement:
        long = self._long_chunk()
        write_byte_s, restore_disk_s = self._store_costs(long)  # first: the others fill the pool with pinned snapshots
        kinds = [(1, long), (1, MEDIUM), (MANY, MEDIUM), (MANY, SHORT)]
        taken: dict[tuple[int, int, int], list[float]] = {}
        keeping: list[float] = []
        restores: list[float] = []
        [prefix] = self._prompts(1, max(MEDIUM, min(2 * long, self._longest - MEDIUM)))
        self._run([prefix], RequestPlan(keep=(len(prefix),), reads=(ROUNDS * NUM_CONTINUED + 1,)))
        keep = tuple(range(SHORT, long, SHORT))
        begin = time.perf_counter()
        for number in range(ROUNDS):
            if number and time.perf_counter() - begin > SECONDS_FOR_ROUNDS:
                break
            for count, length in kinds:
                seconds = self._prefill(self._prompts(count, length))
                taken.setdefault((count, length, 0), []).append(seconds)
            seconds, restore_s = self._continued(prefix)
            restores.append(restore_s)
            taken.setdefault((NUM_CONTINUED, MEDIUM, len(prefix)), []).append(seconds)
            plan = RequestPlan(keep=keep, reads=(1,) * len(keep))
            keeping.append(self._run(self._prompts(1, long), plan)[0])
        samples = [(_features(*kind, 0), statistics.median(seconds)) for kind, seconds in taken.items()]
        samples.append((_features(1, long, 0, len(keep)), statistics.median(keeping)))
        rates = tuple(
            Rate(count, chunk, context, count * chunk / max(1e-9, statistics.median(seconds)))
            for (count, chunk, context), seconds in taken.items()
        )
        pass_s, chunk_s, token_s, context_s, snapshot_s = _fit(samples, self._has_attention)
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
        """Return a prompt length up to LONG whose prefill takes about SECONDS_FOR_LONG. The passes that this takes also
        warm up the engine."""
        self._prefill(self._prompts(1, MEDIUM))
        seconds = self._prefill(self._prompts(4, MEDIUM))
        affordable = int(SECONDS_FOR_LONG * 4 * MEDIUM / max(1e-9, seconds))
        return max(2, min(LONG, self._longest, max(MEDIUM, affordable)))

    def _prompts(self, count: int, length: int) -> list[list[int]]:
        return [[self._random.randrange(self._vocab) for _ in range(length)] for _ in range(count)]

    def _run(self, prompts: Sequence[Sequence[int]], plan: RequestPlan) -> tuple[float, float]:
        """Answer the prompts under one plan; return (seconds of prefill, seconds of the store)."""
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

    def _continued(self, prefix: list[int]) -> tuple[float, float]:
        """Run NUM_CONTINUED prompts: the kept prefix, each with MEDIUM random tokens after it. Return (seconds of
        prefill, seconds of one restore from RAM)."""
        ends = self._prompts(NUM_CONTINUED, MEDIUM)
        plan = RequestPlan(resume_at=len(prefix), ideal=len(prefix))
        prefill_s, store_s = self._run([prefix + end for end in ends], plan)
        return prefill_s, store_s / NUM_CONTINUED

    def _store_costs(self, length: int) -> tuple[float, float]:
        """Measure and return (seconds of writing one byte, seconds of one restore from disk)."""
        length = max(2, min(length, LONG // 4))
        prompts = self._prompts(NUM_STORED, length)
        self._engine.flush()
        before = self._engine.counters.store_bytes_written
        self._run(prompts, RequestPlan(keep_for_later=(length,)))
        begin = time.perf_counter()
        self._engine.flush()
        write_s = time.perf_counter() - begin
        written = self._engine.counters.store_bytes_written - before
        self._fill_pool()
        return write_s / max(1, written), self._restore_disk_s(prompts)

    def _restore_disk_s(self, stored: Sequence[Sequence[int]]) -> float:
        """Return the seconds of one restore from disk. stored: prompts whose snapshots are on disk only.

        On a device a load overlaps with the host's work, and the pass that needs the snapshot waits for it. That wait,
        the excess over the same prefill with restores from memory, is included.
        """
        length = len(stored[0])
        plan = RequestPlan(resume_at=length, ideal=length)

        def resumed() -> tuple[float, float]:
            return self._run([[*prompt, *self._prompts(1, 1)[0]] for prompt in stored], plan)

        if self._engine.device == "cpu":
            return resumed()[1] / NUM_STORED
        self._prefill(self._prompts(NUM_STORED, 1))  # the first pass of a size takes longer
        from_disk, from_memory = resumed(), resumed()
        waited_s = max(0.0, from_disk[0] - from_memory[0])
        return (from_disk[1] + waited_s) / NUM_STORED

    def _fill_pool(self) -> None:
        """Keep new snapshots until NUM_STORED older ones are evicted from the pool. The stored ones are the oldest, so
        they are then on disk only."""
        evicted = self._engine.counters.snapshots_evicted + NUM_STORED
        for _ in range(MAX_FILL_RUNS):
            if self._engine.counters.snapshots_evicted >= evicted:
                return
            self._run(self._prompts(MANY, 4), RequestPlan(keep_for_later=(1, 2, 3, 4)))
            self._engine.flush()  # a snapshot that is being written cannot be evicted


def _features(count: int, length: int, context: int, snapshots: int) -> tuple[float, ...]:
    """Return the features of one pass, whose costs `_fit` estimates: 1 for the pass itself, and the numbers of its
    chunks, new tokens, context pairs and snapshots. count: chunks. length: new tokens of a chunk. context: restored
    tokens before each chunk. snapshots: those that the pass keeps."""
    return (1, count, count * length, count * length * (context + length / 2), snapshots)


def _fit(samples: Sequence[Sample], has_attention: bool) -> list[float]:
    """Fit non-negative costs of the features to the samples, by least squares of the relative errors."""
    matrix = np.array([[value / seconds for value in features] for features, seconds in samples])
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
