"""Places of begun sequences: their slots and KV pages, from admission to their end.

Invariants:
- A decode that finds no page for its next token, even by evicting snapshots, preempts the sequence that was admitted
  last: it gives its pages and its slot up, and is admitted again, before any other one, to compute its known tokens
  again. A sequence in flight is waited for instead. The oldest running sequence is never preempted, and one that runs
  alone takes all pages that it needs, so that each sequence comes to its end.
- Answers that start from the state at their prompt's end (Forks) go before waiting sequences.
- With the minimum of two slots, at most one holds a fork state, so decoding can always proceed.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection

from apcbatch.engine.memory import num_live_slots
from apcbatch.engine.page_tables import PageTables
from apcbatch.engine.pool import NO_PAGES, Snapshot
from apcbatch.engine.sequence import Chunk, Forks, Sequence
from apcbatch.engine.snapshots import Snapshots


class Places:
    """Sequences with a slot, and those that wait for one again. running: in order of admission, at most max_running.
    preempted: in order of submission. forks: requests with several answers, from the end of the prompt until their last
    answer ends. free_slots: those of live states. num_preempted: preemptions so far."""

    def __init__(self, snapshots: Snapshots, page_tables: PageTables, max_running: int) -> None:
        self.running: list[Sequence] = []
        self.preempted: list[Sequence] = []
        self.forks: list[Forks] = []
        self.free_slots = list(range(num_live_slots(max_running) - 1, -1, -1))
        self.num_preempted = 0
        self._snapshots, self._page_tables, self._max_running = snapshots, page_tables, max_running

    @property
    def num_begun(self) -> int:
        """Number of admitted requests that have not ended."""
        return len(self.forks) + sum(sequence.forks is None for sequence in (*self.running, *self.preempted))

    @property
    def num_free(self) -> int:
        """Number of sequences that may be admitted."""
        return min(len(self.free_slots), self._max_running - len(self.running))

    @property
    def num_owed(self) -> int:
        """Number of slots that the answers of admitted prompts will still take."""
        coming = sum(sequence.num_answers - 1 for sequence in self.running if sequence.will_fork)
        return coming + sum(len(forks.waiting) - 1 for forks in self.forks if forks.waiting)

    def has_slots(self, sequence: Sequence) -> bool:
        """Return whether enough slots are free for a sequence besides those owed to answers of admitted prompts."""
        owed = self.num_owed
        return not owed or self.num_free - owed >= sequence.num_answers

    def has_pages(self, sequence: Sequence) -> bool:
        """Free the pages that a sequence is admitted with. Return False if they cannot be freed, or if the sequence can
        never fit. If nothing runs, any snapshot may be evicted for it."""
        needed = self._page_tables.needed_to_start(sequence)
        return self._page_tables.fits(sequence) and self._find_pages(needed, alone=not self.running)

    def take(self, sequence: Sequence) -> None:
        """Give a sequence a slot, and the pages that it is admitted with; both are free."""
        sequence.slot = self.free_slots.pop()
        self._page_tables.reserve(sequence)
        self.running.append(sequence)

    def resume(self) -> Sequence | None:
        """Admit the first preempted sequence. It starts from the state at its prompt's end, if that is held for other
        answers, or else from a snapshot; it waits for none. Return None if its pages are not free."""
        sequence = self.preempted[0]
        if not self.has_pages(sequence):
            return None
        self.preempted.remove(sequence)  # may no longer be first: _find_pages may have queued answers before it
        held = None if sequence.forks is None else sequence.forks.held
        if held is not None:
            self._start_from(sequence, held)
        else:
            self._snapshots.restore(sequence)
        self.take(sequence)
        return sequence

    def begin_answers(self) -> None:
        """Start the answers that wait for a slot, unless a preempted sequence does."""
        for forks in () if self.preempted else self.forks:
            while forks.waiting and self._begin_answer(forks):
                pass

    def has_next_page(self, sequence: Sequence, begun: Collection[Sequence]) -> bool:
        """Allocate the page of a decode's next token, if it is a new one. If none is free, preempt the sequences that
        were admitted last. Return False if this sequence is among them, or has to wait until such a one was read.
        begun: sequences in flight."""
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

    def has_next_pages(self, chunks: list[Chunk]) -> bool:
        """Allocate the pages of one more token after each chunk. Return False if a sequence would have to be preempted
        for that."""
        missing = sum([self._page_tables.missing(chunk.sequence, chunk.end + 1) for chunk in chunks])
        if missing and not self._find_pages(missing, alone=len(self.running) == 1):
            return False
        for chunk in chunks if missing else ():
            self._page_tables.extend(chunk.sequence, chunk.end + 1)
        return True

    def has_draft_pages(self, chunk: Chunk, num_drafted: int) -> bool:
        """Allocate the pages of a chunk's drafted tokens. Return False if they are not free: drafts preempt nothing."""
        end = chunk.begin + chunk.count + num_drafted
        missing = self._page_tables.missing(chunk.sequence, end)
        if missing and not self._page_tables.free_for_running(missing, alone=False):
            return False
        self._page_tables.extend(chunk.sequence, end)
        return True

    def detach(self, sequence: Sequence) -> None:
        """Unpin the state that a sequence started from."""
        self._snapshots.detach(sequence)
        if sequence.forks is not None:
            self._release_held(sequence.forks)

    def fork(self, prompt: Sequence) -> None:
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

    def leave(self, sequence: Sequence) -> None:
        """Remove a running or preempted sequence, and free its slot and pages."""
        if sequence.is_running:
            self.detach(sequence)
            self._stop(sequence)
        else:
            self.preempted.remove(sequence)
        forks = sequence.forks
        if forks is not None and not sequence.will_fork:
            forks.num_begun -= 1
            self._release_held(forks)

    def drop_answers(self, forks: Forks) -> None:
        """Drop the answers of a request that have not begun, after those that have were removed."""
        forks.waiting.clear()
        self._release_held(forks)

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

    def _stop(self, sequence: Sequence) -> None:
        """Remove a running sequence, and free its slot and pages."""
        self.running.remove(sequence)
        self.free_slots.append(sequence.slot)
        sequence.slot = -1
        self._page_tables.release(sequence)

    def _begin_answer(self, forks: Forks) -> bool:
        """Start the next answer of a request: allocate its slot and pages. Return False if they are not free. The last
        answer takes the slot of the prompt's state, unless other answers still read that state."""
        held, sequence = forks.held, forks.waiting[0]
        assert held is not None
        takes_over = len(forks.waiting) == 1 and not held.pins
        if len(self.running) >= self._max_running or not (takes_over or self.free_slots):
            return False
        needed = self._page_tables.needed_by_fork(sequence)
        if not self._find_pages(needed, alone=not self.running) or forks.held is not held:
            return False
        if takes_over:
            self.free_slots.append(held.slot)
            sequence.pages, forks.held = held.pages, None
        else:
            self._start_from(sequence, held)
        self.take(sequence)
        forks.waiting.popleft()
        forks.num_begun += 1
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
            self.free_slots.append(held.slot)
            self._page_tables.release(held)
        if not forks.waiting and not forks.num_begun and forks in self.forks:
            self.forks.remove(forks)
