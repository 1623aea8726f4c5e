"""How much work the passes of a run are: a walk through the queue in the scheduler's order, without computing.

Must not know: seconds, snapshots, the values of tokens. It estimates where the scheduler waits for a snapshot: a
request that resumes waits for the one before it in its conversation, if that has not ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from apcbatch.engine.serving import LOOK_AHEAD


@dataclass(frozen=True)
class Workload:
    """Sums over a run. chunks: parts of requests in passes. tokens: those that are computed. context_pairs: for each of
    them, the tokens before it."""

    passes: int
    chunks: int
    tokens: int
    context_pairs: float


def walk(
    order: Sequence[int],
    lengths: Sequence[int],
    resume_at: Sequence[int],
    conversations: Sequence[int],
    max_batch_tokens: int,
    max_running: int,
) -> Workload:
    """The work of requests that each generate one token. order: request indexes; the other sequences are by request
    index."""
    leaders = _leaders(order, resume_at, conversations)
    computed = [length - cached for length, cached in zip(lengths, resume_at, strict=True)]
    left = list(computed)
    coming, waiting = deque(order), list[int]()
    running = list[int]()
    passes = chunks = 0
    while coming or waiting or running:
        while coming and len(waiting) < LOOK_AHEAD * max_running:
            waiting.append(coming.popleft())
        passed_over = list[int]()
        for index in waiting:
            free = len(running) < max_running and (leaders[index] == index or not left[leaders[index]])
            (running if free else passed_over).append(index)
        waiting, budget = passed_over, max_batch_tokens
        for index in running:
            count = min(budget, left[index])
            budget -= count
            left[index] -= count
            chunks += count > 0
        running = [index for index in running if left[index]]
        passes += 1
    pairs = sum(count * (length - count / 2) for length, count in zip(lengths, computed, strict=True))
    return Workload(passes, chunks, sum(computed), pairs)


def _leaders(order: Sequence[int], resume_at: Sequence[int], conversations: Sequence[int]) -> list[int]:
    """For each request, the one that it waits for; its own index if there is none."""
    leaders, before = list(range(len(order))), dict[int, int]()
    for index in order:
        if resume_at[index]:
            leaders[index] = before.get(conversations[index], index)
        before[conversations[index]] = index
    return leaders
