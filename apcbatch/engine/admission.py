"""Admit planned requests so that the snapshots of each fit into the pool until their last reader has run.

An example with a pool of 10 bytes. Request 0 keeps 6 bytes for request 2, request 1 keeps nothing, request 3 keeps 5.
    0 is admitted: no byte is live, and it adds 6.
    1 is admitted too. 2 is not: it waits for the snapshot of 0.
    3 is not admitted: 6 bytes must be live while 2 runs, and its 5 would make 11.
    When 0 has computed its prompt, 2 is admitted and reads the snapshot; the pool could evict it now.
    3 still waits: the plan has these 6 live while 1 and 2 run, so they count until both have computed their prompts.

Admission counts the bytes in the plan, not those in the pool. Invariant: for each waiting request, the bytes that the
plan has live while it runs, and the bytes kept by admitted requests later in the plan, fit into the pool together (as
far as the plan itself fits). So the first waiting request can always begin, and no snapshot is evicted before its last
reader. Bytes are freed in the order of the plan only: they count until all requests up to their last reader in the plan
have computed their prompts.
"""

from __future__ import annotations

from apcbatch.engine.sequence import Sequence


class Admission:
    """Admission by the plan's bytes, in one walk per step over the waiting sequences in order of submission.

    `begin` starts the walk. Each sequence is then admitted (`admit`) or passed over (`pass_over`)."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        # number -> bytes kept by each admitted sequence, from the first unfinished prefill on
        self._begun: dict[int, int] = {}
        # (number, bytes) of those that the walk has not reached, by descending number
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
        """Return whether a sequence may be admitted ahead of those that were passed over."""
        return self._needed_bytes + sequence.retention.plan.keep_bytes <= self._capacity_bytes

    def pass_over(self, sequence: Sequence) -> None:
        """Reserve bytes for a sequence that is not admitted now."""
        while self._beyond and self._beyond[-1][0] < sequence.number:
            self._beyond_bytes -= self._beyond.pop()[1]
        plan = sequence.retention.plan
        while_it_runs = plan.live_bytes + plan.keep_bytes + self._beyond_bytes
        self._needed_bytes = max(self._needed_bytes, while_it_runs)

    def admit(self, sequence: Sequence) -> None:
        """Reserve the bytes of the snapshots that an admitted sequence will keep."""
        keep_bytes = sequence.retention.plan.keep_bytes
        if keep_bytes:
            self._begun[sequence.number] = keep_bytes
            self._needed_bytes += keep_bytes


# decode passes; measured on an H200 while the host needed 22 to 30 ms for a pass with prompts and 6 ms for a decode
COST_ON_DEVICE = 3
AT_ONCE = 4  # prefill admission opens if a fourth of the slots is free
FEWEST_TOKENS = 1024  # lower bound of a group's share of a pass's tokens


class PrefillAdmission:
    """Gate that batches prefills, so that they rarely interrupt decode passes. It opens once many slots are free, or
    once idle slots have cost as much as a prefill pass.

    num_places: capacity in running sequences. cost: extra time of a pass with prompts over a decode pass, in decode
    passes; 0: always open.
    """

    def __init__(self, num_places: int, cost: int) -> None:
        self._many, self._most_idle = num_places / AT_ONCE, cost * num_places
        self._idle = 0
        self.is_open = False

    def opens(self, num_free: int) -> bool:
        """Return whether the pass being scheduled may admit sequences. Call it once per pass."""
        if not self.is_open:
            self._idle += num_free
            self.is_open = num_free >= self._many or self._idle >= self._most_idle
        return self.is_open

    def close(self) -> None:
        """Close the gate, and count the idle slots from 0 again."""
        self.is_open, self._idle = False, 0


class PassBudget:
    """Limits of sequences and tokens in a pass. max_tokens: maximum tokens in the concurrent passes of all groups; a
    group's share is never below FEWEST_TOKENS (or max_tokens, if that is less). max_sequences: maximum sequences in a
    pass. groups: number of concurrent micro-batches."""

    def __init__(self, max_tokens: int, max_sequences: int, groups: int) -> None:
        self._fewest = min(max_tokens, FEWEST_TOKENS)
        self._most, self._groups = max(max_tokens // groups, self._fewest), groups
        self.max_sequences = max_sequences

    def decodes(self, num_running: int) -> int:
        """Return the maximum decodes in a pass: a group's share of the running sequences."""
        return min(self.max_sequences, -(-num_running // self._groups))

    def wanted(self, num_decodes: int, left: int) -> int:
        """Return how many prompt tokens to admit, so that the next pass of every group is full. num_decodes: decodes in
        this pass. left: prompt tokens of running sequences that are in no pass yet."""
        return self._groups * max(1, self._most - num_decodes) - left

    def prompt_tokens(self, num_decodes: int, left: int) -> int:
        """Return how many prompt tokens a pass computes besides its decodes: at least one. left: prompt tokens of
        running sequences that are in no pass yet."""
        share = max(self._fewest, -(-left // self._groups))
        return max(1, min(share, self._most - num_decodes))
