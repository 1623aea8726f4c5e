"""Pending snapshots of failed planned requests: pass each one to the first request that reads it, which publishes it.

An example: 0 was to publish 512 and 1,024, of which 1 reads 1,024 and 2, 3 read 512. It fails, at any moment. 1 begins
next: it starts from what 0 would have started from, and publishes 512 for 2 and 3. Where 2 begins before 1, it
publishes 512 for 3 and for 1, which starts there.

Must not know: passes, slots, pages. Invariants: a snapshot that a failed request did not publish is computed once, by
one of its readers, and held for the others as the plan says; the snapshot that the failed one resumed from is held for
that reader; what no reader is left for is let go.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from apcbatch.engine.policy import ByPlan
from apcbatch.engine.promises import Promises
from apcbatch.engine.sequence import Sequence
from apcbatch.engine.snapshots import Snapshots


@dataclass(slots=True)
class Left:
    """Pending snapshots of one failed planned request. keys: position -> key, ascending. reads: pending position ->
    number of planned requests that resume from it. source: position that the failed request was to resume from, 0 if
    that read was counted; leader: number of the sequence that publishes it. later: positions kept for future
    runs. ideal: tokens of its prompt that other requests covered."""

    keys: dict[int, bytes]
    reads: dict[int, int]
    source: int
    leader: int
    later: Collection[int]
    ideal: int

    def part(self, end: int, heir: int) -> Left:
        """Split off the positions up to `end`, for the reader of `end` that now publishes them and reads none. The
        positions after `end` then count as one reader of `end`. heir: number of the sequence that publishes."""
        rest = {p: reads for p, reads in self.reads.items() if p > end}
        taken = {p: reads - (p == end) for p, reads in self.reads.items() if p <= end}
        keys = {p: key for p, key in self.keys.items() if p <= end}
        source, leader, self.reads, self.source = self.source, self.leader, rest, 0
        if any(rest.values()):
            taken[end] += 1
            self.source, self.leader = end, heir
        return Left(keys, taken, source, leader, [p for p in self.later if p <= end], self.ideal)


class Heirs:
    """Pass the pending snapshots of failed requests to their readers. sequence_of: number -> waiting or running
    sequence."""

    def __init__(self, promises: Promises, snapshots: Snapshots, sequence_of: Callable[[int], Sequence]) -> None:
        self._promises, self._snapshots, self._sequence_of = promises, snapshots, sequence_of
        self._left: list[Left] = []

    def leave(self, sequence: Sequence) -> None:
        """Record the unpublished snapshots of a sequence that ends, for the first of their readers."""
        owed, retention = self._promises.settle(sequence.number), sequence.retention
        if not owed or not isinstance(retention, ByPlan):
            return
        # Where a snapshot is held already, a sequence that has begun counted its readers in.
        has_begun = sequence.is_running
        reads = {p: retention.reads(p) for p, key in owed if not (has_begun and self._snapshots.holds(key))}
        if any(reads.values()):
            plan, keys = retention.plan, dict(sorted(sequence.keys.items()))
            source = next((position for position, key in keys.items() if key == sequence.source), 0)
            self._left.append(Left(keys, reads, source, retention.leader, plan.keep_for_later, plan.ideal))
            sequence.source = b""

    def waits(self, sequence: Sequence) -> bool:
        """Whether a sequence must wait: the snapshot that a failed request would have resumed from is still pending."""
        left = self._of(sequence.keys, sequence.retention.plan.resume_at)
        while left is not None:
            below = self._of(left.keys, left.source)
            if below is None:
                return self._promises.come_from(left.leader, left.keys.get(left.source))
            left = below
        return False

    def inherit(self, sequence: Sequence) -> None:
        """A sequence is about to begin, or fails before it does: if what it was to resume from was left, it owes that
        from now on, and reads what the failed one was to read. That may have been left, too."""
        retention, owed = sequence.retention, list[tuple[int, bytes]]()
        end = retention.plan.resume_at
        while (left := self._of(sequence.keys, end)) is not None and isinstance(retention, ByPlan):
            if self._snapshots.holds(left.keys[end]):  # from another one that published it for others
                self._snapshots.add_reads(left.keys[end], left.reads.pop(end))
                break
            part = left.part(end, sequence.number)
            kept = {position: reads for position, reads in part.reads.items() if reads or position in part.later}
            retention.inherit(kept, part.later, part.ideal, part.leader)
            sequence.keys, end = dict(sorted((part.keys | sequence.keys).items())), part.source
            sequence.source = part.keys.get(end, b"")
            owed += [(position, part.keys[position]) for position in kept]
        if owed:
            self._promises.inherit(sequence.number, owed)
        self._drop_unread()

    def release(self, key: bytes, leader: int = -1) -> None:
        """Drop one pending reader of a snapshot, held or still to be published."""
        makers = self._promises.makers(key)
        if self._snapshots.holds(key):
            self._snapshots.release(key)
        elif makers:
            maker = self._sequence_of(leader if leader in makers else makers[0])
            if isinstance(maker.retention, ByPlan):
                maker.retention.expect_less(next(position for position, one in maker.keys.items() if one == key))
        else:
            for left in self._left:
                position = next((p for p, reads in left.reads.items() if reads and left.keys[p] == key), None)
                if position is not None:
                    left.reads[position] -= 1
                    self._drop_unread()
                    return

    def clear(self) -> None:
        """Drop all pending readers."""
        for left in self._left:
            left.reads.clear()
        self._drop_unread()

    def _of(self, keys: Mapping[int, bytes], end: int) -> Left | None:
        """The failed request whose pending snapshot at a position has readers; None if there is none."""
        of = (left for left in self._left if left.reads.get(end) and left.keys[end] == keys.get(end))
        return next(of, None)

    def _drop_unread(self) -> None:
        unread = [left for left in self._left if not any(left.reads.values())]
        self._left = [left for left in self._left if any(left.reads.values())]
        for left in unread:
            if left.source:
                self.release(left.keys[left.source], left.leader)
