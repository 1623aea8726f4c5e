"""Which passes are begun when, so that no device waits for the host.

Must not know: answers, who is in a pass and why, when one is read.
"""

from __future__ import annotations

import time

from apcbatch.engine.counters import Counters
from apcbatch.engine.decode_batch import DecodeBatches
from apcbatch.engine.flight import Flight
from apcbatch.engine.pool import SnapshotPool
from apcbatch.engine.runner import Pass
from apcbatch.engine.scheduler import Scheduler
from apcbatch.engine.sequence import Sequence
from apcbatch.model.spread import Model
from apcbatch.model.spread_arena import Arena


class Launcher:
    """Begins passes of the sequences that the scheduler chooses. flight: those that were begun and not yet read."""

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
        """runs_ahead: whether a device computes the next pass while the host reads this one."""
        self.flight = Flight()
        self._decodes = DecodeBatches()
        self.runs_ahead = runs_ahead
        self._model, self._arena, self._scheduler, self._pool = model, arena, scheduler, pool
        self._counters, self._num_devices = counters, num_devices

    def begin_passes(self) -> tuple[list[Sequence], float]:
        """Begin passes of sequences that are in none: one for each device, and one more that has prompts in it. Returns
        the sequences that can never run for lack of memory, and the seconds of launching."""
        never: list[Sequence] = []
        launching_s = 0.0
        while self._has_room():
            begin = time.perf_counter()
            chunks, impossible = self._scheduler.schedule(self.flight.ends)
            never += impossible
            scheduled = time.perf_counter()
            self._counters.seconds["store"] += scheduled - begin
            if not chunks:
                break
            self.flight.begin(Pass(self._model, self._arena, self._decodes, chunks))
            self._pool.passes_begun()
            launching_s += time.perf_counter() - scheduled
        return never, launching_s

    def begin_next(self, current: Pass) -> None:
        """On a device, begin the pass after the current one, where that is known before its tokens are."""
        if not self.runs_ahead or current.failed:
            return
        chunks = self._scheduler.foresee(current.chunks, self.flight.ends)
        if chunks:
            self.flight.begin(Pass(self._model, self._arena, self._decodes, chunks, current))

    def _has_room(self) -> bool:
        """Whether one more pass is to be begun, if there are sequences for it."""
        if len(self.flight) < self._num_devices:
            return True
        is_full = self._num_devices == 1 or len(self.flight) > self._num_devices
        return not is_full and self._scheduler.has_prompts(self.flight.ends)
