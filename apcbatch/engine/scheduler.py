"""Which sequences run in the next pass, how many of their tokens, and which wait for whom.

Must not know: tensors, the store, text. Invariants: every running decode gets its token each step; a sequence that
would compute a prefix which another one is about to publish is held back until it is there; a sequence is admitted
only when the KV pages of its whole life are within reach, so that nothing running is ever starved, and when what it
keeps fits (see admission.py); where nothing runs, the next one is admitted in any case.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from apcbatch.engine.admission import Admission
from apcbatch.engine.runner import Chunk, Keep
from apcbatch.engine.sequence import Sequence
from apcbatch.engine.snapshots import Snapshots
from apcbatch.prefix import boundaries_in, last_boundary


class Scheduler:
    """Waiting and running sequences, in the order of submission."""

    def __init__(
        self, snapshots: Snapshots, *, max_batch_tokens: int, max_running: int, capacity_bytes: int
    ) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._snapshots = snapshots
        self._policy, self._block_size = snapshots.policy, snapshots.block_size
        self._max_batch_tokens = max_batch_tokens
        self._free_slots = list(range(max_running - 1, -1, -1))
        self._pending: dict[bytes, list[Sequence]] = {}  # boundaries that sequences will publish: by whom
        self._admission = Admission(capacity_bytes)
        self._num_submitted = 0
        self._owed_pages = 0  # pages that running sequences may still ask for

    def schedule(self) -> tuple[list[Chunk], list[Sequence]]:
        """(the chunks of the next pass, sequences that can never run for lack of memory)."""
        chunks = [self._chunk(sequence, 1) for sequence in self.running if not sequence.in_prefill]
        budget = max(1, self._max_batch_tokens - len(chunks))
        for sequence in self.running:
            if sequence.in_prefill and budget > 0:
                chunks.append(self._chunk(sequence, min(budget, sequence.remaining)))
                budget -= chunks[-1].count
        impossible = self._fill(chunks, budget) if self.waiting and self._free_slots and budget > 0 else []
        for chunk in chunks:  # in what room the awaited ones of all leave
            if chunk.sequence.request.plan is not None:
                self._reserve(chunk, awaited=False)
        return chunks, impossible

    def foresee(self, chunks: list[Chunk]) -> list[Chunk]:
        """The pass after that of `chunks`, whose tokens nobody has read yet: one more token of each sequence that is
        not at its limit then. None where the tokens decide more than who ends: where a prompt is not computed or draws
        its tokens, a waiting sequence might be admitted, or a snapshot would be kept."""
        going = [chunk for chunk in chunks if chunk.end + 1 < chunk.sequence.limit]
        if (
            len(chunks) < len(self.running)
            or any(chunk.sequence.in_prefill or chunk.sequence.request.temperature > 0 for chunk in chunks)
            or (self.waiting and (self._free_slots or len(going) < len(chunks)))
            or any(list(self._kept_positions(c.sequence, c.end, c.end + 1)) for c in going)
        ):
            return []
        return [self._chunk(chunk.sequence, 1, chunk.end) for chunk in going]

    def _fill(self, chunks: list[Chunk], budget: int) -> list[Sequence]:
        """Admit waiting sequences while there are slots and tokens left; those that can never run are handed back."""
        impossible: list[Sequence] = []
        passed_over: deque[Sequence] = deque()
        in_prefill = [sequence for sequence in self.running if sequence.in_prefill]
        self._admission.begin(min([*in_prefill, self.waiting[0]], key=lambda sequence: sequence.number))
        while self.waiting and self._free_slots and budget > 0:
            sequence = self.waiting.popleft()
            if self._may_begin(sequence):
                self._admit(sequence)
                chunks.append(self._chunk(sequence, min(budget, sequence.remaining)))
                budget -= chunks[-1].count
            elif self.running:
                self._admission.pass_over(sequence)
                passed_over.append(sequence)
            else:
                self._give_up(sequence)
                impossible.append(sequence)
        passed_over.extend(self.waiting)
        self.waiting = passed_over
        return impossible

    def advance(self, chunk: Chunk) -> None:
        """Note that a chunk was computed and its snapshots are published: the sequence goes on from its own slot."""
        sequence = chunk.sequence
        self._snapshots.detach(sequence)
        sequence.computed = chunk.end
        self._settle(sequence, sequence.computed)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out of the running ones and free what it holds."""
        self.running.remove(sequence)
        self._free_slots.append(sequence.slot)
        self._owed_pages -= self._snapshots.pages_of_life(sequence) - len(sequence.pages)
        self._snapshots.detach(sequence)
        self._snapshots.release_pages(sequence)
        self._settle(sequence)

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence. What the plan has it publish is expected from now on, not only once it runs."""
        sequence.number = self._num_submitted
        self._num_submitted += 1
        plan = sequence.request.plan
        if plan is not None:
            sequence.held_back = sequence.keys.get(plan.resume_at)
            sequence.leader = next(reversed(self._owners(sequence.held_back)), None)
            self._expect(sequence)
        self.waiting.append(sequence)

    def drop_waiting(self) -> None:
        """Drop what has not begun, and what it was to publish."""
        for sequence in self.waiting:
            self._give_up(sequence)
        self.waiting.clear()

    def _give_up(self, sequence: Sequence) -> None:
        """A sequence will not run: nothing comes from it, and nothing is kept for it any more."""
        self._settle(sequence)
        self._snapshots.count_read(sequence)

    def _may_begin(self, sequence: Sequence) -> bool:
        """Whether there is room, and nothing to wait for. Where nothing runs, room for its own KV is enough, at the
        expense of any snapshot."""
        if self.running and (self._held_back(sequence) or not self._admission.fits(sequence)):
            return False
        needed = self._snapshots.pages_to_start(sequence) + self._owed_pages
        return self._snapshots.free_pages(needed, awaited=not self.running)

    def _held_back(self, sequence: Sequence) -> bool:
        """Whether another sequence will publish a longer prefix of this one than is available now. With a plan it is
        the leader that counts: where memory is short, several publish the same prefix, each for some."""
        if sequence.request.plan is not None:
            return sequence.leader in self._owners(sequence.held_back)
        if self._owners(sequence.held_back):
            return True
        sequence.held_back = None
        if not self._pending:
            return False
        available = self._snapshots.available_position(sequence)
        for position in reversed(sequence.keys):
            if position <= available:
                break
            if position < sequence.num_prompt and sequence.keys[position] in self._pending:
                sequence.held_back = sequence.keys[position]
                return True
        return False

    def _owners(self, key: bytes | None) -> list[Sequence]:
        """Those that will publish a boundary, in the order of submission."""
        return self._pending.get(key, []) if key is not None else []

    def _admit(self, sequence: Sequence) -> None:
        sequence.slot = self._free_slots.pop()
        sequence.leader = None
        self._admission.admit(sequence)
        self._snapshots.attach(sequence)
        self._owed_pages += self._snapshots.pages_of_life(sequence) - len(sequence.pages)
        if sequence.request.plan is None:
            self._expect(sequence)
        self.running.append(sequence)

    def _expect(self, sequence: Sequence) -> None:
        """From now on others may wait for what this sequence's prefill publishes."""
        positions = self._kept_positions(sequence, sequence.computed, sequence.num_prompt)
        sequence.owed = [(position, sequence.keys[position]) for position in positions]
        for _, key in sequence.owed:
            self._pending.setdefault(key, []).append(sequence)

    def _settle(self, sequence: Sequence, end: int | None = None) -> None:
        """What a sequence owes up to `end` is published; without an end, nothing more will come from it."""
        while sequence.owed and (end is None or sequence.owed[0][0] <= end):
            _, key = sequence.owed.pop(0)
            self._pending[key].remove(sequence)
            if not self._pending[key]:
                del self._pending[key]

    def _chunk(self, sequence: Sequence, count: int, begin: int | None = None) -> Chunk:
        """The next `count` tokens, with pages to write to and slots for the snapshots that the policy keeps; with a
        plan, for those that this run waits for. begin: where the sequence will be when the pass before has ended."""
        chunk = Chunk(sequence, sequence.computed if begin is None else begin, count)
        self._owed_pages -= self._snapshots.extend_pages(sequence, chunk.end)
        self._reserve(chunk, awaited=sequence.request.plan is not None)
        return chunk

    def _reserve(self, chunk: Chunk, awaited: bool) -> None:
        """Slots for snapshots of a chunk: for those that the plan waits for, or for the others."""
        sequence = chunk.sequence
        for position in self._kept_positions(sequence, chunk.begin, chunk.end):
            if (sequence.planned.get(position, 0) > 0) == awaited:
                slot_key = self._snapshots.reserve(sequence, position)
                if slot_key is not None:
                    chunk.keep.append(Keep(position, slot_key[1], slot_key[0]))
        chunk.keep.sort(key=lambda keep: keep.position)

    def _kept_positions(self, sequence: Sequence, begin: int, end: int) -> Iterable[int]:
        """Positions p with begin < p <= end whose snapshots the policy keeps, ascending."""
        if self._policy == "none":
            return ()
        if not sequence.request.keep_answer:
            end = min(end, sequence.num_prompt)
        if sequence.request.plan is not None:
            return (position for position in sequence.planned if begin < position <= end)
        if self._policy == "all" or begin >= sequence.num_prompt:
            return boundaries_in(begin, end, self._block_size)
        ends = {last_boundary(sequence.num_prompt, self._block_size)}
        if self._policy == "planned" and sequence.branch:
            ends.add(sequence.branch)
        return (position for position in sorted(ends) if begin < position <= end)
