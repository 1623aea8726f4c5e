"""Hand over the pending snapshots of failed planned requests: the first reader of each computes and publishes it.

An example: request 0 fails before it publishes its snapshots at 512 tokens, for the readers 2 and 3, and at 1,024, for
the reader 1. If 1 is admitted next, it resumes where 0 would have resumed, and publishes 512 for 2 and 3. If 2 is
admitted before 1, it publishes 512 for 3 and for 1, which resumes there.

Invariants: a snapshot that a failed request did not publish is computed once, by one of its readers, and held for the
others as the plan says. The snapshot that the failed request resumed from is held for that reader. A snapshot without
readers is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from apcbatch.engine.pending import PendingSnapshots
from apcbatch.engine.policy import ByPlan
from apcbatch.engine.sequence import Sequence
from apcbatch.engine.snapshots import Snapshots


@dataclass(slots=True)
class FailedRequest:
    """Pending snapshots of one failed planned request. keys: position -> key, ascending. reads: pending position ->
    number of planned requests that resume from it. source: position that the failed request was to resume from; 0 for
    none, or if it was already counted as a reader. leader: number of the sequence that publishes the snapshot at
    `source`. later: positions kept for future runs. ideal: tokens of its prompt that other requests covered."""

    keys: dict[int, bytes]
    reads: dict[int, int]
    source: int
    leader: int
    later: Collection[int]
    ideal: int

    def split(self, end: int, publisher: int) -> FailedRequest:
        """Split off the positions up to `end`, for a reader of `end` that publishes them in place of the failed
        request. It is no reader of `end` any more. The remaining positions, after `end`, count as one reader of `end`:
        the sequence that computes them will resume there. publisher: number of the sequence that publishes."""
        rest = {p: reads for p, reads in self.reads.items() if p > end}
        taken = {p: reads - (p == end) for p, reads in self.reads.items() if p <= end}
        keys = {p: key for p, key in self.keys.items() if p <= end}
        source, leader, self.reads, self.source = self.source, self.leader, rest, 0
        if any(rest.values()):
            taken[end] += 1
            self.source, self.leader = end, publisher
        return FailedRequest(keys, taken, source, leader, [p for p in self.later if p <= end], self.ideal)


class PendingHandover:
    """Pending snapshots of failed requests. sequence_of: number -> waiting or running sequence."""

    def __init__(self, pending: PendingSnapshots, snapshots: Snapshots, sequence_of: Callable[[int], Sequence]) -> None:
        self._pending, self._snapshots, self._sequence_of = pending, snapshots, sequence_of
        self._failed: list[FailedRequest] = []

    def record(self, sequence: Sequence) -> None:
        """Record the snapshots that a planned sequence has not published when it ends, so that the first reader of each
        can take over."""
        pending, retention = self._pending.remove(sequence.number), sequence.retention
        if not pending:
            return
        # a held snapshot already counts the readers of a running sequence
        has_begun = sequence.is_running
        reads = {p: retention.reads(p) for p, key in pending if not (has_begun and self._snapshots.holds(key))}
        if any(reads.values()):
            plan, keys = retention.plan, dict(sorted(sequence.keys.items()))
            source = next((position for position, key in keys.items() if key == sequence.source), 0)
            self._failed.append(FailedRequest(keys, reads, source, retention.leader, plan.keep_for_later, plan.ideal))
            sequence.source = b""

    def must_wait(self, sequence: Sequence) -> bool:
        """Return whether a sequence must wait for the pending snapshot that a failed request would have resumed
        from."""
        failed = self._find(sequence.keys, sequence.retention.plan.resume_at)
        while failed is not None:
            below = self._find(failed.keys, failed.source)
            if below is None:
                return self._pending.is_pending_from(failed.leader, failed.keys.get(failed.source))
            failed = below
        return False

    def take_over(self, sequence: Sequence) -> None:
        """Let a sequence publish the snapshot that it was to resume from, if that snapshot's publisher has failed. The
        sequence then resumes where the publisher would have. If the publisher of that snapshot has failed too, take it
        over as well, and so on. Call this when the sequence is admitted, or fails before. Another request that failed
        to publish the same snapshot, for other readers, does not count while the sequence's own publisher is alive."""
        retention, pending = sequence.retention, list[tuple[int, bytes]]()
        end = retention.plan.resume_at
        while isinstance(retention, ByPlan) and (failed := self._find(sequence.keys, end)) is not None:
            if retention.leader in self._pending.publishers(failed.keys[end]):
                break
            if self._snapshots.holds(failed.keys[end]):  # from another publisher
                self._snapshots.add_reads(failed.keys[end], failed.reads.pop(end))
                break
            part = failed.split(end, sequence.number)
            kept = {position: reads for position, reads in part.reads.items() if reads or position in part.later}
            retention.take_over(kept, part.later, part.ideal, part.leader)
            sequence.keys, end = dict(sorted((part.keys | sequence.keys).items())), part.source
            sequence.source = part.keys.get(end, b"")
            pending += [(position, part.keys[position]) for position in kept]
        if pending:
            self._pending.take_over(sequence.number, pending)
        self._drop_unread()

    def drop_reader(self, key: bytes, leader: int = -1) -> None:
        """Drop one pending reader of a snapshot, held or still to be published. leader: number of the sequence that was
        to publish it for this reader; -1 if unknown. While it waits, a held snapshot's readers are those of another
        publisher."""
        leads = leader in self._pending.publishers(key) and not self._sequence_of(leader).is_running
        if self._snapshots.holds(key) and not leads:
            self._snapshots.drop_reader(key)
        elif (found := self._publisher(key, leader)) is not None:
            found[0].drop_reader(found[1])
        else:
            self._add_to_failed(key, -1)
            self._drop_unread()

    def add_readers(self, key: bytes, count: int) -> None:
        """Count more pending readers of a snapshot, held or still to be published. If it is neither, each of them
        computes its tokens."""
        if self._snapshots.holds(key):
            self._snapshots.add_reads(key, count)
        elif (found := self._publisher(key)) is not None:
            found[0].add_readers(found[1], count)
        else:
            self._add_to_failed(key, count)

    def _publisher(self, key: bytes, leader: int = -1) -> tuple[ByPlan, int] | None:
        """Return the retention of the planned sequence that will publish a key, and the key's position; None if there
        is none. leader: number of that sequence; -1 takes the last one with readers."""
        publishers = self._pending.publishers(key)
        for number in [leader] if leader in publishers else reversed(publishers):
            publisher = self._sequence_of(number)
            retention = publisher.retention
            position = next(p for p, one in publisher.keys.items() if one == key)
            if isinstance(retention, ByPlan) and (number == leader or retention.reads(position)):
                return retention, position
        return None

    def _add_to_failed(self, key: bytes, count: int) -> None:
        """Change the number of readers of a snapshot that a failed request was to publish, if there is one."""
        for failed in self._failed:
            position = next((p for p, reads in failed.reads.items() if reads and failed.keys[p] == key), None)
            if position is not None:
                failed.reads[position] += count
                return

    def clear(self) -> None:
        """Drop all pending readers."""
        for failed in self._failed:
            failed.reads.clear()
        self._drop_unread()

    def _find(self, keys: Mapping[int, bytes], end: int) -> FailedRequest | None:
        """Return the failed request whose pending snapshot at `end` has readers and the key of `keys` there; None if
        there is none. keys: position -> key."""
        found = (one for one in self._failed if one.reads.get(end) and one.keys[end] == keys.get(end))
        return next(found, None)

    def _drop_unread(self) -> None:
        unread = [failed for failed in self._failed if not any(failed.reads.values())]
        self._failed = [failed for failed in self._failed if any(failed.reads.values())]
        for failed in unread:
            if failed.source:
                self.drop_reader(failed.keys[failed.source], failed.leader)
