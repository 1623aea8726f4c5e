"""Request and Result: input and output of the engine.

Token ids are integers in any sequence (a list, a NumPy array).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, runtime_checkable

from apcbatch.errors import RequestError
from apcbatch.sampling import default_of

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from apcbatch.prefix import TokenArray

CachedFrom = Literal["memory", "disk", "none"]
FinishReason = Literal["stop", "length"]
MissReason = Literal["cold", "diverged", "shorter_than_block", "evicted", "stranded", "disabled", "below_grid"]
Policy = Literal["planned", "all", "last", "none"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
DraftSource = Literal["recorded", "previous", "siblings", "history", "lookup"]  # order: csrc/acceptance.h
DRAFT_SOURCES: tuple[DraftSource, ...] = get_args(DraftSource)


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """Decisions of the prefix plan for one request, under policy `planned`.

    resume_at: position whose snapshot it starts from (0: none). The request waits until that snapshot exists or can no
    longer be made. keep: ascending positions of its prompt to keep for later requests of this run. reads: for each of
    these positions, number of requests that will resume from it; the last of them releases the snapshot.
    keep_for_later: positions to keep for future runs. ideal: length of the longest prefix, at most prompt - 1 tokens,
    that an earlier request of the run covers. is_ideal_exact: False if it may be longer, since the bounded tree of
    earlier windows forgot some.

    live_bytes: bytes of the plan's snapshots that are in memory when this request begins, if requests run one by one in
    the plan's order. keep_bytes: bytes of the snapshots that this request adds to them.
    """

    resume_at: int = 0
    keep: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    keep_for_later: tuple[int, ...] = ()
    ideal: int = 0
    live_bytes: int = 0
    keep_bytes: int = 0
    is_ideal_exact: bool = True


class Ending(Protocol):
    """A stop condition that needs the text of the tokens, such as stop texts. Each answer has its own instance.

    The engine knows token ids only, so the creator of the request supplies the condition.
    """

    def accept(self, token: int, may_end: bool) -> str | None:
        """Process the answer's next token. Returns the stop reason, for Result.stop_reason, or None to continue.

        Called once for each token of the answer, in order, except for a stop token, which ends the answer anyway.
        may_end: False for the tokens before min_tokens, which cannot end the answer. Raises RequestError to fail the
        request.
        """


class Constraint(Protocol):
    """A constraint on the next token of one answer, such as a grammar. It advances with the answer; each answer has its
    own instance.

    The mask has the format of xgrammar and llguidance.
    """

    def fill(self, mask: npt.NDArray[np.int32]) -> bool:
        """Write the mask of allowed next tokens. Returns whether any token is forbidden; if not, the mask is ignored.

        mask: (ceil(vocabulary / 32),) int32, C-contiguous; the same array in each call, with its previous contents. Bit
        i % 32 of word i // 32, counted from the least significant one, is set if token i is allowed. Bits beyond the
        vocabulary are ignored. Raises RequestError to fail the request.
        """

    def accept(self, token: int) -> bool:
        """Process the answer's next token. Called for every token, stop tokens included. Returns whether the answer is
        complete.

        If it is, this token ends the answer like a stop token. Raises RequestError to fail the request.
        """


@runtime_checkable
class Forcing(Protocol):
    """A Constraint that can also tell which tokens must come next. The engine drafts them."""

    def forced(self) -> Sequence[int]:
        """Return the tokens of the text that must come next, as the tokenizer usually splits it; empty if the
        constraint forces no text. Must not advance the constraint or change what it allows. Called any number of times
        between `accept` and the next `fill`, or not at all. An exception counts as empty."""


@dataclass(slots=True)
class Request:
    """One generation to perform.

    token_ids: the prompt, at least one token. max_tokens: maximum number of new tokens. ignore_eos: do not end at the
    model's own stop tokens. logprobs: return the float32 log-probability of each sampled token under the model's own
    logits. processed_logprobs: under the distribution that was drawn from instead: after penalties, masks, temperature
    and restrictions, at temperature 0 after penalties and masks alone. top_logprobs: number of likeliest tokens whose
    log-probabilities are returned too (0 to 20). keep_answer:
    keep snapshots of the answer too, for a later request that extends it. plan: for policy `planned`. tag: any object;
    returned with the result.

    temperature: 0 is greedy; above 0, tokens are sampled, and the sample depends only on the seed, the random stream's
    name, the answer's index and the position. random_stream: the stream's name; None for the request's id. So requests
    with equal prompts, settings and names have equal answers. top_k, min_p and top_p restrict sampling, in this order.
    top_k: number of likeliest tokens to sample from (0 or -1: all). min_p: of these, keep tokens with at least min_p
    times the probability of the likeliest (0: all). top_p: of these, keep the smallest set of likeliest tokens with
    total probability of at least top_p, in (0, 1].

    repetition_penalty: above 0 (1: none); positive logits of tokens in the prompt or the answer are divided by it,
    negative ones multiplied by it. presence_penalty: subtracted once from the logit of each token in the answer.
    frequency_penalty: subtracted once for each occurrence of the token in the answer. Negative values of these two
    favour repetition. logit_bias: added to the logits of these tokens; -infinity forbids a token. allowed_token_ids:
    the only tokens allowed, or None. min_tokens: minimum number of tokens before the answer may end. stop_token_ids:
    tokens that end the answer besides the model's own; unaffected by ignore_eos. ending, constraint: factories of an
    Ending and a Constraint, each called once per answer.

    n: number of answers to the prompt. Answer i samples from the stream `<name>\\0<i>`, answer 0 from `<name>` itself.
    Greedy answers are computed once. score_from: position in the prompt, at least 1, of the first token to score; all
    later prompt tokens are scored too. The prompt's length: score no token, but return empty Scores; None: return no
    Scores. score_top: number of likeliest tokens returned for each scored token. max_tokens may be 0 if score_from is
    set.

    draft: whether a pass may verify several drafted tokens of the answer; this changes no token and no log-probability.
    references: draft source -> known answers to this request, (tokens,) int32 each, to draft from.
    """

    id: str
    token_ids: Sequence[int] | npt.NDArray[np.int32]
    max_tokens: int = default_of("max_tokens")
    temperature: float = default_of("temperature")
    top_p: float = default_of("top_p")
    seed: int = default_of("seed")
    ignore_eos: bool = default_of("ignore_eos")
    logprobs: bool = default_of("logprobs")
    keep_answer: bool = True
    plan: RequestPlan | None = None
    tag: Any = None
    top_k: int = default_of("top_k")
    min_p: float = default_of("min_p")
    presence_penalty: float = default_of("presence_penalty")
    frequency_penalty: float = default_of("frequency_penalty")
    repetition_penalty: float = default_of("repetition_penalty")
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = default_of("allowed_token_ids")
    min_tokens: int = default_of("min_tokens")
    stop_token_ids: Sequence[int] = default_of("stop_token_ids")
    top_logprobs: int = default_of("top_logprobs")
    ending: Callable[[], Ending] | None = None
    constraint: Callable[[], Constraint] | None = None
    n: int = default_of("n")
    score_from: int | None = None
    score_top: int = 0
    random_stream: str | None = None
    draft: bool = True
    references: Mapping[DraftSource, Sequence[TokenArray]] = field(default_factory=dict)
    processed_logprobs: bool = False

    @property
    def changes_logits(self) -> bool:
        """Whether any setting changes or masks the logits before sampling."""
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
        """Whether sampling or the result needs more of the logits than the likeliest token and its log-probability.

        If so, the host must read the logits before the next pass begins.
        """
        return self.temperature > 0 or self.top_logprobs > 0 or self.changes_logits

    @property
    def is_plain(self) -> bool:
        """Whether decoding is greedy and ends only with the model's own stop tokens or max_tokens."""
        return not (self.needs_logits or len(self.stop_token_ids) or self.ending)

    @property
    def resumable(self) -> int:
        """Length of the longest prefix of the prompt that may be restored; the rest must be computed."""
        whole = len(self.token_ids) - 1
        return whole if self.score_from is None else min(whole, self.score_from - 1)


