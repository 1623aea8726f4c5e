"""Staffing: how many workers the work that is left needs. Who has none is let go; where much is left, more are asked
for again.

Must not know: the seam, what units hold. Invariants: one worker that is ready stays; nobody is let go who has work; no
more are there than the run was given.
"""

from __future__ import annotations

from apcbatch.cluster.crew import Crew, Worker
from apcbatch.cluster.loose import MOST_TOGETHER, LooseItems
from apcbatch.cluster.placing import Placing


class Staffing:
    """idle_s: a worker without work is let go after so long, and more are asked for again only where those that are
    there would take longer."""

    def __init__(self, crew: Crew, placing: Placing, loose: LooseItems, idle_s: float) -> None:
        self._crew, self._placing, self._loose = crew, placing, loose
        self._idle_s = idle_s
        self._began: float | None = None

    def settle(self, now: float) -> list[Worker]:
        """Those that are let go now. To be called every now and then from when the first request is there."""
        self._began = now if self._began is None else self._began
        idle = [worker for worker in self._crew if not worker.errands]
        num_loose = -(-len(self._loose) // MOST_TOGETHER)
        num_ready = len(self._placing.queue) + num_loose
        num_units = num_ready + len(list(self._placing.waiting))
        if len(idle) > num_units:
            return self._let_go(idle, len(idle) - num_units, now)
        num_worth = num_loose + int(self._placing.seconds / self._idle_s)
        self._crew.fill(min(num_ready, num_worth) - len(idle))
        return []

    def _let_go(self, idle: list[Worker], most: int, now: float) -> list[Worker]:
        """Let go of some: those first that have not begun to help, then those that are idle the longest."""
        began = self._began or 0.0
        since = {worker: max(worker.heard or worker.asked, began) for worker in idle}
        leaving = [worker for worker in idle if now - since[worker] >= self._idle_s]
        if not leaving:
            return []
        leaving.sort(key=lambda worker: (worker.facts is not None, since[worker]))
        gone: list[Worker] = []
        for worker in leaving:
            is_last = len(self._crew.ready) <= (worker.facts is not None)
            if len(gone) < most and not is_last:
                self._crew.let_go(worker)
                gone.append(worker)
        return gone
