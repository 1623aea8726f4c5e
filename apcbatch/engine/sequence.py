"""One request on its way through the engine: its tokens, how far its state has come, what it holds.

Must not know: tensors, kernels, the batch it runs in.
"""

from __future__ import annotations

import reprlib
import sys
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING

import numpy as np

from apcbatch.engine.pages import NO_PAGES, PageArray
from apcbatch.engine.policy import Retention
from apcbatch.engine.pool import Snapshot
from apcbatch.engine.room import MAX_REQUEST_TOKENS, room_for_answer
from apcbatch.engine.sampler import request_key
from apcbatch.errors import RequestError
from apcbatch.prefix import TokenArray, as_token_array
from apcbatch.types import CachedFrom, FinishReason, MissReason, Request, Result, Scores

if TYPE_CHECKING:
    from apcbatch.engine.forks import Forks

MOST_ANSWERS = 128
MOST_SCORE_TOP = 20
LARGEST_NUMBER = (1 << 63) - 1  # of tokens
SEEDS = range(-(1 << 63), 1 << 64)  # signed and unsigned 64-bit numbers


@dataclass(slots=True, eq=False)
class Sequence:
    """limit: the most tokens that prompt and answer may have; their memory grows as they come. computed: tokens whose
    state is in `slot`. keys: the prefix keys of the prompt's positions that matter, by position, ascending.

    number: its place in the order of submission. retention: what it keeps and may resume from, set by
    Snapshots.prepare. start: the snapshot that the next pass reads its state from, pinned until then. rolling: the
    snapshot of the answer's latest boundary, if that takes the place of the one before it. store_parent: the last
    snapshot on this sequence's path that the store has, as (key, position). stored_positions: usable boundaries that
    the store held at the first look, longest first. forks: the answers of its request, where there are several, from
    the end of the prompt on; this sequence is one of them.
    """

    request: Request
    tokens: TokenArray  # (num_tokens or more,), the first num_tokens are known
    num_prompt: int
    num_tokens: int
    limit: int
    number: int = 0
    retention: Retention = field(init=False, repr=False)
    keys: dict[int, bytes] = field(default_factory=dict)
    computed: int = 0
    slot: int = -1
    pages: PageArray = field(default_factory=lambda: NO_PAGES)
    start: Snapshot | None = None
    rolling: Snapshot | None = None
    store_parent: tuple[bytes, int] | None = None
    stored_positions: list[int] | None = None
    sampler_key: int = 0
    forks: Forks | None = None
    scores: Scores | None = None
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    cached_from: CachedFrom = "none"
    ideal: int | None = None
    miss_reason: MissReason | None = None
    miss_detail: str | None = None
    prefill_s: float = 0.0
    decode_s: float = 0.0

    @property
    def in_prefill(self) -> bool:
        """Whether prompt tokens are still to be computed."""
        return self.computed < self.num_prompt

    @property
    def num_answers(self) -> int:
        """How many answers are computed: equal ones, as greedy ones are, are computed once."""
        return self.request.n if self.request.temperature > 0 else 1

    @property
    def is_trunk(self) -> bool:
        """Whether it computes a prompt from whose end several answers will start."""
        return self.num_answers > 1 and self.in_prefill

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
        """Whether its answer is kept: of several the first one alone may be."""
        return self.request.keep_answer and (self.forks is None or self.forks.sequences[0] is self)

    @property
    def resumable(self) -> int:
        """The longest prefix that it may resume from."""
        return self.request.resumable

    @property
    def score_begin(self) -> int:
        """The first position whose logits are wanted to score the token after it; the prompt's last for none."""
        return self.num_prompt - 1 if self.request.score_from is None else self.request.score_from - 1

    @property
    def remaining(self) -> int:
        """Known tokens that are not yet computed."""
        return self.num_tokens - self.computed

    def append(self, token: int, logprob: float) -> None:
        """Take a sampled token."""
        if self.num_tokens == len(self.tokens):
            # Twice the room, so that a token costs the same however many come.
            room = min(len(self.tokens), self.limit - len(self.tokens))
            self.tokens = np.concatenate([self.tokens, np.empty(room, np.int32)])
        self.tokens[self.num_tokens] = token
        self.num_tokens += 1
        if self.request.logprobs:
            self.logprobs.append(logprob)

    def result(self) -> Result:
        """The finished request's result."""
        if self.forks is not None:
            return self.forks.result()
        result = self.own_result()
        return result if self.request.n == 1 else replace(result, others=[result] * (self.request.n - 1))

    def own_result(self) -> Result:
        """The result of this answer alone."""
        return Result(
            id=self.request.id,
            prompt_tokens=self.num_prompt,
            token_ids=self.tokens[self.num_prompt : self.num_tokens].tolist(),
            logprobs=self.logprobs if self.request.logprobs else None,
            finish_reason=self.finish_reason or "length",
            cached_tokens=self.cached_tokens,
            computed_tokens=self.num_prompt - self.cached_tokens,
            cached_from=self.cached_from,
            ideal_cached_tokens=self.ideal,
            boundary=self.cached_tokens,
            miss_reason=self.miss_reason,
            miss_detail=self.miss_detail,
            prefill_ms=1e3 * self.prefill_s,
            decode_ms=1e3 * self.decode_s,
            tag=self.request.tag,
            scores=self.scores,
        )

    def failure(self, error: RequestError) -> Result:
        """The record of a request that could not be answered."""
        return failed(self.request, error)


