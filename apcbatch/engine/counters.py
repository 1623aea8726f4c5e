"""What an engine has done so far, as numbers.

Must not know: requests, when it is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from apcbatch.engine.counts import Counts
from apcbatch.engine.observer import StepFacts
from apcbatch.engine.pool import SnapshotPool
from apcbatch.engine.snapshots import Snapshots
from apcbatch.store import Store


@dataclass
class Counters(Counts):
    """What one engine has done so far."""

    def add_pass(self, chunks: int, prefill_tokens: int, decode_tokens: int, seconds_per_token: float) -> None:
        """Count a pass; its time is shared by its tokens."""
        self.chunks += chunks
        self.prefill_tokens += prefill_tokens
        self.decode_tokens += decode_tokens
        self.seconds["prefill"] += seconds_per_token * prefill_tokens
        self.seconds["decode"] += seconds_per_token * decode_tokens

    def update(
        self, snapshots: Snapshots, pool: SnapshotPool, store: Store | None, devices: Sequence[torch.device]
    ) -> None:
        """Read off everything but what the passes add up. After the store is closed its numbers stay as they were."""
        self.snapshots_written = snapshots.num_written
        self.snapshots_read = snapshots.num_read
        self.snapshots_for_later = snapshots.num_for_later
        self.snapshots_evicted = pool.evicted
        self.peak_live_snapshots = pool.peak_held
        self.unique_tokens = snapshots.coverage.unique_tokens
        if devices[0].type == "cuda":
            self.peak_device_bytes = sum(torch.cuda.max_memory_allocated(device) for device in devices)
        if store:
            self.store_bytes_written = store.counters.bytes_written
            self.store_bytes_read = store.counters.bytes_read
            self.store_skipped = store.counters.skipped


def facts_between(
    before: Counters, now: Counters, seconds: float, waiting: int, pool_bytes: int, store_bytes: int
) -> StepFacts:
    """What a step did that took so many seconds. before: the counters when it began. The rest: as StepFacts has it."""
    return StepFacts(
        seconds,
        now.seconds["prefill"] - before.seconds["prefill"],
        now.seconds["decode"] - before.seconds["decode"],
        now.seconds["store"] - before.seconds["store"],
        now.prefill_tokens - before.prefill_tokens,
        now.decode_tokens - before.decode_tokens,
        now.chunks - before.chunks,
        waiting,
        pool_bytes,
        store_bytes,
    )
