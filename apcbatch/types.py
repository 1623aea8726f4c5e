"""Request and Result: what goes into the engine and what comes out of it.

Must not know: text, files, tensors. Token ids are integers in any sequence (a list, a NumPy array).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from apcbatch.errors import RequestError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

CachedFrom = Literal["memory", "disk", "none"]
FinishReason = Literal["stop", "length"]
MissReason = Literal["cold", "diverged", "shorter_than_block", "evicted", "stranded", "disabled", "below_grid"]
Policy = Literal["planned", "all", "last", "none"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
MOST_ANSWERS = 128  # of one request
MOST_TOP_LOGPROBS = 20  # as OpenAI's API has it


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """What the prefix plan says about one request under policy `planned`.

    resume_at: the position whose snapshot it starts from (0: none); the request waits until that snapshot is there or
    can no longer come. keep: positions of its prompt, ascending, to keep for later requests of this run. reads: for
    each of them, how many requests will resume from it; after the last one it is released. keep_for_later: positions
    to keep for future runs. ideal: the longest prefix, at most prompt - 1 tokens, that a request before it in the plan
    covers; forked: where the prompt leaves all of them, one goes on with another token. live_bytes, keep_bytes: if
    requests run one by one in the plan's order, what this run's snapshots take when this request begins, and what its
    own add to that.
    """

    resume_at: int = 0
    keep: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    keep_for_later: tuple[int, ...] = ()
    ideal: int = 0
    live_bytes: int = 0
    keep_bytes: int = 0
    forked: bool = False


class Ending(Protocol):
    """Says whether one answer ends with a token, by what its tokens mean. Each answer has its own.

    For example stop texts: the engine knows no text, so whoever makes the request brings this.
    """

    def accept(self, token: int, may_end: bool) -> str | None:
        """Take the answer's next token; what the answer ends with, for Result.stop_reason, or None to go on.

        Called once for each token of the answer in order, but not for one that ends it anyway (a stop token). may_end:
        false for the tokens before min_tokens, with which no answer ends. Raises RequestError to fail the request.
        """


class Constraint(Protocol):
    """Says which tokens may come next in one answer, and follows it. Each answer has its own.

    For example a grammar: its mask is what xgrammar and llguidance fill.
    """

    def fill(self, mask: npt.NDArray[np.int32]) -> bool:
        """Write which tokens may come next, and return whether any may not (if false, the mask is not looked at).

        mask: (ceil(vocabulary / 32),) int32, C-contiguous, the same array in each call, with what the last one left.
        Bit i % 32 of word i // 32, from the least one, is token i: set if it may come. Bits beyond the vocabulary mean
        nothing. Raises RequestError to fail the request.
        """

    def accept(self, token: int) -> bool:
        """Take the answer's next token, whichever setting chose it; whether the answer is complete, so that it ends
        with this token as it does with a stop token. Raises RequestError to fail the request."""


@dataclass(slots=True)
class Request:
    """One generation to perform.

    token_ids: the prompt, one token or more. max_tokens: the limit of new tokens. ignore_eos: go on to max_tokens.
    logprobs: return the float32 log-probability of each chosen token, by the model's own logits; top_logprobs: and
    those of so many likeliest ones (0 to 20). keep_answer: keep snapshots of the answer too, for a next request that
    is built on it. plan: for policy `planned`. tag: anything; it comes back on the result.

    temperature: 0 is greedy; above 0, tokens are drawn, and the draw depends only on the seed, the name of the random
    stream, the answer's index and the position. random_stream: that name; the request's id if it is None, so requests
    with equal prompts, settings and names have equal answers. Tokens are drawn among the top_k likeliest (0 or -1:
    all), of these among those with at least min_p times the best one's probability (0: all), and of these among the
    fewest that have the probability top_p, in (0, 1].

    repetition_penalty: above 0; logits of tokens in prompt or answer are divided by it if positive and multiplied if
    not (1: none). presence_penalty, frequency_penalty: taken off the logit of each token of the answer, once, and for
    each time that it is there; negative ones favour it. logit_bias: added to the logits of these tokens; -infinity
    forbids one. allowed_token_ids: the only ones that may come, or None. min_tokens: the answer does not end before it
    has so many tokens. stop_token_ids: end the answer, besides the model's own; ignore_eos does not touch them.
    ending: makes what else ends it. constraint: makes what says which tokens may come next. Both are called once for
    each answer.

    n: how many answers there are to the one prompt; answer i draws from the stream `<name>\\0<i>`, the first (i = 0) as
    if it were alone; greedy ones are computed once. score_from: the first position of the prompt, from 1, whose token's
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
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    top_logprobs: int = 0
    ending: Callable[[], Ending] | None = None
    constraint: Callable[[], Constraint] | None = None
    n: int = 1
    score_from: int | None = None
    score_top: int = 0
    random_stream: str | None = None

    @property
    def changes_logits(self) -> bool:
        """Whether some of its settings change or mask the logits that tokens are chosen by."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
            or self.min_tokens > 0
            or bool(self.logit_bias)
            or self.allowed_token_ids is not None
            or self.constraint is not None
        )

    @property
    def needs_logits(self) -> bool:
        """Whether its next token, or what is told about it, takes more of the logits than the likeliest token: then
        they must be read before the next pass begins."""
        return self.temperature > 0 or self.top_logprobs > 0 or self.changes_logits

    @property
    def is_plain(self) -> bool:
        """Whether each token is the likeliest one, and only the model's own stop tokens and max_tokens end it."""
        return not (self.needs_logits or len(self.stop_token_ids) or self.ending)

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

    token_ids: the new tokens, the stop token included, and all tokens of a text that ended the answer. logprobs,
    top_logprobs: of each of them, if asked for; top_logprobs as (token, log-probability), the likeliest first, the
    lowest id on ties. stop_reason: what ended the answer if finish_reason is `stop`: an id of stop_token_ids, or what
    Ending returned; None for the model's own stop tokens and a complete Constraint. cached_tokens: prompt tokens whose
    state was restored; boundary is the same number, as the position that was resumed from. ideal_cached_tokens: the
    longest prefix, at most prompt_tokens - 1 tokens, that the store or an earlier prefill of this run covers; None if
    that is not known.
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
    top_logprobs: list[list[tuple[int, float]]] | None = None
    stop_reason: int | str | None = None
    others: list[Result] = field(default_factory=list)
    scores: Scores | None = None

    @property
    def answers(self) -> list[Result]:
        """All answers in order, this one first."""
        return [self, *self.others]