def failed(request: Request, error: RequestError) -> Result:
    """The result of a request that ended in an error."""
    return Result(id=request.id, prompt_tokens=len(request.token_ids), error=error, tag=request.tag)


def make_sequence(
    request: Request,
    vocab_size: int,
    context_length: int | None,
    max_request_tokens: int = MAX_REQUEST_TOKENS,
) -> Sequence:
    """A checked sequence; RequestError (invalid_request, context_length_exceeded) if the request cannot run."""
    prompt, room = check_request(request, vocab_size, context_length, max_request_tokens)
    sequence = Sequence(request, prompt.copy(), len(prompt), len(prompt), len(prompt) + room)
    if request.temperature > 0:
        sequence.sampler_key = request_key(request.seed, request.id)
    if request.score_from is not None:
        sequence.scores = Scores(request.score_from)
    return sequence


def check_request(
    request: Request, vocab_size: int, context_length: int | None, max_request_tokens: int
) -> tuple[TokenArray, int]:
    """The prompt of a request that can run, and the most new tokens that it gets; RequestError says what is wrong with
    one that cannot."""

    def invalid(message: str) -> RequestError:
        return RequestError("invalid_request", message)

    try:
        prompt = as_token_array(request.token_ids)
    except (OverflowError, ValueError, TypeError):
        raise invalid("token_ids hold something else than token ids; expected integers of the vocabulary") from None
    if not len(prompt):
        raise invalid("the prompt is empty; expected at least one token")
    if int(prompt.max()) >= vocab_size:
        raise invalid(f"token id {int(prompt.max())} is outside the vocabulary; expected less than {vocab_size}")
    least = 1 if request.score_from is None else 0
    if not _is_whole(request.max_tokens) or not least <= request.max_tokens <= LARGEST_NUMBER:
        raise invalid(f"max_tokens is {_shown(request.max_tokens)}; expected a whole number of at least {least}")
    if not _is_whole(request.n) or not 1 <= request.n <= MOST_ANSWERS:
        raise invalid(f"n is {_shown(request.n)}; expected a whole number from 1 to {MOST_ANSWERS}")
    if request.score_from is not None and not (
        _is_whole(request.score_from) and 1 <= request.score_from <= len(prompt)
    ):
        raise invalid(
            f"score_from is {_shown(request.score_from)}; expected a position from 1 to {len(prompt)}, the prompt's end"
        )
    if not _is_whole(request.score_top) or not 0 <= request.score_top <= MOST_SCORE_TOP:
        raise invalid(f"score_top is {_shown(request.score_top)}; expected a whole number from 0 to {MOST_SCORE_TOP}")
    if not _is_number(request.temperature) or not 0 <= request.temperature <= sys.float_info.max:
        raise invalid(f"temperature is {_shown(request.temperature)}; expected a number of at least 0")
    if not _is_number(request.top_p) or not 0 < request.top_p <= 1:
        raise invalid(f"top_p is {_shown(request.top_p)}; expected more than 0 and at most 1")
    if not _is_whole(request.seed) or int(request.seed) not in SEEDS:
        raise invalid(f"seed is {_shown(request.seed)}; expected a whole number of 64 bits")
    return prompt, room_for_answer(len(prompt), request.max_tokens, context_length, max_request_tokens)


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _shown(value: object) -> str:
    """A value as a sentence shows it: never long, and no digits of a number that Python refuses to write."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    return reprlib.repr(value)
