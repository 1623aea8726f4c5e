"""One request on its way through the engine: its tokens, how far its state has come, what it holds.

Must not know: tensors, kernels, the batch it runs in.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from apcbatch.engine.pages import NO_PAGES, PageArray
from apcbatch.engine.pool import Snapshot
from apcbatch.engine.sampler import request_key
from apcbatch.errors import RequestError
from apcbatch.prefix import TokenArray, as_token_array
from apcbatch.types import CachedFrom, FinishReason, MissReason, Request, Result


@dataclass(slots=True, eq=False)
class Sequence:
    """computed: tokens whose state is in `slot`. keys: the prefix keys of the prompt's boundaries, by position.

    number: its place in the order of submission. start: the snapshot that the next pass reads its state from, pinned
    until then. held_back: the key of a boundary that another sequence is about to publish and that this one waits for;
    leader: with a plan, that sequence. owed: positions and keys that it is yet to publish, ascending. planned: reads
    left for each position that the plan keeps (0: for later runs only), ascending. branch: the boundary below the
    point where this prompt was seen to leave another one. rolling: the snapshot of the answer's latest boundary under
    policies `last` and `planned`. store_parent: the last snapshot on this sequence's path that the store has, as
    (key, position). stored_positions: usable boundaries that the store held at the first look, longest first.
    """

    request: Request
    tokens: TokenArray  # (prompt + max_tokens,), the first num_tokens are known
    num_prompt: int
    num_tokens: int
    number: int = 0
    keys: dict[int, bytes] = field(default_factory=dict)
    computed: int = 0
    slot: int = -1
    pages: PageArray = field(default_factory=lambda: NO_PAGES)
    start: Snapshot | None = None
    held_back: bytes | None = None
    leader: Sequence | None = None
    owed: list[tuple[int, bytes]] = field(default_factory=list)
    planned: dict[int, int] = field(default_factory=dict)
    branch: int = 0
    rolling: Snapshot | None = None
    store_parent: tuple[bytes, int] | None = None
    stored_positions: list[int] | None = None
    sampler_key: int = 0
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
    def remaining(self) -> int:
        """Known tokens that are not yet computed."""
        return self.num_tokens - self.computed

    def append(self, token: int, logprob: float) -> None:
        """Take a sampled token."""
        self.tokens[self.num_tokens] = token
        self.num_tokens += 1
        if self.request.logprobs:
            self.logprobs.append(logprob)

    def result(self) -> Result:
        """The finished request's result."""
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
        )

    def failure(self, error: RequestError) -> Result:
        """The record of a request that could not be answered."""
        return failed(self.request, error)


def failed(request: Request, error: RequestError) -> Result:
    """The result of a request that ended in an error."""
    return Result(id=request.id, prompt_tokens=len(request.token_ids), error=error, tag=request.tag)


def make_sequence(request: Request, vocab_size: int, context_length: int | None) -> Sequence:
    """A checked sequence; RequestError (invalid_request, context_length_exceeded) where the request cannot run."""
    prompt = check_request(request, vocab_size, context_length)
    room = (
        request.max_tokens
        if context_length is None
        else min(request.max_tokens, context_length - len(prompt))
    )
    tokens = np.empty(len(prompt) + room, np.int32)
    tokens[: len(prompt)] = prompt
    sequence = Sequence(request, tokens, len(prompt), len(prompt))
    if request.temperature > 0:
        sequence.sampler_key = request_key(request.seed, request.id)
    if request.plan is not None:
        reads = dict.fromkeys(request.plan.keep_for_later, 0) | dict(
            zip(request.plan.keep, request.plan.reads, strict=True)
        )
        sequence.planned = dict(sorted(reads.items()))
    return sequence


def check_request(request: Request, vocab_size: int, context_length: int | None) -> TokenArray:
    """The prompt of a request that can run; RequestError says what is wrong with one that cannot."""

    def invalid(message: str) -> RequestError:
        return RequestError("invalid_request", message)

    try:
        prompt = as_token_array(request.token_ids)
    except (OverflowError, ValueError, TypeError):
        raise invalid(
            "token_ids hold something else than token ids; expected integers of the vocabulary"
        ) from None
    if not len(prompt):
        raise invalid("the prompt is empty; expected at least one token")
    if int(prompt.max()) >= vocab_size:
        raise invalid(
            f"token id {int(prompt.max())} is outside the vocabulary; expected less than {vocab_size}"
        )
    if request.max_tokens < 1:
        raise invalid(f"max_tokens is {request.max_tokens}; expected at least 1")
    if not 0 <= request.temperature < float("inf"):
        raise invalid(f"temperature is {request.temperature}; expected a number of at least 0")
    if not 0 < request.top_p <= 1:
        raise invalid(f"top_p is {request.top_p}; expected more than 0 and at most 1")
    if context_length is not None and len(prompt) + 1 > context_length:
        raise RequestError(
            "context_length_exceeded",
            f"the prompt has {len(prompt)} tokens and the model's context holds {context_length}, one of them for the "
            "answer; shorten the conversation",
        )
    return prompt
