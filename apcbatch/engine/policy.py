"""Decide which snapshots a request keeps, which it may resume from, and which publisher it waits for.

Each request has one `Retention`.

The engine's policy and the request choose it at submission, so requests with and without a plan run in one batch. With
blocks of 64, a prompt of 300 tokens that forks from an earlier one after 200, and an answer of 100 tokens, they keep:

    all                     EveryBoundary   64, 128, 192, 256; of the answer 320, 384
    last                    LastBoundary    256; of the answer 320, then 384 in its place
    planned, without plan   LastAndFork     192, before the fork, and 256; of the answer as `last`
    any but none, a plan    ByPlan          keep=(130,): 130, until its last reader; keep_for_later=(256,): 256
    none                    Nothing         nothing

A plan's own positions are decided in `apcbatch.plan`.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from apcbatch.engine.coverage import Match
from apcbatch.engine.pending import PendingSnapshots
from apcbatch.prefix import boundaries_in, last_boundary
from apcbatch.types import Policy, Request, RequestPlan

NO_PLAN = RequestPlan()


class Retention(ABC):
    """Retention of one request; this base class is without a plan.

    Positions count tokens of the prompt and the answer. plan: the request's plan, an empty one for none. block_size:
    tokens between the positions that may be kept or resumed from.
    """

    def __init__(self, request: Request, num_prompt: int, block_size: int) -> None:
        self.plan = request.plan or NO_PLAN
        self._num_prompt, self.block_size = num_prompt, block_size
        self._resumable = request.resumable
        self._last_kept = sys.maxsize if request.keep_answer else num_prompt
        self._fork = 0
        self.awaited: bytes | None = None  # key of a boundary that another sequence will publish
        self.leader = -1  # of the awaited snapshot: see engine/pending.py

    @abstractmethod
    def kept(self, begin: int, end: int) -> Sequence[int]:
        """Return positions p with begin < p <= end whose snapshots are kept, ascending."""

    def kept_at_once(self, begin: int, end: int) -> Sequence[int]:
        """Return the positions of `kept` that get their slots when the pass is scheduled."""
        return self.kept(begin, end)

    def kept_if_room(self, begin: int, end: int) -> Sequence[int]:
        """Return the others of `kept`: they get the slots that the pass leaves."""
        return ()

    def key_positions(self) -> Sequence[int]:
        """Return the positions of the prompt that may be kept, resumed from or waited for, ascending."""
        return boundaries_in(0, self._num_prompt, self.block_size)

    def reads(self, position: int) -> int:
        """Return how many planned requests will resume from the snapshot at a position; it is held until they have."""
        return 0

    def is_for_this_run(self, position: int) -> bool:
        """Return whether a kept snapshot counts as written for this run, and not for future runs alone."""
        return True

    def is_for_later(self, position: int) -> bool:
        """Return whether a plan keeps a snapshot for future runs, in memory beyond its last reader."""
        return False

    def is_stored(self, position: int) -> bool:
        """Return whether a kept snapshot goes to the store."""
        return True

    def supersedes(self, position: int) -> bool:
        """Return whether a kept snapshot replaces the previous one, and is stored when the answer ends."""
        return False

    def counts_on(self, position: int) -> bool:
        """Return whether the request may resume from an awaited snapshot, and evict awaited ones to load it."""
        return True

    def ideal(self, match: Match) -> Match:
        """Return the longest prefix that other requests cover, without the prompt's last token. match: the match with
        the prompts admitted before. A plan's length takes its place: it depends on neither order nor worker."""
        if self.plan is NO_PLAN:
            return replace(match, length=min(match.length, self._num_prompt - 1))
        return replace(match, length=self.plan.ideal, exact=self.plan.is_ideal_exact)

    def saw_fork(self, position: int) -> None:
        """Record that the prompt forked from an earlier one. position: the last boundary before the fork."""
        self._fork = position

    def pending_at_submission(self) -> Sequence[int]:
        """Return the positions of the prompt that others may wait for from submission on."""
        return ()

    def pending_at_begin(self, computed: int) -> Sequence[int]:
        """Return the positions of the prompt that others may wait for once it runs. computed: the position it resumes
        at."""
        return self.kept(computed, self._num_prompt)

    def follow(self, keys: dict[int, bytes], leader_of: Callable[[bytes | None], int]) -> None:
        """Record at submission which publisher to wait for. keys: prefix keys by position, ascending. leader_of: see
        PendingHandover."""
        self.awaited = keys.get(self.plan.resume_at)

    def waits(self, keys: dict[int, bytes], pending: PendingSnapshots, available: Callable[[], int]) -> bool:
        """Return whether a longer prefix of the prompt is pending than is available now."""
        self.awaited = pending.longest(keys, available(), self._resumable + 1) if pending else None
        return self.awaited is not None


class EveryBoundary(Retention):
    """Retention of every boundary of prompt and answer."""

    def kept(self, begin: int, end: int) -> Sequence[int]:
        return boundaries_in(begin, min(end, self._last_kept), self.block_size)


