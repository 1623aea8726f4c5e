"""Draft the next tokens of running answers: choose the guesses that a pass verifies beside its due tokens, and learn
which guesses are right and what a row of a pass costs.

A pass over a due token and k guesses computes k + 1 rows of logits. The answer's tokens are drawn from these rows as
ever; a guess is accepted if it equals the token drawn at its position (engine.py). For the state after the accepted
tokens there are two ways. On the CPU the pass leaves the state as it was and keeps the inputs of the recurrence, which
are replayed for the accepted tokens. On a device the pass writes the state before each guess to a slot of its own.

Invariant: drafts change no token, log-probability, snapshot or miss reason; they change time alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from apcbatch.drafts.drafter import Draft
from apcbatch.drafts.drafts import Drafts
from apcbatch.engine.row_costs import RowCosts
from apcbatch.engine.sequence import Chunk, Sequence
from apcbatch.model.causal_lm import CausalLM
from apcbatch.model.pipeline import Model
from apcbatch.prefix import TokenArray

MOST_DRAFTED = 64  # tokens of one draft
MARGIN = 1.03  # of the rate without guesses, as seconds are measured
PLAIN_EVERY = 4  # passes, of which one has no guesses while the seconds without them are not known
LEARNING = 0.02  # weight of one draft in the learnt chance of a forced token


class Drafting:
    """Drafting of one engine. drafts: None for none. slots: for the states that passes write; none where the model
    replays. most: guesses of a pass. counts: source -> [guesses verified, accepted]. saved_s: estimate of the seconds
    that guesses saved, from passes without them of as many answers; None before the first guess."""

    def __init__(self, drafts: Drafts | None, model: Model, slots: Iterable[int], most: int) -> None:
        self._drafts, self._most_in_pass = drafts, most
        self._model = model if isinstance(model, CausalLM) else None  # the only one that may replay
        self._slots = list(slots)
        self._costs, self._plain_costs = RowCosts(), RowCosts()
        self._num_unknown = 0
        self._waited = False  # whether the next pass was not begun before the last was read, for guesses
        self.saved_s: float | None = None
        self._learning_s = 0.0
        self._forced_reach = 0.9  # learnt: the next token is the one that a grammar forces, in its usual tokenisation
        self.counts: dict[str, list[int]] = {}

    @property
    def _capacity(self) -> int:
        """Most guesses of the next pass."""
        if self._drafts is None:
            return 0
        return self._most_in_pass if self._replays else min(self._most_in_pass, len(self._slots))

    @property
    def _replays(self) -> bool:
        """Whether passes keep inputs in place of states."""
        return self._model is not None and self._model.replays

    @property
    def held_bytes(self) -> int:
        """Bytes of the index that drafts are found in."""
        return 0 if self._drafts is None else self._drafts.held_bytes

    def add_text(self, tokens: TokenArray) -> None:
        """Add the tokens of a text to what later drafts are made from."""
        if self._drafts is not None:
            self._drafts.add(tokens, 0, 0)

    def add_drafts(self, chunks: list[Chunk]) -> None:
        """Set the drafts of the decode chunks of a pass."""
        if not self._capacity:
            return
        proposals = [self._propose(chunk.sequence, self._most(chunk)) for chunk in chunks]
        replays, first_kept = self._replays, 0
        for count, chunk, proposal in zip(self._choose(proposals), chunks, proposals, strict=True):
            if proposal is None or not count:
                continue
            chunk.draft, chunk.proposal = proposal.tokens[:count], proposal
            if replays:
                chunk.first_kept = first_kept
                first_kept += chunk.num_rows
            else:
                chunk.draft_slots = [self._slots.pop() for _ in range(count)]

    def _choose(self, proposals: list[Draft | None]) -> list[int]:
        """Return how many guesses to verify of the proposal of each decode of a pass: the likeliest, as long as a row
        raises the expected tokens per second; none unless that beats a pass without guesses. Now and then a pass has
        none, so that its seconds are known."""
        taken = [0] * len(proposals)
        if not any(proposals):
            return taken
        if not self._plain_costs.knows(len(proposals)):
            self._num_unknown += 1
            if self._num_unknown % PLAIN_EVERY == 0:
                return taken
        guesses = [
            (-reach, place, number)
            for number, proposal in enumerate(proposals)
            if proposal is not None
            for place, reach in enumerate(proposal.reach)
        ]
        guesses.sort()
        rows = len(proposals)
        expected = float(rows)
        costs, plain_costs = self._costs or self._plain_costs, self._plain_costs or self._costs
        best, best_count = MARGIN * expected / plain_costs.of(rows), 0
        for reach, _, _ in guesses[: self._capacity]:
            expected -= reach
            rows += 1
            rate = expected / costs.of(rows)
            if rate > best:
                best, best_count = rate, rows - len(proposals)
        for _, _, number in guesses[:best_count]:
            taken[number] += 1
        return taken

    def settle(self, chunk: Chunk) -> None:
        """Count a read chunk's drafted tokens, and learn from those that were verified."""
        proposal, drafted = chunk.proposal, len(chunk.draft)
        if proposal is None:
            return
        sequence, accepted = chunk.sequence, chunk.accepted
        # the token behind the last accepted guess was drawn too, unless the answer ended before
        verified = accepted if sequence.finish_reason else min(drafted, accepted + 1)
        if proposal.source == "grammar" and verified:
            self._forced_reach += (accepted / verified - self._forced_reach) * LEARNING
        count = self.counts.setdefault(proposal.source, [0, 0])
        count[0] += drafted
        count[1] += accepted
        sequence.drafted += drafted
        sequence.accepted += accepted

    def keep_states(self, chunks: list[Chunk]) -> None:
        """Bring the states of a read pass's drafted sequences to their accepted tokens. An ended one needs none."""
        replays = []
        for chunk in chunks:
            sequence, slots = chunk.sequence, chunk.draft_slots
            if chunk.keeps_inputs and not sequence.finish_reason:
                replays.append((sequence.slot, chunk.first_kept, chunk.count + chunk.accepted))
            elif chunk.accepted < len(slots):
                sequence.slot, slots[chunk.accepted] = slots[chunk.accepted], sequence.slot
            self.release(chunk)
        if replays:
            assert self._model is not None
            self._model.replay(replays)

    def release(self, chunk: Chunk) -> None:
        """Free the slots of a chunk's draft."""
        self._slots += chunk.draft_slots
        chunk.draft_slots = []

    def measure(self, chunks: list[Chunk], seconds: float) -> None:
        """Note the seconds from the end of the pass before to that of this one, if it has no prompts."""
        waited, self._waited = self._waited, False
        if self._drafts is None or any(chunk.sequence.in_prefill for chunk in chunks):
            return
        number, rows = len(chunks), sum(chunk.num_rows for chunk in chunks)
        is_plain = rows == number and not waited
        (self._plain_costs if is_plain else self._costs).add(rows, seconds)
        (self._costs if is_plain else self._plain_costs).age()
        if rows > number and self._plain_costs.knows(number):
            brought = sum(chunk.count + chunk.accepted for chunk in chunks) / number  # passes without guesses
            self.saved_s = (self.saved_s or 0.0) + brought * self._plain_costs.of(number) - seconds

    def learn(self, sequence: Sequence) -> None:
        """Add an ended answer and its prompt to what later drafts are made from."""
        if self._drafts is None or not sequence.finish_reason:
            return
        begin = time.perf_counter()
        is_first = sequence.forks is None or sequence.forks.sequences[0] is sequence
        known = sequence.num_covered if is_first else sequence.num_prompt
        self._drafts.add(sequence.tokens[: sequence.num_tokens], sequence.num_prompt, known)
        self._learning_s += time.perf_counter() - begin

    def learning_s(self) -> float:
        """Return the seconds spent in `learn` since the last call."""
        seconds, self._learning_s = self._learning_s, 0.0
        return seconds

    def is_promising(self, sequences: list[Sequence]) -> bool:
        """Return whether the host should read these answers' tokens before it begins their next pass, since guesses of
        what follows are worth more than a device that never waits."""
        if not self._capacity:
            return False
        self._waited = any(self._choose([self._propose(sequence, MOST_DRAFTED) for sequence in sequences]))
        return self._waited

    def _most(self, chunk: Chunk) -> int:
        """Return the most guesses after a chunk: its answer's last token is not computed, and the state at the next
        position to keep must be that of a token which is certain."""
        if chunk.sequence.start is not None:  # its first pass reads one slot and writes another
            return 0
        begin, limit = chunk.begin, chunk.sequence.limit
        most = min(MOST_DRAFTED, limit - 2 - begin)
        kept = chunk.sequence.retention.kept(begin, begin + 1 + most) if most > 0 else ()
        return min(most, kept[0] - begin - 2) if kept else most

    def _propose(self, sequence: Sequence, most: int) -> Draft | None:
        """Return a draft of up to `most` tokens that follow a sequence's known ones, or None."""
        if self._drafts is None or most <= 0 or not sequence.request.draft:
            return None
        forced = list(sequence.sampler.forced())[:most] if sequence.sampler is not None else []
        if forced:
            return Draft(forced, [self._forced_reach ** (1 + place) for place in range(len(forced))], "grammar")
        drafter = sequence.drafter
        if drafter is None:
            prompt = sequence.tokens[: sequence.num_prompt]
            drafter = sequence.drafter = self._drafts.begin(prompt, sequence.request.references)
            sequence.num_fed = sequence.num_prompt
        if sequence.num_fed < sequence.num_tokens:
            drafter.append(sequence.tokens[sequence.num_fed : sequence.num_tokens])
            sequence.num_fed = sequence.num_tokens
        return drafter.propose(most)
