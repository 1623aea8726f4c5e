"""Which planned requests may begin, so that what each of them keeps fits into the pool until its last reader has come.

Must not know: snapshots, slots, pages; it reads the bytes that the plan gives each request. Invariant: for every
request that has not begun, what the plan has live while that one runs, and all that requests behind it in the plan
keep who have begun already, fit together (as far as the plan itself fits). So the first one can always begin, and
nothing that is still to be read ever has to go. Only in order does a request's begin give room back: what those ahead
of the first unfinished one have let go of counts as held, until the others have come as far.
"""

from __future__ import annotations

from apcbatch.engine.sequence import Sequence


class Admission:
    """One walk over the waiting sequences a step, in the order of submission: `begin`, then `pass_over` or `admit`."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._begun: dict[
            int, int
        ] = {}  # by number: what is kept by those not behind the first unfinished prefill
        self._beyond: list[
            tuple[int, int]
        ] = []  # those of them that the walk has not come to, the last one first
        self._beyond_bytes = 0
        self._needed_bytes = 0

    def begin(self, first: Sequence) -> None:
        """Start a walk. first: the first sequence, running or waiting, that has prompt tokens to compute."""
        self._begun = {number: kept for number, kept in self._begun.items() if number >= first.number}
        self._beyond = sorted(self._begun.items(), reverse=True)
        self._beyond_bytes = sum(self._begun.values())
        self._needed_bytes = first.retention.plan.live_bytes + self._beyond_bytes

    def fits(self, sequence: Sequence) -> bool:
        """Whether a sequence may begin although all that were passed over come after it."""
        return self._needed_bytes + sequence.retention.plan.keep_bytes <= self._capacity_bytes

    def pass_over(self, sequence: Sequence) -> None:
        """A sequence does not begin now: room for it remains."""
        while self._beyond and self._beyond[-1][0] < sequence.number:
            self._beyond_bytes -= self._beyond.pop()[1]
        plan = sequence.retention.plan
        while_it_runs = plan.live_bytes + plan.keep_bytes + self._beyond_bytes
        self._needed_bytes = max(self._needed_bytes, while_it_runs)

    def admit(self, sequence: Sequence) -> None:
        """A sequence begins: what it keeps is promised."""
        keep_bytes = sequence.retention.plan.keep_bytes
        if keep_bytes:
            self._begun[sequence.number] = keep_bytes
            self._needed_bytes += keep_bytes
