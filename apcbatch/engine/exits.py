"""How sequences end: with their last token, with a failure, or dropped; and when that ends their request.

Must not know: tensors, how tokens are chosen, which passes are begun. Invariants: whatever way a sequence ends, all
that it held is free again, and a request has one result.
"""

from __future__ import annotations

from collections.abc import Iterable

from apcbatch.engine.flight import Flight
from apcbatch.engine.observer import Observer
from apcbatch.engine.runner import Chunk, Pass
from apcbatch.engine.scheduler import Scheduler
from apcbatch.engine.sequence import Sequence
from apcbatch.engine.snapshots import Snapshots
from apcbatch.errors import RequestError
from apcbatch.types import Result


class Exits:
    """Ends the sequences of one engine. observer: told of each prompt that is answered."""

    def __init__(self, scheduler: Scheduler, snapshots: Snapshots, flight: Flight) -> None:
        self.observer: Observer | None = None
        self._scheduler, self._snapshots, self._flight = scheduler, snapshots, flight

    def finish(self, sequence: Sequence) -> list[Result]:
        """End a sequence that has its last token; the result of its request, if that was the last answer to come."""
        if sequence.finish_reason:
            self._snapshots.complete(sequence)
            self._end(sequence)
        forks = sequence.forks
        if forks is None:
            return [self._result(sequence)] if sequence.finish_reason else []
        if forks.delivered or not forks.finished:
            return []
        forks.delivered = True
        return [self._result(sequence)]

    def fail(self, current: Pass, failures: dict[Chunk, RequestError], was_read: bool = False) -> list[Result]:
        """Give back what chunks of a pass held, and their requests' other answers; the requests become error records.
        was_read: the pass itself did not fail, so that the sound snapshots of their prompts serve the others."""
        failed = requests_of(failures)
        for chunk in failures if was_read else ():
            broken = list(chunk.keep)
            chunk.keep = current.sound(chunk)
            self._snapshots.publish(chunk)
            chunk.keep = [keep for keep in broken if keep not in chunk.keep]
        for chunk in current.chunks:
            if chunk.sequence in failed:
                self._snapshots.cancel(chunk)
        firsts = {chunk.sequence.siblings[0]: failure for chunk, failure in failures.items()}
        for first in firsts:
            self._drop(first.siblings)
        return [first.failure(failure) for first, failure in firsts.items()]

    def drop_all(self) -> None:
        """End everything that has begun, without results."""
        begun = [sequence.siblings for sequence in self._scheduler.running]
        for siblings in [*begun, *(forks.sequences for forks in self._scheduler.forks)]:
            self._drop(siblings)

    def _result(self, sequence: Sequence) -> Result:
        """The result of the request that a sequence was the last of to end."""
        first = sequence.siblings[0]
        self._snapshots.count_unique(first)
        if self.observer is not None:
            self.observer.answered(first.tokens[: first.num_prompt], first.cached_tokens, first.cached_from)
        return sequence.result()

    def _end(self, sequence: Sequence) -> None:
        """Free what a sequence holds, if it runs; a pass that was begun goes on without it."""
        if not sequence.is_running:
            return
        self._scheduler.finish(sequence)
        for chunk in self._flight.leave_out(sequence):
            self._snapshots.cancel(chunk)

    def _drop(self, siblings: list[Sequence]) -> None:
        """Free what all answers of a request hold."""
        for sequence in siblings:
            self._end(sequence)
        if siblings[0].forks is not None:
            self._scheduler.drop_answers(siblings[0].forks)


def requests_of(chunks: Iterable[Chunk]) -> set[Sequence]:
    """The sequences of all answers of these chunks' requests."""
    return {sequence for chunk in chunks for sequence in chunk.sequence.siblings}
