"""Sequences: the state of requests in the engine, with their chunks (tokens of one pass) and forks (several answers to
one prompt).
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np

from apcbatch.drafts.drafter import Drafter
from apcbatch.engine.coverage import Reuse
from apcbatch.engine.policy import Nothing, Retention
from apcbatch.engine.pool import NO_PAGES, PageArray, Snapshot
from apcbatch.engine.sampler import Sampler
from apcbatch.engine.validation import MAX_REQUEST_TOKENS, check_drafts, check_request
from apcbatch.errors import RequestError
from apcbatch.prefix import TokenArray
from apcbatch.types import FinishReason, Request, Result, Scores


@dataclass(slots=True)
class StoredPath:
    """What the store has of a sequence's path, for Snapshots. parent: last snapshot of it, as (key, position).
    positions: usable boundaries at the first lookup, longest first. prefetch_key: key of the snapshot that the sequence
    will probably resume from; empty for none, None before the first lookup. rolling: snapshot of the answer's latest
    boundary, if each replaces the previous one; it is stored when the answer ends."""

    parent: tuple[bytes, int] | None = None
    positions: list[int] | None = None
    prefetch_key: bytes | None = None
    rolling: Snapshot | None = None


@dataclass(slots=True)
class AnswerDrafts:
    """Drafts of an answer, for Drafting. drafter: made with the first draft; it knows the first num_fed tokens.
    num_covered: tokens of the longest prefix that the prompt shares with prompts admitted before. drafted, accepted:
    drafted tokens that passes verified, and how many of them were accepted."""

    drafter: Drafter | None = None
    num_fed: int = 0
    num_covered: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(slots=True, eq=False)
class Sequence:
    """One prompt and answer in the engine, waiting or running.

    limit: most tokens of prompt and answer. number: index in order of submission. answer: index among the answers of
    its request. retention, keys: set by Snapshots.prepare; keys: prompt position -> prefix key, ascending, for the
    positions of the retention. source: key of the plan's snapshot that it counts as a reader of; empty for none and
    once that read is counted. computed: tokens consumed by the state in `slot`. prefill_end: known tokens that prefill
    computes: the prompt, or after a preemption the answer so far too. computed_before: tokens that were computed before
    a preemption; they are not counted, scored or kept again. start: snapshot that the next pass reads the state from,
    pinned until then. is_plain, needs_logits: copied from its request. sampler: made with the first token, None for a
    plain request. forks: all answers of its request, this one included, from the prompt's end on; None with one answer.
    admitted_s: time.perf_counter() at its first admission, 0 before.
    """

    request: Request
    tokens: TokenArray  # (num_tokens or more,); the first num_tokens are valid
    num_prompt: int
    num_tokens: int
    limit: int
    number: int = 0
    answer: int = 0
    retention: Retention = field(init=False, repr=False)
    keys: dict[int, bytes] = field(default_factory=dict)
    source: bytes = b""
    computed: int = 0
    prefill_end: int = field(init=False)
    computed_before: int = 0
    slot: int = -1
    pages: PageArray = field(default_factory=lambda: NO_PAGES)
    start: Snapshot | None = None
    stored: StoredPath = field(default_factory=StoredPath)
    reuse: Reuse = Reuse()
    drafts: AnswerDrafts = field(default_factory=AnswerDrafts)
    is_plain: bool = field(init=False)
    needs_logits: bool = field(init=False)
    sampler: Sampler | None = None
    forks: Forks | None = None
    scores: Scores | None = None
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    admitted_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0

    def __post_init__(self) -> None:
        self.is_plain, self.needs_logits = self.request.is_plain, self.request.needs_logits
        self.prefill_end = self.num_prompt

    @property
    def in_prefill(self) -> bool:
        """Whether tokens are left that prefill computes."""
        return self.computed < self.prefill_end

    @property
    def num_answers(self) -> int:
        """Number of answers to compute. Equal answers (greedy or empty) are computed once."""
        return self.request.n if self.request.temperature > 0 and self.request.max_tokens else 1

    @property
    def will_fork(self) -> bool:
        """Whether it computes a prompt for several answers."""
        return self.in_prefill and self.num_answers > 1 and self.prefill_end == self.num_prompt

    @property
    def is_running(self) -> bool:
        """Whether it has a slot."""
        return self.slot >= 0

    @property
    def siblings(self) -> list[Sequence]:
        """The sequences of all answers of its request, in order."""
        return [self] if self.forks is None else self.forks.sequences

    @property
    def keeps_answer(self) -> bool:
        """Whether snapshots of its answer are kept; of several answers, only the first's."""
        return self.request.keep_answer and not self.answer

    @property
    def remaining(self) -> int:
        """Number of known tokens not yet computed."""
        return self.num_tokens - self.computed

    def append(self, token: int, logprob: float) -> None:
        """Append a sampled token."""
        if self.num_tokens == len(self.tokens):
            # Twice the capacity, so that appending is amortised O(1).
            room = min(len(self.tokens), self.limit - len(self.tokens))
            self.tokens = np.concatenate([self.tokens, np.empty(room, np.int32)])
        self.tokens[self.num_tokens] = token
        self.num_tokens += 1
        if self.request.logprobs:
            self.logprobs.append(logprob)

    def result(self) -> Result:
        """Return the finished request's result."""
        if self.forks is not None:
            return self.forks.result()
        result = self.own_result()
        return result if self.request.n == 1 else replace(result, others=[result] * (self.request.n - 1))

    def own_result(self) -> Result:
        """Return the result of this answer alone."""
        return Result(
            id=self.request.id,
            prompt_tokens=self.num_prompt,
            token_ids=self.tokens[self.num_prompt : self.num_tokens].tolist(),
            logprobs=self.logprobs if self.request.logprobs else None,
            top_logprobs=self.top_logprobs if self.request.top_logprobs else None,
            finish_reason=self.finish_reason or "length",
            stop_reason=self.stop_reason,
            **vars(self.reuse),
            computed_tokens=self.num_prompt - self.reuse.cached_tokens,
            boundary=self.reuse.cached_tokens,
            prefill_ms=1e3 * self.prefill_s,
            decode_ms=1e3 * self.decode_s,
            running_s=time.perf_counter() - self.admitted_s,
            tag=self.request.tag,
            scores=self.scores,
            drafted_tokens=self.drafts.drafted,
            accepted_tokens=self.drafts.accepted,
        )