class LastBoundary(Retention):
    """Retention of the prompt's last boundary and the answer's latest."""

    def kept(self, begin: int, end: int) -> Sequence[int]:
        end = min(end, self._last_kept)
        if begin >= self._num_prompt:
            return boundaries_in(begin, end, self.block_size)
        return [position for position in self._of_prompt() if begin < position <= end]

    def supersedes(self, position: int) -> bool:
        return position > self._num_prompt

    def _of_prompt(self) -> list[int]:
        return [last_boundary(self._num_prompt, self.block_size)]


class LastAndFork(LastBoundary):
    """Retention of LastBoundary, and of the boundary before a fork, which a third prompt may share."""

    def _of_prompt(self) -> list[int]:
        return sorted({self._fork, *super()._of_prompt()})


class Nothing(Retention):
    """No retention: keeps no snapshot and resumes from none."""

    def kept(self, begin: int, end: int) -> Sequence[int]:
        return ()

    def key_positions(self) -> Sequence[int]:
        return ()


class ByPlan(Retention):
    """Retention by a plan: it keeps the plan's snapshots, each until its last reader, and waits for the snapshot that
    the plan resumes from.

    It waits for the snapshot's leader, the last earlier request that is to publish it, or for the one in place of a
    failed leader. With little memory several requests publish the same prefix, each for some readers: 3 and 7 keep
    position 128, two requests read that of 3, and 8, which comes after both, reads that of 7.
    """

    def __init__(self, request: Request, num_prompt: int, block_size: int) -> None:
        super().__init__(request, num_prompt, block_size=1)
        reads = dict.fromkeys(self.plan.keep_for_later, 0) | dict(zip(self.plan.keep, self.plan.reads, strict=True))
        self._reads = dict(sorted(reads.items()))

    def kept(self, begin: int, end: int) -> Sequence[int]:
        end = min(end, self._last_kept)
        return [position for position in self._reads if begin < position <= end]

    def kept_at_once(self, begin: int, end: int) -> Sequence[int]:
        return [position for position in self.kept(begin, end) if self._reads[position]]

    def kept_if_room(self, begin: int, end: int) -> Sequence[int]:
        return [position for position in self.kept(begin, end) if not self._reads[position]]

    def key_positions(self) -> Sequence[int]:
        return sorted({self.plan.resume_at, *self._reads} - {0})

    def reads(self, position: int) -> int:
        return self._reads.get(position, 0)

    def is_for_this_run(self, position: int) -> bool:
        return self.reads(position) > 0

    def is_for_later(self, position: int) -> bool:
        return position in self.plan.keep_for_later

    def is_stored(self, position: int) -> bool:
        return self.is_for_later(position)

    def counts_on(self, position: int) -> bool:
        return position <= self.plan.resume_at

    def add_readers(self, position: int, count: int) -> None:
        """Add pending readers of a position that it keeps; -1: drop one. A position without readers is not kept."""
        self._reads = dict(sorted({**self._reads, position: max(0, self.reads(position) + count)}.items()))
        if not self._reads[position] and not self.is_for_later(position):
            del self._reads[position]

    def pending_at_submission(self) -> Sequence[int]:
        return self.kept(0, self._num_prompt)

    def pending_at_begin(self, computed: int) -> Sequence[int]:
        return ()

    def follow(self, keys: dict[int, bytes], leader_of: Callable[[bytes | None], int]) -> None:
        super().follow(keys, leader_of)
        self.leader = leader_of(self.awaited)

    def waits(self, keys: dict[int, bytes], pending: PendingSnapshots, available: Callable[[], int]) -> bool:
        return self.leader in pending.publishers(self.awaited)

    def take_over(self, reads: Mapping[int, int], later: Iterable[int], ideal: int, leader: int) -> None:
        """Add the snapshots that a failed request was to keep. reads: position -> readers; later: positions for future
        runs. ideal: tokens of the prompt covered by requests other than the failed one. leader: of the snapshot
        that the failed one was to resume from."""
        self.leader = leader
        self._reads = dict(sorted({**self._reads, **reads}.items()))
        keep_for_later = tuple(sorted({*self.plan.keep_for_later, *later}))
        self.plan = replace(self.plan, keep_for_later=keep_for_later, ideal=min(self.plan.ideal, ideal))


WITHOUT_PLAN: Mapping[Policy, type[Retention]] = {
    "all": EveryBoundary,
    "last": LastBoundary,
    "planned": LastAndFork,
    "none": Nothing,
}


def keeps_snapshots(policy: Policy) -> bool:
    """Return whether a policy keeps any snapshot."""
    return WITHOUT_PLAN[policy] is not Nothing


def retention_of(policy: Policy, request: Request, num_prompt: int, block_size: int) -> Retention:
    """Make the retention of a checked request in an engine of this policy. num_prompt, block_size: in tokens."""
    follows_plan = request.plan is not None and keeps_snapshots(policy)
    return (ByPlan if follows_plan else WITHOUT_PLAN[policy])(request, num_prompt, block_size)
