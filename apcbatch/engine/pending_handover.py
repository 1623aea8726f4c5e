"""Hand over the pending snapshots of failed planned requests: the first reader of each computes and publishes it.

An example: request 0 fails before it publishes its snapshots at 512 tokens, for the readers 2 and 3, and at 1,024, for
the reader 1. If 1 is admitted next, it resumes where 0 would have resumed, and publishes 512 for 2 and 3. If 2 is
admitted before 1, it publishes 512 for 3 and for 1, which resumes there.

Invariants: a snapshot that a failed request did not publish is computed once, by one of its readers, and held for the
others as the plan says. The snapshot that the failed request resumed from is held for that reader. A snapshot without
readers is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from apcbatch.engine.pending import PendingSnapshots, Promise
from apcbatch.engine.policy import ByPlan
from apcbatch.engine.sequence import Sequence
from apcbatch.engine.snapshots import Snapshots


@dataclass(slots=True)
class FailedRequest:
    """Pending snapshots of one failed planned request. keys: position -> key, ascending. leaders: pending position ->
    leader of the snapshot (engine/pending.py). reads: pending position -> number of planned requests that resume from
    it. source: position that the failed request was to resume from; 0 for none, or if it was already counted as a
    reader. leader: leader of the snapshot at `source`. later: positions kept for future runs. ideal: tokens of its
    prompt that other requests covered."""

    keys: dict[int, bytes]
    leaders: dict[int, int]
    reads: dict[int, int]
    source: int
    leader: int
    later: Collection[int]
    ideal: int

    def split(self, end: int) -> FailedRequest:
        """Split off the positions up to `end`, for a reader of `end` that publishes them in place of the failed
        request. It is no reader of `end` any more. The remaining positions, after `end`, count as one reader of `end`:
        the sequence that computes them will resume there."""
        rest = {p: reads for p, reads in self.reads.items() if p > end}
        taken = {p: reads - (p == end) for p, reads in self.reads.items() if p <= end}
        keys = {p: key for p, key in self.keys.items() if p <= end}
        source, leader, self.reads, self.source = self.source, self.leader, rest, 0
        if any(rest.values()):
            taken[end] += 1
            self.source, self.leader = end, self.leaders[end]
        later = [p for p in self.later if p <= end]
        return FailedRequest(keys, self.leaders, taken, source, leader, later, self.ideal)

    def pending_at(self, key: bytes | None) -> int:
        """Return the pending position with readers that has this key; 0 for none."""
        return next((p for p, reads in self.reads.items() if reads and self.keys[p] == key), 0)


class PendingHandover:
    """Pending snapshots of failed requests, in order of failure in `failed`. sequence_of: number -> waiting or running
    sequence."""

    def __init__(self, pending: PendingSnapshots, snapshots: Snapshots, sequence_of: Callable[[int], Sequence]) -> None:
        self._pending, self._snapshots, self._sequence_of = pending, snapshots, sequence_of
        self.failed: list[FailedRequest] = []

    def record(self, sequence: Sequence) -> None:
        """Record the snapshots that a planned sequence has not published when it ends, so that the first reader of each
        can take over."""
        pending, retention = self._pending.remove(sequence.number), sequence.retention
        if not pending:
            return
        # a held snapshot already counts the readers of a running sequence
        has_begun = sequence.is_running
        left = [promise for promise in pending if not (has_begun and self._snapshots.holds(promise.key))]
        reads = {promise.position: retention.reads(promise.position) for promise in left}
        if any(reads.values()):
            plan, keys = retention.plan, dict(sorted(sequence.keys.items()))
            leaders = {promise.position: promise.leader for promise in left}
            source = next((position for position, key in keys.items() if key == sequence.source), 0)
            leader, later = retention.leader, plan.keep_for_later
            self.failed.append(FailedRequest(keys, leaders, reads, source, leader, later, plan.ideal))
            sequence.source = b""

    def leader_of(self, key: bytes | None) -> int:
        """Return the leader of a key's pending snapshot that was submitted last, failed or not; -1 for none."""
        failed = [one.leaders[position] for one in self.failed if (position := one.pending_at(key))]
        return max([*self._pending.publishers(key), *failed], default=-1)

    def must_wait(self, sequence: Sequence) -> bool:
        """Return whether a sequence must wait for the pending snapshot that a failed request would have resumed
        from."""
        failed = self._find(sequence.retention.awaited, sequence.retention.leader)
        while failed is not None:
            source = failed.keys.get(failed.source)
            below = self._find(source, failed.leader)
            if below is None:
                return failed.leader in self._pending.publishers(source)
            failed = below
        return False

    def take_over(self, sequence: Sequence) -> None:
        """Let a sequence publish the snapshot that it was to resume from, if that snapshot's publisher has failed. The
        sequence then resumes where the publisher would have. If the publisher of that snapshot has failed too, take it
        over as well, and so on. Call this when the sequence is admitted, or fails before."""
        retention, pending = sequence.retention, list[Promise]()
        key = sequence.source
        while isinstance(retention, ByPlan) and (failed := self._find(key, retention.leader)) is not None:
            end = failed.pending_at(key)
            if self._snapshots.holds(key):  # from another publisher
                self._snapshots.add_reads(key, failed.reads.pop(end))
                break
            part = failed.split(end)
            kept = {position: reads for position, reads in part.reads.items() if reads or position in part.later}
            retention.take_over(kept, part.later, part.ideal, part.leader)
            sequence.keys = dict(sorted((part.keys | sequence.keys).items()))
            sequence.source = key = part.keys.get(part.source, b"")
            pending += [Promise(position, part.keys[position], part.leaders[position]) for position in kept]
        if pending:
            self._pending.take_over(sequence.number, pending)
        self._drop_unread()

    def add_readers(self, key: bytes, count: int, leader: int | None = None) -> None:
        """Count more pending readers of a snapshot, held or pending; -1: drop one. If it is neither, each of them
        computes its tokens. leader: the snapshot's; None for that of requests submitted now. While the publisher waits,
        or if it has failed, a held snapshot of this key is another publisher's, with readers of its own."""
        leader = self.leader_of(key) if leader is None else leader
        number, failed = self._pending.publishers(key).get(leader), self._find(key, leader)
        publisher = None if number is None else self._sequence_of(number)
        if failed is not None:
            failed.reads[failed.pending_at(key)] += count
            self._drop_unread()
        elif self._snapshots.holds(key) and (publisher is None or publisher.is_running):
            self._snapshots.add_reads(key, count)
        elif publisher is not None and isinstance(publisher.retention, ByPlan):
            publisher.retention.add_readers(next(p for p, one in publisher.keys.items() if one == key), count)

    def clear(self) -> None:
        """Drop all pending readers."""
        for failed in self.failed:
            failed.reads.clear()
        self._drop_unread()

    def _find(self, key: bytes | None, leader: int) -> FailedRequest | None:
        """Return the failed request that has a pending snapshot of this key and leader; None if there is none."""
        found = (one for one in self.failed if (at := one.pending_at(key)) and one.leaders[at] == leader)
        return next(found, None)

    def _drop_unread(self) -> None:
        unread = [failed for failed in self.failed if not any(failed.reads.values())]
        self.failed = [failed for failed in self.failed if any(failed.reads.values())]
        for failed in unread:
            if failed.source:
                self.add_readers(failed.keys[failed.source], -1, failed.leader)