def failed_result(request: Request, error: RequestError) -> Result:
    """Return the result of a request that ended in an error."""
    return Result(id=request.id, prompt_tokens=len(request.token_ids), error=error, tag=request.tag)


def make_sequence(
    request: Request,
    vocab_size: int,
    context_length: int | None,
    max_request_tokens: int = MAX_REQUEST_TOKENS,
) -> Sequence:
    """Return a checked sequence. Raises RequestError (invalid_request, context_length_exceeded)."""
    prompt, room = check_request(request, vocab_size, context_length, max_request_tokens)
    check_drafts(request, vocab_size)
    sequence = Sequence(request, prompt.copy(), len(prompt), len(prompt), len(prompt) + room)
    if request.score_from is not None:
        sequence.scores = Scores(request.score_from)
    return sequence


@dataclass(slots=True)
class Keep:
    """Snapshot that a pass writes into a reserved slot, after `position` tokens of the sequence."""

    position: int
    key: bytes
    slot: int


@dataclass(slots=True, eq=False)
class Chunk:
    """Prefill or decode chunk: `count` tokens of a sequence from position `begin`, and the snapshots in it,
    ascending.

    draft: drafted tokens after the chunk's own, which the pass verifies. draft_source: the source that predicted them.
    draft_slots: the slot of the state before each drafted token; the state after the last one is in the sequence's own
    slot. Empty if the pass instead keeps the inputs of the chunk's rows and leaves the state unchanged; first_kept is
    then the index of the chunk's first row in the pass's kept_rows. accepted: number of accepted tokens of the draft,
    once the pass was read.
    """

    sequence: Sequence
    begin: int
    count: int
    keep: list[Keep] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)
    draft_slots: list[int] = field(default_factory=list)
    first_kept: int = 0
    draft_source: str = ""
    accepted: int = 0

    @property
    def end(self) -> int:
        """Position of the sequence after the pass; drafted tokens count once accepted."""
        return self.begin + self.count + self.accepted

    @property
    def in_prefill(self) -> bool:
        """Whether its tokens are of the prompt, or were known before a preemption."""
        return self.begin < self.sequence.prefill_end

    @property
    def first_new(self) -> int:
        """Position from which the chunk's tokens are computed for the first time."""
        return max(self.begin, self.sequence.computed_before)

    @property
    def keeps_inputs(self) -> bool:
        """Whether the pass keeps the inputs of its rows in place of states."""
        return bool(self.draft) and not self.draft_slots

    @property
    def num_rows(self) -> int:
        """Number of tokens of this chunk that the pass computes, drafted ones included."""
        return self.count + len(self.draft)

    @property
    def samples(self) -> bool:
        """Whether the pass yields the sequence's next token."""
        return self.end >= self.sequence.num_tokens and self.sequence.limit > self.sequence.num_prompt

    @property
    def scored(self) -> range:
        """Positions of the chunk whose next token is a scored prompt token."""
        scores = self.sequence.scores
        if scores is None:
            return range(0)
        return range(max(self.first_new, scores.begin - 1), min(self.end, self.sequence.num_prompt - 1))


SUMS = ("decode_ms", "drafted_tokens", "accepted_tokens")  # fields of a Result that are summed over all answers


@dataclass(slots=True, eq=False)
class Forks:
    """Several answers to one prompt. sequences: the answers; the first has computed the prompt. held: state at the
    prompt's end, as a snapshot outside the pool; None before, and once the last answer has begun. waiting: answers with
    a first token and no slot. num_begun: answers that have had a slot and have not ended. delivered: whether the result
    was returned."""

    sequences: list[Sequence]
    held: Snapshot | None = None
    waiting: deque[Sequence] = field(default_factory=deque)
    num_begun: int = 0
    delivered: bool = False

    @property
    def finished(self) -> bool:
        """Whether every answer has ended."""
        return all(sequence.finish_reason for sequence in self.sequences)

    def result(self) -> Result:
        """Return all answers as one result."""
        first, *others = [sequence.own_result() for sequence in self.sequences]
        sums = {name: sum(getattr(one, name) for one in (first, *others)) for name in SUMS}
        return replace(first, others=others, **sums)


def fork_answers(sequence: Sequence) -> list[Sequence]:
    """Make the sequences of all answers at the end of a prompt; the given one is the first."""
    forks = Forks([sequence])
    forks.sequences += [_fork(sequence, answer) for answer in range(1, sequence.num_answers)]
    for one in forks.sequences:
        one.forks = forks
    return forks.sequences


def _fork(first: Sequence, answer: int) -> Sequence:
    """Return another answer to a computed prompt, which keeps no snapshots."""
    request = first.request
    prompt = first.tokens[: first.num_prompt].copy()
    fork = Sequence(request, prompt, first.num_prompt, first.num_prompt, first.limit, first.number, answer)
    fork.scores, fork.admitted_s = first.scores, first.admitted_s
    fork.retention = Nothing(request, first.num_prompt, block_size=1)
    return fork
