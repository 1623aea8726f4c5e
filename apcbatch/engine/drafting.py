"""Speculative decoding of one engine: choose the drafted tokens that a pass verifies, and roll states back to the
accepted ones.

A pass over a sequence's due token and k drafted ones computes k + 1 rows of logits. Each token of the answer is sampled
from its row as without drafts; a drafted token is accepted if it equals the one sampled at its position (engine.py).
States are rolled back in one of two ways. On the CPU a pass leaves the state of a drafting sequence unchanged and keeps
the inputs of the recurrence; those of the accepted tokens are replayed. On a device a pass writes the state before each
drafted token to its own slot.

Invariant: drafts change no token, log-probability, snapshot or miss reason; they change time alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Literal

from apcbatch.drafts.drafter import Draft, Drafts
from apcbatch.engine.row_costs import RowCosts
from apcbatch.engine.sequence import Chunk, Sequence
from apcbatch.model.causal_lm import CausalLM
from apcbatch.model.graphs import GraphedLM
from apcbatch.model.pipeline import Model
from apcbatch.prefix import TokenArray

MOST_DRAFTED = 64  # tokens of one draft
MARGIN = 1.03  # minimum ratio of tokens per second to a pass without drafts; above 1, as measured seconds vary
PLAIN_RUN, PLAIN_CYCLE = 4, 16  # while the seconds of a pass without drafts are unknown, 4 of 16 passes, in a row
WINDOW = 64  # passes after which the search for drafts is weighed
ENOUGH = 512  # searches, from PLAIN_CYCLE passes on, after which it is weighed too
LOSS = 0.01  # net loss, as a share of the window's seconds, from which the search pauses; in a pause, for indexing
LONGEST_PAUSE = 1024  # passes
LEARNING = 0.02  # weight of one draft in the estimated acceptance of forced tokens


class Drafting:
    """Speculative decoding of one engine.

    drafts: the draft index. slots: state slots for drafted tokens; empty if the model replays. most: maximum drafted
    tokens of a pass; 0 to draft nothing. clock: seconds by which passes, and the search, are compared. free_slots:
    those of `slots` that no pass in flight uses. costs, plain_costs: seconds of passes with drafts, and of those
    without. counts: source -> [drafted, accepted] tokens. saved_s: estimated seconds saved by drafts, compared with
    passes of as many sequences without drafts; None before the first such estimate.
    """

    def __init__(
        self,
        drafts: Drafts,
        model: Model,
        slots: Iterable[int],
        most: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._drafts, self._most_in_pass, self._clock = drafts, most, clock
        self._settled_s = clock()
        self._model = model if isinstance(model, CausalLM) else None  # the only one that may replay
        self._graphed = model if isinstance(model, GraphedLM) else None
        self._num_graphs = 0  # captured until the last pass was read
        self.free_slots = list(slots)
        self.costs, self.plain_costs = RowCosts(), RowCosts()
        self._num_read = 0  # passes
        self._waited = False  # whether the host reads the last pass before it begins the next, to draft
        self._search_s = 0.0  # of the last pass
        self._gain_s = self._window_s = 0.0  # of the window
        self._num_weighed, self._pause, self._pause_end = 0, WINDOW, 0  # passes
        self._num_searched = 0  # sequences searched in the passes of the window
        self._indexing_s = 0.0  # left for indexing in a pause
        self._last: Literal["prompts", "plain", "drafts"] = "prompts"  # what the last pass had
        self.saved_s: float | None = None
        self._forced_reach = 0.9  # estimated acceptance of a token that a grammar forces
        self.counts: dict[str, list[int]] = {}

    @property
    def _capacity(self) -> int:
        """Maximum drafted tokens of the next pass."""
        return self._most_in_pass if self._replays else min(self._most_in_pass, len(self.free_slots))

    @property
    def _replays(self) -> bool:
        """Whether passes keep inputs in place of states."""
        return self._model is not None and self._model.replays

    @property
    def held_bytes(self) -> int:
        """Bytes of the draft index."""
        return self._drafts.held_bytes

    def add_text(self, tokens: TokenArray) -> None:
        """Add a text to the draft index."""
        self._drafts.add(tokens, 0, 0)

    def add_drafts(self, chunks: list[Chunk], has_pages: Callable[[Chunk, int], bool]) -> None:
        """Draft for the decode chunks of a pass, as far as it pays. has_pages: allocates the pages for some drafted
        tokens of a chunk; returns False if they are not free."""
        if not self._may_draft(chunk.sequence for chunk in chunks):
            return
        begin = self._clock()
        proposals = [self._propose(chunk.sequence, self._most(chunk)) for chunk in chunks]
        chosen = self._choose(proposals)
        self._search_s = self._clock() - begin
        replays, first_kept = self._replays, 0
        for count, chunk, proposal in zip(chosen, chunks, proposals, strict=True):
            if proposal is None or not count or not has_pages(chunk, count):
                continue
            chunk.draft, chunk.draft_source = proposal.tokens[:count], proposal.source
            if replays:
                chunk.first_kept = first_kept
                first_kept += chunk.num_rows
            else:
                chunk.draft_slots = [self.free_slots.pop() for _ in range(count)]

    def _may_draft(self, sequences: Iterable[Sequence]) -> bool:
        """Return whether a pass of these sequences may have drafts. In a pause only a grammar's forced tokens are."""
        return self._capacity > 0 and (
            not self._is_paused or any(sequence.request.constraint is not None for sequence in sequences)
        )

    def _choose(self, proposals: list[Draft | None]) -> list[int]:
        """Return the number of tokens to verify of each sequence's proposal.

        Take the tokens with the largest reach until a further row lowers the expected tokens per second. Take none if
        the rate is below MARGIN times that of a pass without drafts. Take none either while such passes are measured
        (PLAIN_RUN)."""
        taken = [0] * len(proposals)
        if not any(proposals):
            return taken
        if self._num_read % PLAIN_CYCLE < PLAIN_RUN and not self.plain_costs.knows(len(proposals)):
            return taken
        candidates = [
            (-reach, place, number)
            for number, proposal in enumerate(proposals)
            if proposal is not None
            for place, reach in enumerate(proposal.reach)
        ]
        candidates.sort()
        rows = len(proposals)
        expected = float(rows)
        costs, plain_costs = self.costs or self.plain_costs, self.plain_costs or self.costs
        best, best_count = MARGIN * expected / plain_costs.of(rows), 0
        for reach, _, _ in candidates[: self._capacity]:
            expected -= reach
            rows += 1
            rate = expected / costs.of(rows)
            if rate > best:
                best, best_count = rate, rows - len(proposals)
        for _, _, number in candidates[:best_count]:
            taken[number] += 1
        return taken

    def settle(self, chunks: list[Chunk]) -> None:
        """Take in a pass that was read, once its answers have their tokens: roll states back to the accepted ones,
        count these, and learn what the pass cost, the seconds since the previous one was settled."""
        if not self._most_in_pass or not chunks:
            return
        replays = []
        for chunk in chunks:
            if not chunk.draft:
                continue
            self._count(chunk)
            sequence, slots = chunk.sequence, chunk.draft_slots
            if chunk.keeps_inputs and not sequence.finish_reason:  # an ended sequence needs no state
                replays.append((sequence.slot, chunk.first_kept, chunk.count + chunk.accepted))
            elif chunk.accepted < len(slots):
                sequence.slot, slots[chunk.accepted] = slots[chunk.accepted], sequence.slot
            self.release(chunk)
        if replays:
            assert self._model is not None
            self._model.replay(replays)
        before, self._settled_s = self._settled_s, self._clock()
        self._measure(chunks, self._settled_s - before)

    def _count(self, chunk: Chunk) -> None:
        """Count the drafted and accepted tokens of a chunk that was read."""
        sequence, drafted, accepted = chunk.sequence, len(chunk.draft), chunk.accepted
        # the token after the last accepted one was sampled too, unless the answer ended
        verified = accepted if sequence.finish_reason else min(drafted, accepted + 1)
        if chunk.draft_source == "grammar" and verified:
            self._forced_reach += (accepted / verified - self._forced_reach) * LEARNING
        count = self.counts.setdefault(chunk.draft_source, [0, 0])
        count[0] += drafted
        count[1] += accepted
        sequence.drafts.drafted += drafted
        sequence.drafts.accepted += accepted

    def release(self, chunk: Chunk) -> None:
        """Free the slots of a chunk's draft."""
        self.free_slots += chunk.draft_slots
        chunk.draft_slots = []

    def _measure(self, chunks: list[Chunk], seconds: float) -> None:
        """Add the seconds of a pass without prompts.

        Of a pass with prompts, weigh only the search against the plain passes that its accepted tokens save. Ignore a
        pass during which a CUDA graph was captured, and one without drafts right after prompts. A pass without drafts
        counts as one with drafts if it made its batch anew, after a pass with drafts, or if the host waited to draft.
        The seconds of the search are not counted as those of a pass without drafts.
        """
        was_paused, self._num_read = self._is_paused, self._num_read + 1
        waited, self._waited = self._waited, False
        search_s, self._search_s = self._search_s, 0.0
        last, self._last = self._last, "prompts"
        num_graphs, self._num_graphs = self._num_graphs, self._graphed.num_graphs if self._graphed else 0
        if num_graphs < self._num_graphs:
            return
        decodes = [chunk for chunk in chunks if not chunk.in_prefill]
        number, rows = len(decodes), sum(chunk.num_rows for chunk in decodes)
        if number < len(chunks):
            more = sum(chunk.accepted for chunk in decodes)
            gain_s = more / number * self.plain_costs.of(number) if more and self.plain_costs else 0.0
            if number or was_paused:
                self._weigh(gain_s - search_s, seconds, number, was_paused)
            return
        self._last = "plain" if rows == number else "drafts"
        if rows == number and last == "prompts":
            return
        is_plain = rows == number and last == "plain" and not waited
        if is_plain:
            self.plain_costs.add(rows, seconds - search_s)
            self.costs.age()
        else:
            self.costs.add(rows, seconds)
            self.plain_costs.age()
        gain_s = -search_s
        if rows > number and self.plain_costs.knows(number):
            brought = sum(chunk.count + chunk.accepted for chunk in chunks) / number  # plain passes for as many tokens
            gain_s = brought * self.plain_costs.of(number) - seconds
            self.saved_s = (self.saved_s or 0.0) + gain_s
        self._weigh(gain_s, seconds, number, was_paused)

    @property
    def _is_paused(self) -> bool:
        """Whether the search for drafts is paused: see _weigh."""
        return self._num_read < self._pause_end

    def _weigh(self, gain_s: float, seconds: float, number: int, was_paused: bool) -> None:
        """Add a pass with `number` decodes to the window; during a pause, add LOSS of its seconds to those of indexing.
        At the window's end, pause the search for drafts if it cost more time than drafts saved. The first pause lasts
        WINDOW passes, and each pause that follows without a window that paid lasts twice as long, up to LONGEST_PAUSE.
        """
        if was_paused:
            self._indexing_s += LOSS * seconds
            return
        self._gain_s += gain_s
        self._window_s += seconds
        self._num_weighed += 1
        self._num_searched += number
        if self._num_weighed < WINDOW and (self._num_weighed < PLAIN_CYCLE or self._num_searched < ENOUGH):
            return
        pays = self._gain_s >= -LOSS * self._window_s
        if not pays:
            self._pause_end = self._num_read + self._pause
        self._pause = WINDOW if pays else min(2 * self._pause, LONGEST_PAUSE)
        self._gain_s, self._window_s, self._num_weighed, self._num_searched = 0.0, 0.0, 0, 0
        self._indexing_s = 0.0

    def learn(self, ended: list[Sequence]) -> float:
        """Add ended answers and their prompts to the draft index, and return the wall seconds that it took. In a pause,
        leave an answer out once indexing has taken LOSS of the pause's seconds."""
        if not (self._most_in_pass and ended):
            return 0.0
        began = time.perf_counter()
        for sequence in ended:
            if self._is_paused and self._indexing_s <= 0:
                break
            before = self._clock()
            known = sequence.num_prompt if sequence.answer else sequence.drafts.num_covered
            self._drafts.add(sequence.tokens[: sequence.num_tokens], sequence.num_prompt, known)
            seconds = self._clock() - before
            if self._is_paused:
                self._indexing_s -= seconds
            else:
                self._gain_s -= seconds
        return time.perf_counter() - began

    def is_promising(self, sequences: list[Sequence]) -> bool:
        """Return whether drafting for these sequences gains more than running ahead: the host must read the last pass
        before it can draft."""
        if not self._may_draft(sequences):
            return False
        self._waited = any(self._choose([self._propose(sequence, MOST_DRAFTED) for sequence in sequences]))
        return self._waited

    def _most(self, chunk: Chunk) -> int:
        """Return the maximum drafted tokens of a chunk.

        The last token of an answer is never computed. A draft ends before the next snapshot's position, since the state
        there must not depend on a token that may be rejected."""
        if chunk.sequence.start is not None:  # the first pass of a fork reads one slot and writes another
            return 0
        begin, limit = chunk.begin, chunk.sequence.limit
        most = min(MOST_DRAFTED, limit - 2 - begin)
        kept = chunk.sequence.retention.kept(begin, begin + 1 + most) if most > 0 else ()
        return min(most, kept[0] - begin - 2) if kept else most

    def _propose(self, sequence: Sequence, most: int) -> Draft | None:
        """Return a draft of at most `most` tokens after a sequence's last one, or None."""
        if most <= 0 or not sequence.request.draft:
            return None
        forced = list(sequence.sampler.forced())[:most] if sequence.sampler is not None else []
        if forced:
            return Draft(forced, [self._forced_reach ** (1 + place) for place in range(len(forced))], "grammar")
        if self._is_paused:
            return None
        drafts, num_prompt = sequence.drafts, sequence.num_prompt
        if drafts.drafter is None:
            references, most_tokens = sequence.request.references, sequence.limit - num_prompt
            drafts.drafter = self._drafts.begin(sequence.tokens[:num_prompt], references, most_tokens)
            drafts.num_fed = num_prompt
        if drafts.num_fed < sequence.num_tokens:
            drafts.drafter.append(sequence.tokens[drafts.num_fed : sequence.num_tokens].tolist())
            drafts.num_fed = sequence.num_tokens
        return drafts.drafter.propose(most)
