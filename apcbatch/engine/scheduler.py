"""Schedule passes: choose the sequences of the next pass and their tokens, and admit waiting sequences.

Invariants:
- Decodes go before prompts: a pass has one token of each running decode that is not in flight, up to a group's share of
  the running sequences.
- A sequence that would compute a pending prefix waits until it is published.
- A sequence is admitted only if the KV pages of its prompt and of its first new tokens (page_tables.py) can be
  allocated, and if the snapshots that it keeps fit (admission.py). If nothing runs, the snapshots need not fit.
- A decode that finds no page for its next token, even by evicting snapshots, preempts the sequence that was admitted
  last: it gives its pages and its slot up, and is admitted again, before any other one, to compute its known tokens
  again. A sequence in flight is waited for instead. The oldest running sequence is never preempted, and one that runs
  alone takes all pages that it needs, so that each sequence comes to its end.
- Answers that start from the state at their prompt's end (Forks) go before waiting sequences. A prompt with more
  answers than slots is admitted only when no other such prompt waits for slots.
- With the minimum of two slots, at most one holds a fork state, so decoding can always proceed.

The positions of snapshots are decided in policy.py.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType

from apcbatch.engine.admission import Admission, PassBudget, PrefillAdmission
from apcbatch.engine.drafting import Drafting
from apcbatch.engine.memory import num_live_slots
from apcbatch.engine.page_tables import PageTables
from apcbatch.engine.pending import PendingSnapshots
from apcbatch.engine.pending_handover import PendingHandover
from apcbatch.engine.pool import NO_PAGES, Snapshot
from apcbatch.engine.sequence import Chunk, Forks, Keep, Sequence
from apcbatch.engine.snapshots import Snapshots

NONE_IN_FLIGHT: Mapping[Sequence, int] = MappingProxyType({})


class Scheduler:
    """Waiting sequences, and preempted ones, in order of submission; running ones, in order of admission. forks:
    requests with several answers, from the end of the prompt until their last answer ends. handover: pending snapshots
    of failed requests. on_begin: called with each sequence about to be admitted for the first time. num_preempted:
    preemptions so far."""

    def __init__(
        self,
        snapshots: Snapshots,
        page_tables: PageTables,
        *,
        max_batch_tokens: int,
        max_running: int,
        capacity_bytes: int,
        drafting: Drafting,
        prompt_cost: int = 0,
        groups: int = 1,
    ) -> None:
        """max_running: sequences in a pass. prompt_cost: extra time of a pass with prompts over a decode pass, in
        decode passes. groups: number of concurrent micro-batches (one per GPU stage)."""
        self.waiting: deque[Sequence] = deque()
        self.preempted: list[Sequence] = []
        self.running: list[Sequence] = []
        self.forks: list[Forks] = []
        self._snapshots, self._page_tables, self._drafting = snapshots, page_tables, drafting
        self._budget = PassBudget(max_batch_tokens, max_running, groups)
        self._max_running = groups * max_running
        self._free_slots = list(range(num_live_slots(self._max_running) - 1, -1, -1))
        self._pending = PendingSnapshots()
        self.handover = PendingHandover(self._pending, snapshots, self._sequence_of)
        self._admission = Admission(capacity_bytes)
        self._prefill_admission = PrefillAdmission(self._max_running, prompt_cost)
        self._num_submitted = 0
        self.on_begin: Callable[[Sequence], None] = lambda sequence: None
        self.num_preempted = 0

    @property
    def num_begun(self) -> int:
        """Number of admitted requests that have not ended."""
        return len(self.forks) + sum(sequence.forks is None for sequence in (*self.running, *self.preempted))

    def schedule(self, begun: Mapping[Sequence, int] = NONE_IN_FLIGHT) -> tuple[list[Chunk], list[Sequence]]:
        """Return the chunks of the next pass, and the sequences that can never run for lack of memory. begun: sequences
        in flight -> position that each will have reached."""
        if self.waiting:
            self._snapshots.prefetch(self.waiting)
        for forks in () if self.preempted else self.forks:
            while forks.waiting and self._begin_answer(forks):
                pass
        decodes = [sequence for sequence in self.running if not sequence.in_prefill and sequence not in begun]
        others, chunks = len(self.running) - len(decodes), list[Chunk]()
        for sequence in decodes[: self._budget.decodes(len(self.running))]:
            if sequence.is_running and self._has_page(sequence, begun):
                chunks.append(self._chunk(sequence, 1))
        num_decodes = len(chunks)
        impossible: list[Sequence] = []
        left = self._prompts_left(begun) if others else 0
        if self._is_queued and self._num_free:
            wanted = self._budget.wanted(num_decodes, left)
            if wanted > 0 and (left or self._opens(num_decodes)):
                num_before = len(self.running)
                impossible = self._admit_waiting(wanted)
                left += sum(sequence.remaining for sequence in self.running[num_before:])
                if len(self.running) == num_before or not self._num_free:
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
        self._drafting.add_drafts([chunk for chunk in chunks if not chunk.sequence.in_prefill], self._has_pages)

    def has_prompts(self, begun: Mapping[Sequence, int]) -> bool:
        """Return whether there are prompt tokens for a pass besides those in flight. begun: as in `schedule`."""
        return self._prompts_left(begun) > 0 or (self._is_queued and self._num_free > 0 and self._may_prefill)

    def foresee(self, chunks: list[Chunk], begun: Collection[Sequence] = ()) -> list[Chunk]:
        """Return the chunks of the pass that follows `chunks`, before the tokens of `chunks` are read: one more token
        of each sequence below its limit. A sequence that proves to have ended is removed later (Pass.remove).

        Return no chunks if the tokens must be read first: a prompt is unfinished, a sampler needs logits, a waiting
        sequence might be admitted, a snapshot would be kept, a running sequence that is neither in `chunks` nor in
        `begun` might join, a sequence would have to be preempted, or drafts are likely to be accepted. begun: other
        sequences in flight."""
        going = [chunk for chunk in chunks if chunk.end + 1 < chunk.sequence.limit]
        if (
            len(chunks) + len(begun) < len(self.running)
            or any(chunk.sequence.in_prefill or chunk.sequence.needs_logits or chunk.draft for chunk in chunks)
            or (self._num_owed and (self._num_free or len(going) < len(chunks)))
            or any(chunk.sequence.retention.kept(chunk.end, chunk.end + 1) for chunk in going)
            or self._drafting.is_promising([chunk.sequence for chunk in going])
        ):
            return []
        num_free = self._num_free + len(chunks) - len(going)
        if self._is_queued and num_free and (not going or self._prefill_admission.opens(num_free)):
            return []
        missing = sum([self._page_tables.missing(chunk.sequence, chunk.end + 1) for chunk in going])
        if missing and not self._find_pages(missing, alone=len(self.running) == 1):
            return []
        for chunk in going if missing else ():
            self._page_tables.extend(chunk.sequence, chunk.end + 1)
        return [self._chunk(chunk.sequence, 1, chunk.end) for chunk in going]

    def _admit_waiting(self, wanted: int) -> list[Sequence]:
        """Admit preempted sequences, and once there are none waiting ones, while slots are free, until `wanted` prompt
        tokens are admitted. Return those that can never run."""
        impossible: list[Sequence] = []
        while self.preempted and self._num_free and wanted > 0 and self._admit_again(self.preempted[0]):
            wanted -= self.preempted.pop(0).remaining
        if self.preempted or not self.waiting:
            return impossible
        passed_over: deque[Sequence] = deque()
        awaited: set[bytes | None] = set()  # keys awaited by sequences that were passed over
        promised: set[bytes] = set()  # keys that those of them which are scored will publish beyond the awaited ones
        in_prefill = [one for one in self.running if max(one.computed, one.computed_before) < one.num_prompt]
        self._admission.begin(min([*in_prefill, self.waiting[0]], key=lambda sequence: sequence.number))
        while self.waiting and self._num_free and wanted > 0:
            sequence = self.waiting.popleft()
            overtakes = self._overtakes(sequence, awaited)
            if overtakes or self._follows(sequence, promised) or not self._may_begin(sequence):
                if not self.running:
                    self._drop_waiting(sequence)
                    impossible.append(sequence)
                    continue
                self._admission.pass_over(sequence)
                passed_over.append(sequence)
                awaited.add(sequence.retention.awaited)
                promised.update(_promised(sequence))
                if overtakes or (sequence.request.plan is None and not self._has_slots(sequence)):
                    break  # later sequences could not wait for it, and would compute their shared prefix first
            else:
                self._admit(sequence)
                wanted -= sequence.remaining
        passed_over.extend(self.waiting)
        self.waiting = passed_over
        return impossible

    def _add_prompts(self, chunks: list[Chunk], budget: int, begun: Mapping[Sequence, int]) -> None:
        """Add up to `budget` prompt tokens of running sequences, in their order."""
        for sequence in self.running:
            if budget == 0 or len(chunks) == self._budget.max_sequences:
                break
            left = _prompt_left(sequence, begun)
            if left:
                chunks.append(self._chunk(sequence, min(budget, left), begun.get(sequence)))
                budget -= chunks[-1].count

    def advance(self, chunk: Chunk) -> None:
        """Advance a sequence past a computed chunk whose snapshots are published; its state is now in its own slot."""
        sequence = chunk.sequence
        if sequence.start is not None:
            self._detach(sequence)
        if sequence.in_prefill:
            self._pending.remove(sequence.number, chunk.end)
            if chunk.end == sequence.num_prompt and sequence.will_fork:
                self._fork(sequence)
        sequence.computed = chunk.end

    def finish(self, sequence: Sequence) -> None:
        """Remove a running or preempted sequence, and free its slot and pages."""
        self.handover.record(sequence)
        self._drafting.learn(sequence)
        if sequence.is_running:
            self._detach(sequence)
            self._stop(sequence)
        else:
            self.preempted.remove(sequence)
            self._drop_read(sequence)
        forks = sequence.forks
        if forks is not None and not sequence.will_fork:
            forks.num_begun -= 1
            self._release_held(forks)

    def drop_answers(self, forks: Forks) -> None:
        """Drop the answers of a request that have not begun, after those that have were finished."""
        forks.waiting.clear()
        self._release_held(forks)

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
        found = (*self.running, *self.preempted, *self.waiting)
        return next(sequence for sequence in found if sequence.number == number)

    def _may_begin(self, sequence: Sequence) -> bool:
        """Return whether a sequence fits and waits for no snapshot. If nothing runs, memory for its own KV suffices,
        and any snapshot may be evicted for it. One whose KV would not fit in the end never begins."""
        if self.running and (self._waits(sequence) or not self._admission.fits(sequence)):
            return False
        if not self._has_slots(sequence):
            return False
        needed = self._page_tables.needed_to_start(sequence)
        return self._page_tables.fits(sequence) and self._find_pages(needed, alone=not self.running)

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

    def _has_slots(self, sequence: Sequence) -> bool:
        """Return whether enough slots are free for a sequence besides those owed to answers of admitted prompts."""
        owed = self._num_owed
        return not owed or self._num_free - owed >= sequence.num_answers

    def _waits(self, sequence: Sequence) -> bool:
        """Return whether another sequence will publish a longer prefix than this one can resume from now."""
        return self.handover.must_wait(sequence) or sequence.retention.waits(
            sequence.keys, self._pending, lambda: self._snapshots.available_position(sequence)
        )

    def _admit(self, sequence: Sequence) -> None:
        self.on_begin(sequence)
        sequence.admitted_s = sequence.admitted_s or time.perf_counter()
        sequence.slot = self._free_slots.pop()
        self.handover.take_over(sequence)
        self._admission.admit(sequence)
        self._snapshots.attach(sequence)
        self._page_tables.reserve(sequence)
        pending = sequence.retention.pending_at_begin(sequence.computed)
        self._add_pending(sequence, [p for p in pending if not self._snapshots.holds(sequence.keys[p])])
        self.running.append(sequence)

    def _admit_again(self, sequence: Sequence) -> bool:
        """Admit a preempted sequence. It starts from the state at its prompt's end, if that is held for other answers,
        or else from a snapshot; it waits for none. Return False if its pages are not free."""
        if not self._find_pages(self._page_tables.needed_to_start(sequence), alone=not self.running):
            return False
        held = None if sequence.forks is None else sequence.forks.held
        sequence.slot = self._free_slots.pop()
        if held is not None:
            self._start_from(sequence, held)
        else:
            self._snapshots.restore(sequence)
        self._page_tables.reserve(sequence)
        self.running.append(sequence)
        return True

    def _has_page(self, sequence: Sequence, begun: Mapping[Sequence, int]) -> bool:
        """Allocate the page of a decode's next token, if it is a new one. If none is free, preempt the sequences that
        were admitted last. Return False if this sequence is among them, or has to wait until such a one was read."""
        end = sequence.computed + 1
        missing = self._page_tables.missing(sequence, end)
        if not missing:
            return True
        while not self._find_pages(missing, alone=len(self.running) == 1):
            last = self.running[-1]
            if last in begun:
                return False
            assert len(self.running) > 1, "one that runs alone fits"
            self._preempt(last)
            if last is sequence:
                return False
        self._page_tables.extend(sequence, end)
        return True

    def _has_pages(self, chunk: Chunk, num_drafted: int) -> bool:
        """Allocate the pages of a chunk's drafted tokens. Return False if they are not free: drafts preempt nothing."""
        end = chunk.begin + chunk.count + num_drafted
        missing = self._page_tables.missing(chunk.sequence, end)
        if missing and not self._page_tables.free_for_running(missing, alone=False):
            return False
        self._page_tables.extend(chunk.sequence, end)
        return True

    def _find_pages(self, needed: int, alone: bool) -> bool:
        """Free `needed` pages for running sequences, as PageTables.free_for_running does. If nothing else runs, preempt
        also the answers that have not begun, the last ones first, so that the states of their prompts need not be
        held."""
        while not self._page_tables.free_for_running(needed, alone):
            held = [forks for forks in self.forks if forks.held is not None and not forks.held.pins]
            if not alone or not held:
                return False
            for sequence in held[-1].waiting:
                self._queue_again(sequence)
            held[-1].num_begun += len(held[-1].waiting)
            self.drop_answers(held[-1])
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Free the slot and pages of a running sequence that is not in flight, and queue it to be computed again. It
        stays the publisher of its pending snapshots, and a reader of its source if it has computed nothing yet."""
        if sequence.start is not None:
            sequence.start.pins -= 1
            sequence.start = None
        self._stop(sequence)
        self._queue_again(sequence)
        if sequence.forks is not None:
            self._release_held(sequence.forks)

    def _queue_again(self, sequence: Sequence) -> None:
        """Queue a sequence without a state to be computed again, up to its last known token."""
        self.num_preempted += 1
        sequence.prefill_end = sequence.num_tokens
        sequence.computed_before = max(sequence.computed, sequence.computed_before)
        sequence.computed = 0
        insort(self.preempted, sequence, key=lambda one: one.number)

    @property
    def _is_queued(self) -> bool:
        """Whether a sequence waits to be admitted."""
        return bool(self.waiting or self.preempted)

    def _prompts_left(self, begun: Mapping[Sequence, int]) -> int:
        """Prompt tokens of running sequences that are in no pass yet."""
        return sum(_prompt_left(sequence, begun) for sequence in self.running if sequence.in_prefill)

    def _opens(self, num_decodes: int) -> bool:
        """Return whether a pass with `num_decodes` decodes, and no prompts yet, may admit waiting sequences."""
        return self._prefill_admission.opens(self._num_free) if num_decodes else self._may_prefill

    @property
    def _may_prefill(self) -> bool:
        """Whether a pass without decodes may admit waiting sequences: prefill admission is open, or no decode would be
        delayed by the pass."""
        return self._prefill_admission.is_open or all(sequence.in_prefill for sequence in self.running)

    @property
    def _num_free(self) -> int:
        """Number of sequences that may be admitted."""
        return min(len(self._free_slots), self._max_running - len(self.running))

    @property
    def _num_owed(self) -> int:
        """Number of slots that the answers of admitted prompts will still take."""
        coming = sum(sequence.num_answers - 1 for sequence in self.running if sequence.will_fork)
        return coming + sum(len(forks.waiting) - 1 for forks in self.forks if forks.waiting)

    def _stop(self, sequence: Sequence) -> None:
        """Remove a running sequence, and free its slot and pages."""
        self.running.remove(sequence)
        self._free_slots.append(sequence.slot)
        sequence.slot = -1
        self._page_tables.release(sequence)

    def _detach(self, sequence: Sequence) -> None:
        """Unpin the state that a sequence started from."""
        self._snapshots.detach(sequence)
        if sequence.forks is not None:
            self._release_held(sequence.forks)

    def _fork(self, prompt: Sequence) -> None:
        """Keep the state at the end of a prompt for its answers, and queue the answers. An answer that ended with its
        first token is not queued."""
        forks = prompt.forks
        assert forks is not None
        self.running.remove(prompt)
        forks.held = Snapshot(b"", prompt.num_prompt, prompt.slot, prompt.pages)
        self._page_tables.trim(forks.held)
        prompt.pages, prompt.slot = NO_PAGES, -1
        for sequence in forks.sequences:
            sequence.computed, sequence.keys = prompt.num_prompt, prompt.keys
        forks.waiting.extend(sequence for sequence in forks.sequences if not sequence.finish_reason)
        self.forks.append(forks)
        self._release_held(forks)

    def _begin_answer(self, forks: Forks) -> bool:
        """Start the next answer of a request: allocate its slot and pages. Return False if they are not free. The last
        answer takes the slot of the prompt's state, unless other answers still read that state."""
        held, sequence = forks.held, forks.waiting[0]
        assert held is not None
        takes_over = len(forks.waiting) == 1 and not held.pins
        if len(self.running) >= self._max_running or not (takes_over or self._free_slots):
            return False
        needed = self._page_tables.needed_by_fork(sequence)
        if not self._find_pages(needed, alone=not self.running) or forks.held is not held:
            return False
        if takes_over:
            sequence.slot, sequence.pages, forks.held = held.slot, held.pages, None
        else:
            sequence.slot = self._free_slots.pop()
            self._start_from(sequence, held)
        self._page_tables.reserve(sequence)
        forks.waiting.popleft()
        forks.num_begun += 1
        self.running.append(sequence)
        return True

    def _start_from(self, sequence: Sequence, held: Snapshot) -> None:
        """Start an answer from the state at its prompt's end."""
        sequence.computed, sequence.start = held.position, held
        held.pins += 1
        self._page_tables.adopt(sequence, held)

    def _release_held(self, forks: Forks) -> None:
        """Free the prompt's state once no answer needs it."""
        held = forks.held
        if held is not None and not forks.waiting and not held.pins:
            forks.held = None
            self._free_slots.append(held.slot)
            self._page_tables.release(held)
        if not forks.waiting and not forks.num_begun and forks in self.forks:
            self.forks.remove(forks)

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
    """Return the keys that a waiting sequence will publish beyond the one that it waits for, if it is scored and
    unplanned. A sequence that is not scored waits only where nothing longer can be resumed from, so others that share
    more of its prompt wait with it."""
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
