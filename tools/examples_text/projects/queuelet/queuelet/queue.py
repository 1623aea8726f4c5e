"""The queue: what is due is run in the order of priority."""

import heapq
from collections.abc import Callable
from typing import Any

from queuelet.job import CANCELLED, FAILED, WAITING, Job
from queuelet.retry import Backoff


class Queue:
    """Jobs that wait. A higher priority runs first; times are seconds of a clock that the caller reads."""

    def __init__(self, backoff: Backoff | None = None) -> None:
        self.backoff = backoff or Backoff()
        self._heap: list[tuple[int, float, Job]] = []
        self._added = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(
        self, function: Callable[..., Any], *arguments: Any, priority: int = 0, not_before: float = 0.0
    ) -> Job:
        """Put a call into the queue."""
        job = Job(function, arguments)
        self._push(job, priority, not_before)
        return job

    def cancel(self, job: Job) -> None:
        """Make sure that a waiting job will not run."""
        if job.state == WAITING:
            job.state = CANCELLED

    def run_due(self, now: float) -> list[Job]:
        """Run every job whose time has come, and return those that were run."""
        due, later = [], []
        while self._heap:
            priority, not_before, job = heapq.heappop(self._heap)
            if job.state == CANCELLED:
                continue
            (due if not_before < now else later).append((priority, not_before, job))
        for entry in later:
            heapq.heappush(self._heap, entry)
        for priority, _, job in due:
            self._run(job, -priority, now)
        return [job for _, _, job in due]

    def _push(self, job: Job, priority: int, not_before: float) -> None:
        self._added += 1
        heapq.heappush(self._heap, (-priority, not_before, job))

    def _run(self, job: Job, priority: int, now: float) -> None:
        if job.attempt():
            return
        wait = self.backoff.after(job.failures)
        if wait is None:
            job.state = FAILED
        else:
            self._push(job, priority, now + wait)
