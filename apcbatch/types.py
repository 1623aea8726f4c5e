"""Request and Result: what goes into the engine and what comes out of it.

Must not know: text, files, tensors. Token ids are integers in any sequence (a list, a NumPy array).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from apcbatch.errors import RequestError

CachedFrom = Literal["memory", "disk", "none"]
FinishReason = Literal["stop", "length"]
MissReason = Literal["cold", "diverged", "shorter_than_block", "evicted", "stranded", "disabled", "below_grid"]
Policy = Literal["planned", "all", "last", "none"]
POLICIES: tuple[Policy, ...] = get_args(Policy)


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """What the prefix plan says about one request under policy `planned`.

    resume_at: the position whose snapshot it starts from (0: none); the request waits until that snapshot is there or
    can no longer come. keep: positions of its prompt, ascending, to keep for later requests of this run. reads: for
    each of them, how many requests will resume from it; after the last one it is released. keep_for_later: positions
    to keep for future runs. ideal: the longest prefix, at most prompt - 1 tokens, that a request before it in the plan
    covers. live_bytes, keep_bytes: if requests run one by one in the plan's order, what this run's snapshots take when
    this request begins, and what its own add to that.
    """

    resume_at: int = 0
    keep: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    keep_for_later: tuple[int, ...] = ()
    ideal: int = 0
    live_bytes: int = 0
    keep_bytes: int = 0


@dataclass(slots=True)
class Request:
    """One generation to perform.

    token_ids: the prompt, one token or more. max_tokens: the limit of new tokens. temperature: 0 is greedy; above 0,
    tokens are drawn among the fewest that have the probability top_p, in (0, 1], and the draw depends only on the
    request's id, its seed and the position. ignore_eos: go on to max_tokens. logprobs: return the float32
    log-probability of each chosen token. keep_answer: keep snapshots of the answer too, for a next request that is
    built on it. plan: for policy `planned`. tag: anything; it comes back on the result.

    n: how many answers there are to the one prompt; answer i draws as a request with the id `<id>\\0<i>` would, the
    first one (i = 0) as if it were alone. score_from: the first position of the prompt, from 1, whose token's
    log-probability is wanted, and those of all after it; None for none, the prompt's length for no token. score_top:
    how many of the likeliest tokens come with each. max_tokens may be 0 where score_from is set.
    """

    id: str
    token_ids: Sequence[int]
    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    logprobs: bool = False
    keep_answer: bool = True
    plan: RequestPlan | None = None
    tag: Any = None
    n: int = 1
    score_from: int | None = None
    score_top: int = 0

    @property
    def resumable(self) -> int:
        """The longest prefix of the prompt that the request may resume from: what follows is computed."""
        whole = len(self.token_ids) - 1
        return whole if self.score_from is None else min(whole, self.score_from - 1)


@dataclass(slots=True)
class Scores:
    """What the model says of a prompt's tokens, from the position `begin` on; position 0 is the first token.

    logprobs: of each token after all before it, float32. ranks: its place among all tokens, the likeliest is 1, the
    lower id first on ties; so 1 is what greedy generation takes. top: the likeliest tokens and their log-probabilities,
    best first, as many as were asked for.
    """

    begin: int
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)


@dataclass(slots=True)
class Result:
    """The outcome of one request. Counts are exact: cached_tokens + computed_tokens == prompt_tokens.

    token_ids: the new tokens, the stop token included. cached_tokens: prompt tokens whose state was restored; boundary
    is the same number, as the position that was resumed from. ideal_cached_tokens: the longest prefix, at most
    prompt_tokens - 1 tokens, that the store or an earlier prefill of this run covers; None if that is not known.
    miss_reason: why cached_tokens is less than that, or `cold` if nothing was covered. miss_detail: the same as a
    clause with numbers. error: set if the request failed; then only id, prompt_tokens and tag mean anything beside it.
    others: the answers from the second on, each with its own tokens, log-probabilities and end; what they say of the
    prompt means nothing. decode_ms: of all answers. scores: of the prompt's tokens, if they were asked for.
    """

    id: str
    prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    finish_reason: FinishReason = "length"
    cached_tokens: int = 0
    computed_tokens: int = 0
    cached_from: CachedFrom = "none"
    ideal_cached_tokens: int | None = None
    boundary: int = 0
    miss_reason: MissReason | None = None
    miss_detail: str | None = None
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    error: RequestError | None = None
    tag: Any = None
    others: list[Result] = field(default_factory=list)
    scores: Scores | None = None

    @property
    def answers(self) -> list[Result]:
        """All answers in order, this one first."""
        return [self, *self.others]
