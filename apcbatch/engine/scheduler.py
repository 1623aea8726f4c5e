"""Which sequences run in the next pass, how many of their tokens, and which wait for whom.

Must not know: tensors, the store, text, which positions are kept (see policy.py). Invariants: every running decode
gets its token each step; a sequence that would compute a prefix which another one is about to publish is held back
until it is there; a sequence is admitted only when the KV pages of its whole life are within reach, so that nothing
running is ever starved, and when what it keeps fits (see admission.py); if nothing runs, the next one is admitted in
any case. Answers that wait for the state at their prompt's end (see forks.py) go before what has not begun, and one of
them can always begin when no other of its request runs: its pages are set aside, and a prompt that will have more
answers than there are slots is admitted only when no other one waits for slots. So of two slots, at most one holds such
a state, and there are two at least.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType

from apcbatch.engine.admission import Admission
from apcbatch.engine.forks import Forks
from apcbatch.engine.gate import Gate
from apcbatch.engine.heirs import Heirs
from apcbatch.engine.page_tables import PageTables
from apcbatch.engine.pages import NO_PAGES
from apcbatch.engine.pass_size import PassSize
from apcbatch.engine.pool import Snapshot
from apcbatch.engine.promises import Promises
from apcbatch.engine.runner import Chunk, Keep
from apcbatch.engine.sequence import Sequence
from apcbatch.engine.snapshots import Snapshots

NOBODY: Mapping[Sequence, int] = MappingProxyType({})


def num_live_slots(max_running: int) -> int:
    """The slots of live states: one for each sequence that may run, and a second one for the state at the end of a
    prompt with several answers if no more than one may."""
    return max(max_running, 2)


class Scheduler:
    """Waiting and running sequences, in the order of submission. forks: the answers of requests that have several, from
    the end of the prompt until all of them have ended. heirs: has what failed ones were to publish. on_begin: told of
    each sequence that is about to be admitted."""

    def __init__(
        self,
        snapshots: Snapshots,
        page_tables: PageTables,
        *,
        max_batch_tokens: int,
        max_running: int,
        capacity_bytes: int,
        prompt_cost: int = 0,
        groups: int = 1,
    ) -> None:
        """max_running: in a pass. prompt_cost: of a pass with prompts, in decode passes beyond one; see gate.py.
        groups: of sequences that run side by side, each in passes of its own; their sequences come and go."""
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.forks: list[Forks] = []
        self._snapshots, self._page_tables = snapshots, page_tables
        self._size = PassSize(max_batch_tokens, max_running, groups)
        self._max_running = groups * max_running
        self._free_slots = list(range(num_live_slots(self._max_running) - 1, -1, -1))
        self._promises = Promises()
        self.heirs = Heirs(self._promises, snapshots, self._sequence_of)
        self._admission = Admission(capacity_bytes)
        self._gate = Gate(self._max_running, prompt_cost)
        self._num_submitted = 0
        self.on_begin: Callable[[Sequence], None] = lambda sequence: None
        # Pages that running sequences, and an answer of each prompt that is held, may still ask for.
        self._owed_pages = 0

    @property
    def num_begun(self) -> int:
        """Requests that have begun and not ended."""
        return len(self.forks) + sum(sequence.forks is None for sequence in self.running)

    @property
    def owed_pages(self) -> int:
        """Pages that what runs may still ask for."""
        return self._owed_pages

    def schedule(self, begun: Mapping[Sequence, int] = NOBODY) -> tuple[list[Chunk], list[Sequence]]:
        """(the chunks of the next pass, sequences that can never run for lack of memory). begun: those in passes under
        way, which are not read, and the position that each will have reached."""
        self._snapshots.expect(self.waiting)
        for forks in self.forks:
            while forks.waiting and self._begin_answer(forks):
                pass
        decodes = [sequence for sequence in self.running if not sequence.in_prefill and sequence not in begun]
        chunks = [self._chunk(sequence, 1) for sequence in decodes[: self._size.decodes(len(self.running))]]
        num_decodes = len(chunks)
        impossible: list[Sequence] = []
        left = self._prompts_left(begun) if len(decodes) < len(self.running) else 0
        wanted = self._size.wanted(num_decodes, left)
        if self.waiting and self._num_free and wanted > 0 and (left or self._opens(num_decodes)):
            num_before = len(self.running)
            impossible = self._fill(wanted)
            left += sum(sequence.remaining for sequence in self.running[num_before:])
            if len(self.running) == num_before or not self._num_free:
                self._gate.close()
        if left:
            self._add_prompts(chunks, self._size.prompt_tokens(num_decodes, left), begun)
        for chunk in chunks:  # once all of the pass have the slots that somebody waits for
            positions = chunk.sequence.retention.kept_if_room(chunk.begin, chunk.end)
            if positions:
                self._reserve(chunk, positions)
        return chunks, impossible

    def has_prompts(self, begun: Mapping[Sequence, int]) -> bool:
        """Whether there are tokens of prompts for a pass beside those under way. begun: as `schedule` has it."""
        return self._prompts_left(begun) > 0 or bool(self.waiting and self._num_free) and self._lets_in

    def foresee(self, chunks: list[Chunk], begun: Collection[Sequence] = ()) -> list[Chunk]:
        """The pass after that of `chunks`, whose tokens nobody has read yet: one more token of each sequence that is
        not at its limit then. None where the tokens decide more than who ends: where a prompt is not computed, a next
        token takes more than the likeliest of its logits, a waiting sequence might be admitted, a snapshot would be
        kept, or a sequence that is in no pass, neither in this one nor with `begun` in another, might join."""
        going = [chunk for chunk in chunks if chunk.end + 1 < chunk.sequence.limit]
        if (
            len(chunks) + len(begun) < len(self.running)
            or any(chunk.sequence.in_prefill or chunk.sequence.needs_logits for chunk in chunks)
            or (self._num_owed and (self._num_free or len(going) < len(chunks)))
            or any(chunk.sequence.retention.kept(chunk.end, chunk.end + 1) for chunk in going)
        ):
            return []
        num_free = self._num_free + len(chunks) - len(going)
        if self.waiting and num_free and (not going or self._gate.opens(num_free)):
            return []
        return [self._chunk(chunk.sequence, 1, chunk.end) for chunk in going]

    def _fill(self, wanted: int) -> list[Sequence]:
        """Admit waiting sequences while there are slots and fewer tokens than are wanted. Returns those that can never
        run."""
        impossible: list[Sequence] = []
        passed_over: deque[Sequence] = deque()
        awaited: set[bytes | None] = set()  # by those that were passed over
        in_prefill = [sequence for sequence in self.running if sequence.in_prefill]
        self._admission.begin(min([*in_prefill, self.waiting[0]], key=lambda sequence: sequence.number))
        while self.waiting and self._num_free and wanted > 0:
            sequence = self.waiting.popleft()
            overtakes = self._overtakes(sequence, awaited)
            if overtakes or not self._may_begin(sequence):
                if not self.running:
                    self._give_up(sequence)
                    impossible.append(sequence)
                    continue
                self._admission.pass_over(sequence)
                passed_over.append(sequence)
                awaited.add(sequence.retention.awaited)
                if overtakes or (sequence.request.plan is None and not self._has_slots(sequence)):
                    break  # those behind it, which cannot wait for it, would compute first what it shares with them
            else:
                self._admit(sequence)
                wanted -= sequence.remaining
        passed_over.extend(self.waiting)
        self.waiting = passed_over
        return impossible

    def _add_prompts(self, chunks: list[Chunk], budget: int, begun: Mapping[Sequence, int]) -> None:
        """Add so many tokens of the prompts that run, the first ones first."""
        for sequence in self.running:
            if budget == 0 or len(chunks) == self._size.max_sequences:
                break
            left = _prompt_left(sequence, begun)
            if left:
                chunks.append(self._chunk(sequence, min(budget, left), begun.get(sequence)))
                budget -= chunks[-1].count

    def advance(self, chunk: Chunk) -> None:
        """Note that a chunk was computed and its snapshots are published: the sequence goes on from its own slot."""
        sequence = chunk.sequence
        if sequence.start is not None:
            self._detach(sequence)
        if chunk.end == sequence.num_prompt and sequence.is_trunk:
            self._fork(sequence)
        sequence.computed = chunk.end
        self._promises.settle(sequence.number, sequence.computed)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out of the running ones and free what it holds."""
        self.heirs.leave(sequence)
        self._detach(sequence)
        self._take_out(sequence)
        self._free_slots.append(sequence.slot)
        sequence.slot = -1
        self._page_tables.release(sequence)
        forks = sequence.forks
        if forks is not None and not sequence.is_trunk:
            forks.num_running -= 1
            if not forks.num_running and forks.waiting:
                self._owed_pages += self._page_tables.needed_by_fork(sequence)
            self._let_go(forks)

    def drop_answers(self, forks: Forks) -> None:
        """Drop the answers of a request that have not begun. Those that run are to be finished first."""
        if forks.waiting and not forks.num_running:
            self._owed_pages -= self._page_tables.needed_by_fork(forks.waiting[0])
        forks.waiting.clear()
        self._let_go(forks)

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self._enter(sequence)
        self.waiting.append(sequence)

    def refuse(self, sequence: Sequence) -> None:
        """Have a sequence that cannot run leave what its plan says to others."""
        self._enter(sequence)
        self._give_up(sequence)

    def _enter(self, sequence: Sequence) -> None:
        """Number a sequence, and note what it will publish."""
        sequence.number = self._num_submitted
        self._num_submitted += 1
        sequence.retention.follow(sequence.keys, self._promises)
        self._promise(sequence, sequence.retention.promised_at_submission())

    def drop_waiting(self) -> None:
        """Drop what has not begun; what it was to publish is left to requests that may still come."""
        for sequence in self.waiting:
            self._give_up(sequence)
        self.waiting.clear()

    def _give_up(self, sequence: Sequence) -> None:
        """A sequence will not run: what it was to publish is left to its readers, and nothing is kept for itself."""
        self.heirs.inherit(sequence)
        self.heirs.leave(sequence)
        if sequence.source:
            self.heirs.release(sequence.source, sequence.retention.leader)

    def _sequence_of(self, number: int) -> Sequence:
        return next(sequence for sequence in (*self.running, *self.waiting) if sequence.number == number)

    def _may_begin(self, sequence: Sequence) -> bool:
        """Whether there is room, and nothing to wait for. If nothing runs, room for its own KV is enough, and any
        snapshot goes for it."""
        if self.running and (self._waits(sequence) or not self._admission.fits(sequence)):
            return False
        if not self._has_slots(sequence):
            return False
        needed = self._page_tables.needed_to_start(sequence) + self._owed_pages
        return self._page_tables.free(needed, awaited=not self.running)

    def _overtakes(self, sequence: Sequence, awaited: set[bytes | None]) -> bool:
        """Whether a sequence without a plan would publish first what one before it is to. awaited: the keys that those
        before it wait for. Only one that is scored does not wait for them itself."""
        request = sequence.request
        return (
            request.score_from is not None and request.plan is None and not awaited.isdisjoint(sequence.keys.values())
        )

    def _has_slots(self, sequence: Sequence) -> bool:
        """Whether the answers whose prompts have begun leave slots for those of a sequence."""
        owed = self._num_owed
        return not owed or self._num_free - owed >= sequence.num_answers

    def _waits(self, sequence: Sequence) -> bool:
        """Whether a sequence is better off when another one has published what it can resume from."""
        return self.heirs.waits(sequence) or sequence.retention.waits(
            sequence.keys, self._promises, lambda: self._snapshots.available_position(sequence)
        )

    def _admit(self, sequence: Sequence) -> None:
        self.on_begin(sequence)
        sequence.slot = self._free_slots.pop()
        self.heirs.inherit(sequence)
        self._admission.admit(sequence)
        self._snapshots.attach(sequence)
        self._owed_pages += self._page_tables.needed_to_end(sequence) - len(sequence.pages)
        promised = sequence.retention.promised_at_begin(sequence.computed)
        self._promise(sequence, [p for p in promised if not self._snapshots.holds(sequence.keys[p])])
        self.running.append(sequence)

    def _prompts_left(self, begun: Mapping[Sequence, int]) -> int:
        """How many tokens of the prompts that run are in no pass yet."""
        return sum(_prompt_left(sequence, begun) for sequence in self.running if sequence.in_prefill)

    def _opens(self, num_decodes: int) -> bool:
        """Whether a pass with so many decodes, and no prompts yet, may let in those that wait."""
        return self._gate.opens(self._num_free) if num_decodes else self._lets_in

    @property
    def _lets_in(self) -> bool:
        """Whether a pass without decodes may let in those that wait: passes of others do not wait for it, or they have
        waited long enough."""
        return self._gate.is_open or all(sequence.in_prefill for sequence in self.running)

    @property
    def _num_free(self) -> int:
        """How many more sequences may begin."""
        return min(len(self._free_slots), self._max_running - len(self.running))

    @property
    def _num_owed(self) -> int:
        """How many more slots the answers will take whose prompts have begun."""
        coming = sum(sequence.num_answers - 1 for sequence in self.running if sequence.is_trunk)
        return coming + sum(len(forks.waiting) - 1 for forks in self.forks if forks.waiting)

    def _take_out(self, sequence: Sequence) -> None:
        """A sequence runs no more, and asks for no more pages."""
        self.running.remove(sequence)
        self._owed_pages -= self._page_tables.needed_to_end(sequence) - len(sequence.pages)

    def _detach(self, sequence: Sequence) -> None:
        """A sequence does not need the state any more that it started from."""
        self._snapshots.detach(sequence)
        if sequence.forks is not None:
            self._let_go(sequence.forks)

    def _fork(self, trunk: Sequence) -> None:
        """A prompt with several answers is computed: hold its state for them. Some may have ended with their first
        token."""
        forks = trunk.forks
        assert forks is not None
        self._take_out(trunk)
        forks.held = Snapshot(b"", trunk.num_prompt, trunk.slot, trunk.pages)
        trunk.pages, trunk.slot, trunk.keys = NO_PAGES, -1, {}
        for sequence in forks.sequences:
            sequence.computed = trunk.num_prompt
        forks.waiting.extend(sequence for sequence in forks.sequences if not sequence.finish_reason)
        if forks.waiting:
            self._owed_pages += self._page_tables.needed_by_fork(trunk)
        self.forks.append(forks)
        self._let_go(forks)

    def _begin_answer(self, forks: Forks) -> bool:
        """Give the next answer of a request a slot and pages, if there are any. Pages for one are set aside while none
        runs. The last one goes on in the slot of the prompt's state, unless others are to read it in this pass."""
        held, sequence = forks.held, forks.waiting[0]
        assert held is not None
        takes_over = len(forks.waiting) == 1 and not held.pins
        if len(self.running) >= self._max_running or not (takes_over or self._free_slots):
            return False
        needed = self._page_tables.needed_by_fork(sequence)
        set_aside = 0 if forks.num_running else needed
        if not self._page_tables.free(needed + self._owed_pages - set_aside, awaited=not self.running):
            return False
        self._owed_pages -= set_aside
        if takes_over:
            sequence.slot, sequence.pages, forks.held = held.slot, held.pages, None
        else:
            sequence.slot, sequence.start = self._free_slots.pop(), held
            held.pins += 1
            self._page_tables.adopt(sequence, held)
        self._owed_pages += self._page_tables.needed_to_end(sequence) - len(sequence.pages)
        forks.waiting.popleft()
        forks.num_running += 1
        self.running.append(sequence)
        return True

    def _let_go(self, forks: Forks) -> None:
        """Free the state that the answers started from when none of them needs it any more."""
        held = forks.held
        if held is not None and not forks.waiting and not held.pins:
            forks.held = None
            self._free_slots.append(held.slot)
            self._page_tables.release(held)
        if not forks.waiting and not forks.num_running and forks in self.forks:
            self.forks.remove(forks)

    def _promise(self, sequence: Sequence, positions: Iterable[int]) -> None:
        """From now on others may wait for these positions of a sequence's prompt."""
        self._promises.make(sequence.number, [(position, sequence.keys[position]) for position in positions])

    def _chunk(self, sequence: Sequence, count: int, begin: int | None = None) -> Chunk:
        """The next `count` tokens, with pages to write to and slots for the snapshots that are kept at once. begin:
        where the sequence will be when the pass before has ended; None: where it is."""
        chunk = Chunk(sequence, sequence.computed if begin is None else begin, count)
        self._owed_pages -= self._page_tables.extend(sequence, chunk.end)
        positions = sequence.retention.kept_at_once(chunk.begin, chunk.end)
        if positions:
            self._reserve(chunk, positions)
        return chunk

    def _reserve(self, chunk: Chunk, positions: Iterable[int]) -> None:
        """Slots for the snapshots at these positions of a chunk, at least one."""
        for position in positions:
            slot_key = self._snapshots.reserve(chunk.sequence, position)
            if slot_key is not None:
                chunk.keep.append(Keep(position, slot_key[1], slot_key[0]))
        chunk.keep.sort(key=lambda keep: keep.position)


def _prompt_left(sequence: Sequence, begun: Mapping[Sequence, int]) -> int:
    """How many tokens of a sequence that computes its prompt are in no pass yet."""
    if not sequence.in_prefill:
        return 0
    return sequence.num_tokens - begun.get(sequence, sequence.computed)
