"""Which planned requests may begin, so that what each of them keeps fits into the pool until its last reader has come.

An example with room for 10 bytes: 0 keeps 6 for 2, 1 keeps nothing, 3 keeps 5.
    Request 0 begins: 0 are live and it adds 6.
    1 begins beside it. 2 does not: it waits for 0.
    3 does not begin: with the 6 that must be live while 2 runs, its 5 make 11.
    When 0 has computed its prompt, 2 begins and reads; the 6 bytes are free.
    3 still waits: the plan has these 6 live while 1 and 2 run, so they count until both have computed their prompts.

Must not know: snapshots, slots, pages; it reads the bytes that the plan gives each request. Invariant: for every
request that has not begun, what the plan has live while it runs fits together with all that requests behind it in the
plan keep who have begun already (as far as the plan itself fits). So the first one can always begin, and nothing that
is still to be read ever has to go. Room comes back in the order of the plan only: it counts as taken until the first
request with prompt tokens to compute is one that does not need it.
"""

from __future__ import annotations

from apcbatch.engine.sequence import Sequence


class Admission:
    """Decides in one walk per step over the waiting sequences, in the order of submission: `begin` starts it, then each
    sequence is either admitted (`admit`) or passed over (`pass_over`)."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        # By number: the bytes kept by those that have begun, from the first unfinished prefill on.
        self._begun: dict[int, int] = {}
        # Those of them that the walk has not come to, the last one first.
        self._beyond: list[tuple[int, int]] = []
        self._beyond_bytes = 0
        self._needed_bytes = 0

    def begin(self, first: Sequence) -> None:
        """Start a walk. first: the first sequence, running or waiting, that has prompt tokens to compute."""
        self._begun = {number: kept for number, kept in self._begun.items() if number >= first.number}
        self._beyond = sorted(self._begun.items(), reverse=True)
        self._beyond_bytes = sum(self._begun.values())
        self._needed_bytes = first.retention.plan.live_bytes + self._beyond_bytes

    def fits(self, sequence: Sequence) -> bool:
        """Whether a sequence may begin before those that were passed over."""
        return self._needed_bytes + sequence.retention.plan.keep_bytes <= self._capacity_bytes

    def pass_over(self, sequence: Sequence) -> None:
        """A sequence does not begin now: leave room for it."""
        while self._beyond and self._beyond[-1][0] < sequence.number:
            self._beyond_bytes -= self._beyond.pop()[1]
        plan = sequence.retention.plan
        while_it_runs = plan.live_bytes + plan.keep_bytes + self._beyond_bytes
        self._needed_bytes = max(self._needed_bytes, while_it_runs)

    def admit(self, sequence: Sequence) -> None:
        """A sequence begins: what it keeps takes room from now on."""
        keep_bytes = sequence.retention.plan.keep_bytes
        if keep_bytes:
            self._begun[sequence.number] = keep_bytes
            self._needed_bytes += keep_bytes
