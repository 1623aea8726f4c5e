"""Passes in flight: begin each early enough that no device waits for the host."""

from __future__ import annotations

import time
from collections import deque

from apcbatch.engine.counters import Counters
from apcbatch.engine.pool import SnapshotPool
from apcbatch.engine.scheduler import Scheduler
from apcbatch.engine.sequence import Chunk, Sequence
from apcbatch.engine.step import DecodeBatches, Pass
from apcbatch.model.pipeline import Model
from apcbatch.model.pipeline_arena import Arena


class PassPipeline:
    """Passes that were begun and not yet read, oldest first, with chunks from the scheduler. runs_ahead: whether the
    device computes the next pass while the host reads one."""

    def __init__(
        self,
        model: Model,
        arena: Arena,
        scheduler: Scheduler,
        pool: SnapshotPool,
        counters: Counters,
        *,
        num_devices: int,
        runs_ahead: bool,
    ) -> None:
        self.runs_ahead = runs_ahead
        self._model, self._arena, self._scheduler, self._pool = model, arena, scheduler, pool
        self._counters, self._num_devices = counters, num_devices
        self._decodes = DecodeBatches()
        self._passes: deque[Pass] = deque()

    def __len__(self) -> int:
        return len(self._passes)

    @property
    def ends(self) -> dict[Sequence, int]:
        """Sequences in flight -> position that each will have reached after its last pass."""
        return {chunk.sequence: chunk.end for one in self._passes for chunk in one.chunks}

    def begin_passes(self) -> tuple[list[Sequence], float]:
        """Keep one pass in flight per device, plus one prefill pass if there are several devices. Return the sequences
        that need more memory than there is, and the seconds spent launching."""
        never: list[Sequence] = []
        launching_s = 0.0
        while self._has_room():
            begin = time.perf_counter()
            chunks, impossible = self._scheduler.schedule(self.ends)
            never += impossible
            scheduled = time.perf_counter()
            self._counters.seconds["store"] += scheduled - begin
            if not chunks:
                break
            self._scheduler.add_drafts(chunks)
            self._passes.append(Pass(self._model, self._arena, self._decodes, chunks))
            self._pool.passes_begun()
            launching_s += time.perf_counter() - scheduled
        return never, launching_s

    def next(self) -> Pass:
        """Remove and return the oldest pass, to be read. On a device, begin the next pass first if its chunks do not
        depend on tokens that were not read."""
        current = self._passes.popleft()
        if self.runs_ahead and not current.failed:
            chunks = self._scheduler.foresee(current.chunks, self.ends)
            if chunks:
                self._passes.append(Pass(self._model, self._arena, self._decodes, chunks, current))
        return current

    def remove(self, sequence: Sequence) -> list[Chunk]:
        """Remove an ended sequence, and passes without other sequences. Return its chunks."""
        removed = [chunk for one in self._passes for chunk in one.remove(sequence)]
        if removed:
            self._passes = deque(one for one in self._passes if one.chunks)
        return removed

    def _has_room(self) -> bool:
        """Return whether one more pass is to be begun, if there are sequences for it."""
        if len(self) < self._num_devices:
            return True
        is_full = self._num_devices == 1 or len(self) > self._num_devices
        return not is_full and self._scheduler.has_prompts(self.ends)
