"""End sequences (at their last token, by a failure, or dropped), and end a request with its last sequence.

Invariants: a sequence that ends frees all that it held. A request has one result.
"""

from __future__ import annotations

from collections.abc import Iterable

from apcbatch.engine.drafting import Drafting
from apcbatch.engine.pipeline import PassPipeline
from apcbatch.engine.scheduler import Scheduler
from apcbatch.engine.sequence import Chunk, Sequence, failed_result
from apcbatch.engine.snapshots import Snapshots
from apcbatch.engine.step import Pass
from apcbatch.errors import RequestError
from apcbatch.layout import PAGE_TOKENS
from apcbatch.model.devices import ran_out_of_memory
from apcbatch.types import Result


class Completion:
    """Completion of one engine's sequences."""

    def __init__(self, scheduler: Scheduler, snapshots: Snapshots, drafting: Drafting, pipeline: PassPipeline) -> None:
        self._scheduler, self._snapshots, self._drafting, self._pipeline = scheduler, snapshots, drafting, pipeline

    def finish(self, sequence: Sequence) -> list[Result]:
        """End a sequence that has its last token. Return its request's result if all of the request's answers have
        ended."""
        self._snapshots.complete(sequence)
        self._end(sequence)
        forks = sequence.forks
        if forks is not None:
            if forks.delivered or not forks.finished:
                return []
            forks.delivered = True
        self._snapshots.count_unique(sequence.siblings[0])
        return [sequence.result()]

    def fail(self, current: Pass, failures: dict[Chunk, RequestError], was_read: bool = False) -> list[Result]:
        """End the requests of a pass's failed chunks, all answers of each, as error records. was_read: the pass itself
        succeeded, so the finite snapshots of their prompts are published."""
        failed = requests_of(failures)
        for chunk in failures if was_read else ():
            broken = list(chunk.keep)
            chunk.keep = current.finite_keeps(chunk)
            self._snapshots.publish(chunk)
            chunk.keep = [keep for keep in broken if keep not in chunk.keep]
        for chunk in current.chunks:
            if chunk.sequence in failed:
                self._cancel(chunk)
        firsts = {chunk.sequence.siblings[0]: failure for chunk, failure in failures.items()}
        for first in firsts:
            self._drop(first.siblings)
        return [failed_result(first.request, failure) for first, failure in firsts.items()]

    def drop_all(self) -> None:
        """End all sequences that have begun, without results."""
        places = self._scheduler.places
        begun = [sequence.siblings for sequence in (*places.running, *places.preempted)]
        for siblings in [*begun, *(forks.sequences for forks in places.forks)]:
            self._drop(siblings)

    def _end(self, sequence: Sequence) -> None:
        """Free a begun sequence's slot, pages and snapshots, and remove it from the passes in flight."""
        if not sequence.is_running and sequence not in self._scheduler.places.preempted:
            return
        self._scheduler.finish(sequence)
        for chunk in self._pipeline.remove(sequence):
            self._cancel(chunk)

    def _cancel(self, chunk: Chunk) -> None:
        """Free the slots reserved for a pass that failed or is not read."""
        self._snapshots.cancel(chunk)
        self._drafting.release(chunk)

    def _drop(self, siblings: list[Sequence]) -> None:
        """Free the slots, pages and snapshots of all answers of a request."""
        for sequence in siblings:
            self._end(sequence)
        if siblings[0].forks is not None:
            self._scheduler.places.drop_answers(siblings[0].forks)


def requests_of(chunks: Iterable[Chunk]) -> set[Sequence]:
    """Return the sequences of all answers of these chunks' requests."""
    return {sequence for chunk in chunks for sequence in chunk.sequence.siblings}


def no_room(sequence: Sequence) -> RequestError:
    """Make the error of a sequence whose KV does not fit even if it runs alone."""
    return RequestError(
        "out_of_memory",
        f"the KV of {sequence.limit} tokens, the prompt and its answer ({-(-sequence.limit // PAGE_TOKENS)} pages), "
        "does not fit; raise --pool-size or ask for fewer new tokens",
    )


def not_finite() -> RequestError:
    """Make the error of states or logits with NaN or infinity."""
    return RequestError(
        "non_finite",
        "the model's numbers became NaN or infinite for this request, so that it has no answer; check the "
        "checkpoint's weights, or try another --dtype",
    )


def failed_pass(error: Exception) -> RequestError:
    """Make the error of a pass that raised."""
    if ran_out_of_memory(error):
        return RequestError("out_of_memory", "memory ran out in a pass with this request; run it again")
    return RequestError("internal", f"{error!r} in a pass with this request; run it again")


def failed_choice(error: Exception) -> RequestError:
    """Make the error of a request without a possible token, or whose own Ending or Constraint raised."""
    if isinstance(error, RequestError):
        return error
    return RequestError("internal", f"{error!r} while this request's next token was chosen; run it again")