@dataclass(slots=True)
class Scores:
    """Scores of a prompt's tokens from the position `begin` on; position 0 is the first token.

    logprobs: float32 log-probability of each token given all before it. ranks: rank of each token in the vocabulary; 1
    is the likeliest. On ties the lower id comes first, so rank 1 is the greedy choice. top: for each position, (token,
    log-probability) of the score_top likeliest tokens, best first.
    """

    begin: int
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)


@dataclass(slots=True)
class Result:
    """The outcome of one request. Invariant: cached_tokens + computed_tokens == prompt_tokens.

    token_ids: the new tokens, including the stop token or all tokens of a stop text. logprobs: log-probability of each
    new token, if requested. top_logprobs: for each new token, (token, log-probability) of the likeliest tokens at its
    position, best first, the lowest id first on ties. stop_reason: what ended the answer if finish_reason is `stop`: an
    id of stop_token_ids, or the text that Ending.accept returned; None for the model's own stop tokens and a complete
    Constraint. error: set if the request failed; then only id, prompt_tokens and tag are valid.

    cached_tokens: number of prompt tokens whose state was restored. boundary: the same number, as a position.
    ideal_cached_tokens: length of the longest prefix, at most prompt_tokens - 1 tokens, that the store or an earlier
    prefill of this run covers; None if unknown. ideal_is_bound: that prefix may be longer, since the bounded tree of
    what was computed forgot some. miss_reason: why cached_tokens is less than ideal_cached_tokens; `cold`
    if no prefix was covered, `disabled` if the policy keeps no snapshots; otherwise None. miss_detail: the reason as a
    clause with numbers.

    others: the second and later answers, each with its own tokens, log-probabilities, finish_reason and stop_reason;
    their fields about the prompt are not valid. scores: scores of the prompt's tokens, if requested. drafted_tokens:
    number of drafted tokens that passes verified. accepted_tokens: number of these that are in the answer. decode_ms,
    drafted_tokens and accepted_tokens are sums over all answers. running_s: wall seconds from the request's admission
    to its end.
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
    ideal_is_bound: bool = False
    boundary: int = 0
    miss_reason: MissReason | None = None
    miss_detail: str | None = None
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    running_s: float = 0.0
    error: RequestError | None = None
    tag: Any = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    stop_reason: int | str | None = None
    others: list[Result] = field(default_factory=list)
    scores: Scores | None = None
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def answers(self) -> list[Result]:
        """All answers in order, beginning with this one."""
        return [self, *self.others]
