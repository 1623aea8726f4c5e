"""Draft the next tokens of running answers: choose the guesses that a pass verifies beside its due tokens, and learn
which guesses are right and what a row of a pass costs.

A pass over a due token and k guesses computes k + 1 rows of logits. The answer's tokens are drawn from these rows as
ever; a guess is accepted if it equals the token drawn at its position (engine.py). For the state after the accepted
tokens there are two ways. On the CPU the pass leaves the state as it was and keeps the inputs of the recurrence, which
are replayed for the accepted tokens. On a device the pass writes the state before each guess to a slot of its own.

Invariant: drafts change no token, log-probability, snapshot or miss reason; they change time alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence as Several

from apcbatch.engine.saved_seconds import SavedSeconds
from apcbatch.engine.sequence import Chunk, Sequence
from apcbatch.model.causal_lm import CausalLM
from apcbatch.model.pipeline import Model

from apcbatch.drafts.drafter import Draft
from apcbatch.drafts.drafts import Drafts
from apcbatch.prefix import TokenArray

MOST_DRAFTED = 64  # tokens of one draft
WORTH_WAITING = 0.1  # expected tokens per answer for which the host reads a pass before it begins the next one


class RowCosts:
    """Seconds of a pass by its rows, measured while running.

    Measurements of the same number of rows are averaged, older ones with less weight; the averages are made
    non-decreasing in the number of rows (isotonic regression by pool-adjacent-violators: Barlow et al. 1972,
    Statistical Inference under Order Restrictions, section 1.2) and interpolated.
    """

    def __init__(self) -> None:
        self._seen: dict[int, list[float]] = {}  # rows -> [weight, mean seconds]
        self._rows: list[int] = []
        self._seconds: list[float] = []

    def add(self, rows: int, seconds: float) -> None:
        """Add the seconds of one pass. A pass that took over twice what is expected counts as twice."""
        if self._rows:
            seconds = min(seconds, 2 * self.of(rows))
        for one in self._seen.values():
            one[0] *= FORGETTING
        weight, mean = self._seen.get(rows, (0.0, seconds))
        self._seen[rows] = [weight + 1, mean + (seconds - mean) / (weight + 1)]
        self._seen = {count: one for count, one in self._seen.items() if one[0] > LEAST_WEIGHT}
        self._fit()

    def _fit(self) -> None:
        """Pool neighbours whose means fall, so that the seconds do not decrease."""
        pools: list[list[float]] = []  # [weight, mean, number of row counts]
        for _, (weight, mean) in sorted(self._seen.items()):
            pools.append([weight, mean, 1])
            while len(pools) > 1 and pools[-2][1] >= pools[-1][1]:
                weight, mean, count = pools.pop()
                last = pools[-1]
                last[1] = (last[0] * last[1] + weight * mean) / (last[0] + weight)
                last[0] += weight
                last[2] += count
        self._rows = sorted(self._seen)
        self._seconds = [mean for _, mean, count in pools for _ in range(int(count))]

    def of(self, rows: int) -> float:
        """Return the expected seconds of a pass; 1 plus UNKNOWN_SLOPE a row while nothing was measured."""
        known, seconds = self._rows, self._seconds
        if not known:
            return 1 + UNKNOWN_SLOPE * rows
        at = bisect_left(known, rows)
        if at < len(known) and known[at] == rows:
            return seconds[at]
        if at == 0:  # fewer rows than were ever seen
            return seconds[0] / (1 + UNKNOWN_SLOPE * (known[0] - rows))
        if at == len(known):
            return seconds[-1] * (1 + UNKNOWN_SLOPE * (rows - known[-1]))
        share = (rows - known[at - 1]) / (known[at] - known[at - 1])
        return seconds[at - 1] + share * (seconds[at] - seconds[at - 1])


LEARNING = 0.02
FORGETTING = 0.99  # of a weight, for each later pass
LEAST_WEIGHT = 0.02
UNKNOWN_SLOPE = 0.02  # of a pass's seconds, for each row beyond those measured: little, so that they are measured


class Drafting:
    """Drafting of one engine. drafts: None for none. slots: for the states that passes write; none where the model
    replays. most: guesses of a pass. counts: source -> [guesses verified, accepted]."""

    def __init__(self, drafts: Drafts | None, model: Model, slots: Iterable[int], most: int) -> None:
        self._drafts, self._most_in_pass = drafts, most
        self._model = model if isinstance(model, CausalLM) else None  # the only one that may replay
        self._slots = list(slots)
        self._costs = RowCosts()
        self._forced_reach = 0.9  # learnt: the next token is the one that a grammar forces, in its usual tokenisation
        self.counts: dict[str, list[int]] = {}
        self.saved = SavedSeconds()

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

    def add_drafts(self, chunks: Several[Chunk]) -> None:
        """Set the drafts of the decode chunks of a pass, likeliest guesses first, until the next row costs more than
        it brings: as long as they raise the expected tokens per second."""
        capacity = self._capacity
        if not capacity:
            return
        proposals = []
        for chunk in chunks:
            proposal = self._propose(chunk.sequence, self._most(chunk))
            if proposal is not None:
                proposals.append((chunk, proposal))
        if not proposals:
            return
        guesses = [
            (-reach, place, number)
            for number, (_, proposal) in enumerate(proposals)
            for place, reach in enumerate(proposal.reach)
        ]
        guesses.sort()
        expected, rows = float(len(chunks)), len(chunks)
        best, best_count = expected / self._costs.of(rows), 0
        for count, (reach, _, _) in enumerate(guesses[:capacity], 1):
            expected -= reach
            rate = expected / self._costs.of(rows + count)
            if rate > best:
                best, best_count = rate, count
        taken = [0] * len(proposals)
        for _, _, number in guesses[:best_count]:
            taken[number] += 1
        replays, first_kept = self._replays, 0
        for count, (chunk, proposal) in zip(taken, proposals, strict=True):
            if not count:
                continue
            chunk.draft, chunk.proposal = proposal.tokens[:count], proposal
            if replays:
                chunk.first_kept = first_kept
                first_kept += chunk.num_rows
            else:
                chunk.draft_slots = [self._slots.pop() for _ in range(count)]

    def settle(self, chunk: Chunk) -> None:
        """Count a read chunk's drafted tokens, and learn from those that were verified."""
        proposal, drafted = chunk.proposal, len(chunk.draft)
        if proposal is None:
            return
        sequence, accepted = chunk.sequence, chunk.accepted
        # the token behind the last accepted guess was drawn too, unless the answer ended before
        verified = accepted if sequence.finish_reason else min(drafted, accepted + 1)
        if proposal.source == "grammar":
            self._forced_reach += (accepted / max(1, verified) - self._forced_reach) * LEARNING
        else:
            assert sequence.drafter is not None
            sequence.drafter.settle(proposal, verified, accepted)
        count = self.counts.setdefault(proposal.source, [0, 0])
        count[0] += drafted
        count[1] += accepted
        sequence.drafted += drafted
        sequence.accepted += accepted

    def keep_states(self, chunks: Several[Chunk]) -> None:
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

    def measure(self, chunks: Several[Chunk], seconds: float) -> None:
        """Note the seconds of a pass without prompts."""
        if self._drafts is None or any(chunk.sequence.in_prefill for chunk in chunks):
            return
        rows = sum(chunk.num_rows for chunk in chunks)
        self._costs.add(rows, seconds)
        if rows == len(chunks):
            self.saved.add_plain(rows, seconds)
        else:
            self.saved.add_drafted(len(chunks), sum(chunk.count + chunk.accepted for chunk in chunks), seconds)

    def learn(self, sequence: Sequence) -> None:
        """Add an ended answer and its prompt to what later drafts are made from."""
        if self._drafts is not None and sequence.finish_reason:
            is_first = sequence.forks is None or sequence.forks.sequences[0] is sequence
            begin = sequence.num_covered if is_first else sequence.num_prompt
            self._drafts.add(sequence.tokens[: sequence.num_tokens], sequence.num_prompt, begin)

    def is_promising(self, sequences: Iterable[Sequence]) -> bool:
        """Return whether the host should read these answers' tokens before it begins their next pass, since guesses
        of what follows are likely to be right."""
        if not self._capacity:
            return False
        proposals = [self._propose(sequence, MOST_DRAFTED) for sequence in sequences]
        expected = sum(sum(proposal.reach) for proposal in proposals if proposal is not None)
        return expected > WORTH_WAITING * len(proposals)

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
