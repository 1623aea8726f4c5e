"""Schedule passes: choose the sequences of the next pass and their tokens, and admit waiting sequences.

Invariants:
- Decodes go before prompts: a pass has one token of each running decode that is not in flight, up to a group's share of
  the running sequences.
- A sequence that would compute a pending prefix waits until it is published.
- A sequence is admitted only if the KV pages of its prompt and of its first new tokens (page_tables.py) can be
  allocated, and if the snapshots that it keeps fit (admission.py). If nothing runs, the snapshots need not fit.
- Preempted sequences, and answers that start from the state at their prompt's end, go before waiting sequences
  (places.py). A prompt with more answers than slots is admitted only when no other such prompt waits for slots.

The positions of snapshots are decided in policy.py.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType

from apcbatch.engine.admission import Admission, PassBudget, PrefillAdmission
from apcbatch.engine.drafting import Drafting
from apcbatch.engine.page_tables import PageTables
from apcbatch.engine.pending import PendingSnapshots
from apcbatch.engine.pending_handover import PendingHandover
from apcbatch.engine.places import Places
from apcbatch.engine.sequence import Chunk, Keep, Sequence
from apcbatch.engine.snapshots import Snapshots

NONE_IN_FLIGHT: Mapping[Sequence, int] = MappingProxyType({})


class Scheduler:
    """Waiting sequences, in order of submission. places: sequences that have begun. handover: pending snapshots of
    failed requests. on_begin: called with each sequence about to be admitted for the first time."""

    def __init__(
        self,
        snapshots: Snapshots,
        page_tables: PageTables,
        *,
        max_batch_tokens: int,
        max_running: int,
        capacity_bytes: int,
        drafting: Drafting,
        prompt_cost: int,
        groups: int,
    ) -> None:
        """max_running: sequences in a pass. prompt_cost: extra time of a pass with prompts over a decode pass, in
        decode passes. groups: number of concurrent micro-batches (one per GPU stage)."""
        self.waiting: deque[Sequence] = deque()
        self.places = Places(snapshots, page_tables, groups * max_running)
        self._snapshots, self._drafting = snapshots, drafting
        self._budget = PassBudget(max_batch_tokens, max_running, groups)
        self._pending = PendingSnapshots()
        self.handover = PendingHandover(self._pending, snapshots, self._sequence_of)
        self._admission = Admission(capacity_bytes)
        self._prefill_admission = PrefillAdmission(groups * max_running, prompt_cost)
        self._num_submitted = 0
        self.on_begin: Callable[[Sequence], None] = lambda sequence: None

    def schedule(self, begun: Mapping[Sequence, int] = NONE_IN_FLIGHT) -> tuple[list[Chunk], list[Sequence]]:
        """Return the chunks of the next pass, and the sequences that can never run for lack of memory. begun: sequences
        in flight -> position that each will have reached."""
        if self.waiting:
            self._snapshots.prefetch(self.waiting)
        places = self.places
        places.begin_answers()
        decodes = [sequence for sequence in places.running if not sequence.in_prefill and sequence not in begun]
        others, chunks = len(places.running) - len(decodes), list[Chunk]()
        for sequence in decodes[: self._budget.decodes(len(places.running))]:
            if sequence.is_running and places.has_next_page(sequence, begun):
                chunks.append(self._chunk(sequence, 1))
        num_decodes = len(chunks)
        impossible: list[Sequence] = []
        left = self._prompts_left(begun) if others else 0
        if self._is_queued and places.num_free:
            wanted = self._budget.wanted(num_decodes, left)
            if wanted > 0 and (left or self._opens(num_decodes)):
                num_before = len(places.running)
                impossible = self._admit_waiting(wanted)
                left += sum(sequence.remaining for sequence in places.running[num_before:])
                if len(places.running) == num_before or not places.num_free:
                    self._prefill_admission.close()
        if left:
            self._add_prompts(chunks, self._budget.prompt_tokens(num_decodes, left), begun)
        for chunk in chunks:  # awaited snapshots have their slots; the rest use the slots left over
            positions = chunk.sequence.retention.kept_if_room(chunk.first_new, chunk.end)
            if positions:
                self._reserve(chunk, positions)
        return chunks, impossible

    def add_drafts(self, chunks: list[Chunk]) -> None:
        """Add drafts to the decodes of a scheduled pass, as far as pages are free for them."""
        self._drafting.add_drafts([chunk for chunk in chunks if not chunk.in_prefill], self.places.has_draft_pages)

    def has_prompts(self, begun: Mapping[Sequence, int]) -> bool:
        """Return whether there are prompt tokens for a pass besides those in flight. begun: as in `schedule`."""
        return self._prompts_left(begun) > 0 or (self._is_queued and self.places.num_free > 0 and self._may_prefill)

    def foresee(self, chunks: list[Chunk], begun: Collection[Sequence] = ()) -> list[Chunk]:
        """Return the chunks of the pass that follows `chunks`, before the tokens of `chunks` are read: one more token
        of each sequence below its limit. A sequence that proves to have ended is removed later (Pass.remove).

        Return no chunks if the tokens must be read first: a prompt is unfinished, a sampler needs logits, a waiting
        sequence might be admitted, a snapshot would be kept, a running sequence that is neither in `chunks` nor in
        `begun` might join, a sequence would have to be preempted, or drafts are likely to be accepted. begun: other
        sequences in flight."""
        places, going = self.places, [chunk for chunk in chunks if chunk.end + 1 < chunk.sequence.limit]
        if (
            len(chunks) + len(begun) < len(places.running)
            or any(chunk.in_prefill or chunk.sequence.needs_logits or chunk.draft for chunk in chunks)
            or (places.num_owed and (places.num_free or len(going) < len(chunks)))
            or any(chunk.sequence.retention.kept(chunk.end, chunk.end + 1) for chunk in going)
            or self._drafting.is_promising([chunk.sequence for chunk in going])
        ):
            return []
        num_free = places.num_free + len(chunks) - len(going)
        if self._is_queued and num_free and (not going or self._prefill_admission.opens(num_free)):
            return []
        return [self._chunk(chunk.sequence, 1, chunk.end) for chunk in going] if places.has_next_pages(going) else []

    def _admit_waiting(self, wanted: int) -> list[Sequence]:
        """Admit preempted sequences, and once there are none waiting ones, while slots are free, until `wanted` prompt
        tokens are admitted. Return those that can never run."""
        impossible, places = list[Sequence](), self.places
        while places.preempted and places.num_free and wanted > 0 and (resumed := places.resume()):
            wanted -= resumed.remaining
        if places.preempted or not self.waiting:
            return impossible
        passed_over: deque[Sequence] = deque()
        awaited: set[bytes | None] = set()  # keys awaited by sequences that were passed over
        promised: set[bytes] = set()  # keys that they will publish after the awaited ones
        in_prefill = [one for one in places.running if max(one.computed, one.computed_before) < one.num_prompt]
        self._admission.begin(min([*in_prefill, self.waiting[0]], key=lambda sequence: sequence.number))
        while self.waiting and places.num_free and wanted > 0:
            sequence = self.waiting.popleft()
            overtakes = self._overtakes(sequence, awaited)
            if overtakes or self._follows(sequence, promised) or not self._may_begin(sequence):
                if not places.running:
                    self._drop_waiting(sequence)
                    impossible.append(sequence)
                    continue
                self._admission.pass_over(sequence)
                passed_over.append(sequence)
                awaited.add(sequence.retention.awaited)
                promised.update(_promised(sequence))
                if overtakes or (sequence.request.plan is None and not places.has_slots(sequence)):
                    break  # later sequences could not wait for it, and would compute their shared prefix first
            else:
                self._admit(sequence)
                wanted -= sequence.remaining
        passed_over.extend(self.waiting)
        self.waiting = passed_over
        return impossible

    def _add_prompts(self, chunks: list[Chunk], budget: int, begun: Mapping[Sequence, int]) -> None:
        """Add up to `budget` prompt tokens of running sequences, in their order."""
        for sequence in self.places.running:
            if budget == 0 or len(chunks) == self._budget.max_sequences:
                break
            left = _prompt_left(sequence, begun)
            if left:
                chunks.append(self._chunk(sequence, min(budget, left), begun.get(sequence)))
                budget -= chunks[-1].count

    def advance(self, chunks: list[Chunk]) -> None:
        """Publish the snapshots of the chunks of a pass that was read, and advance their sequences past them. Each
        state is now in its sequence's own slot."""
        for chunk in chunks:
            if chunk.keep:
                self._snapshots.publish(chunk)
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence.start is not None:
                self.places.detach(sequence)
            if chunk.in_prefill:
                self._pending.remove(sequence.number, chunk.end)
                if chunk.end == sequence.num_prompt and sequence.will_fork:
                    self.places.fork(sequence)
            sequence.computed = chunk.end

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence that has begun, and free its slot and pages."""
        self.handover.record(sequence)
        if not sequence.is_running:
            self._drop_read(sequence)
        self.places.leave(sequence)

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self._enter(sequence)
        self.waiting.append(sequence)

    def hand_over(self, sequence: Sequence) -> None:
        """Number a sequence that cannot run, and hand over its pending snapshots to their readers."""
        self._enter(sequence)
        self._drop_waiting(sequence)

    def _enter(self, sequence: Sequence) -> None:
        """Number a sequence, and record the snapshots that it will publish."""
        sequence.number = self._num_submitted
        self._num_submitted += 1
        sequence.retention.follow(sequence.keys, self.handover.leader_of)
        self._add_pending(sequence, sequence.retention.pending_at_submission())

    def drop_waiting(self) -> None:
        """Drop the waiting sequences, and hand their pending snapshots over to requests submitted later."""
        for sequence in self.waiting:
            self._drop_waiting(sequence)
        self.waiting.clear()

    def _drop_waiting(self, sequence: Sequence) -> None:
        """Drop a waiting sequence: hand its pending snapshots over, and drop it as a reader."""
        self.handover.take_over(sequence)
        self.handover.record(sequence)
        self._drop_read(sequence)

    def _drop_read(self, sequence: Sequence) -> None:
        """Drop a sequence that will not run as a reader."""
        if sequence.source:
            self.handover.add_readers(sequence.source, -1, sequence.retention.leader)

    def _sequence_of(self, number: int) -> Sequence:
        found = (*self.places.running, *self.places.preempted, *self.waiting)
        return next(sequence for sequence in found if sequence.number == number)

    def _may_begin(self, sequence: Sequence) -> bool:
        """Return whether a sequence fits and waits for no snapshot. If nothing runs, memory for its own KV suffices."""
        if self.places.running and (self._waits(sequence) or not self._admission.fits(sequence)):
            return False
        return self.places.has_slots(sequence) and self.places.has_pages(sequence)

    def _overtakes(self, sequence: Sequence, awaited: set[bytes | None]) -> bool:
        """Return whether a sequence, if admitted now, would publish a key ahead of the earlier sequence that is to
        publish it. awaited: keys that passed-over sequences wait for. Only an unplanned scored sequence can do so: any
        other one waits itself."""
        request = sequence.request
        return (
            request.score_from is not None and request.plan is None and not awaited.isdisjoint(sequence.keys.values())
        )

    def _follows(self, sequence: Sequence, promised: set[bytes]) -> bool:
        """Return whether a sequence may resume from a snapshot that a passed-over sequence will publish."""
        return bool(promised) and sequence.request.plan is None and not promised.isdisjoint(sequence.keys.values())

    def _waits(self, sequence: Sequence) -> bool:
        """Return whether another sequence will publish a longer prefix than this one can resume from now."""
        return self.handover.must_wait(sequence) or sequence.retention.waits(
            sequence.keys, self._pending, lambda: self._snapshots.available_position(sequence)
        )

    def _admit(self, sequence: Sequence) -> None:
        self.on_begin(sequence)
        sequence.admitted_s = sequence.admitted_s or time.perf_counter()
        self.handover.take_over(sequence)
        self._admission.admit(sequence)
        self._snapshots.attach(sequence)
        self.places.take(sequence)
        pending = sequence.retention.pending_at_begin(sequence.computed)
        self._add_pending(sequence, [p for p in pending if not self._snapshots.holds(sequence.keys[p])])

    @property
    def _is_queued(self) -> bool:
        """Whether a sequence waits to be admitted."""
        return bool(self.waiting or self.places.preempted)

    def _prompts_left(self, begun: Mapping[Sequence, int]) -> int:
        """Prompt tokens of running sequences that are in no pass yet."""
        return sum(_prompt_left(sequence, begun) for sequence in self.places.running if sequence.in_prefill)

    def _opens(self, num_decodes: int) -> bool:
        """Return whether a pass with `num_decodes` decodes, and no prompts yet, may admit waiting sequences."""
        return self._prefill_admission.opens(self.places.num_free) if num_decodes else self._may_prefill

    @property
    def _may_prefill(self) -> bool:
        """Whether a pass without decodes may admit waiting sequences: prefill admission is open, or no decode would be
        delayed by the pass."""
        return self._prefill_admission.is_open or all(sequence.in_prefill for sequence in self.places.running)

    def _add_pending(self, sequence: Sequence, positions: Iterable[int]) -> None:
        """Mark snapshots that a sequence will publish as pending, so that others wait. positions: of its prompt."""
        self._pending.add(sequence.number, [(position, sequence.keys[position]) for position in positions])

    def _chunk(self, sequence: Sequence, count: int, begin: int | None = None) -> Chunk:
        """Return the next `count` tokens of a sequence, whose pages it has, as a chunk. Reserve the slots of its
        snapshots in `kept_at_once`. begin: position after the pass in flight; None: the sequence's position."""
        chunk = Chunk(sequence, sequence.computed if begin is None else begin, count)
        positions = sequence.retention.kept_at_once(chunk.first_new, chunk.end)
        if positions:
            self._reserve(chunk, positions)
        return chunk

    def _reserve(self, chunk: Chunk, positions: Iterable[int]) -> None:
        """Reserve slots for the snapshots at these positions, at least one, of a chunk."""
        for position in positions:
            slot_key = self._snapshots.reserve(chunk.sequence, position)
            if slot_key is not None:
                chunk.keep.append(Keep(position, slot_key[1], slot_key[0]))
        chunk.keep.sort(key=lambda keep: keep.position)


def _promised(sequence: Sequence) -> list[bytes]:
    """Return the keys that a waiting sequence will publish after the key that it waits for. Return none for a planned
    sequence, and for one that is not scored: it waits only for the longest prefix that is pending, so others that share
    more of its prompt wait for the same key."""
    if sequence.request.score_from is None or sequence.request.plan is not None or not sequence.retention.awaited:
        return []
    keys = sequence.keys
    resume_at = next(position for position, key in keys.items() if key == sequence.retention.awaited)
    return [keys[position] for position in sequence.retention.pending_at_begin(resume_at)]


def _prompt_left(sequence: Sequence, begun: Mapping[Sequence, int]) -> int:
    """Prompt tokens of a sequence that are in no pass yet."""
    if not sequence.in_prefill:
        return 0
    return sequence.num_tokens - begun.get(sequence, sequence.computed)
