"""Choose the next token of each row of logits.

Invariant: a row's token and log-probability depend on that row alone and, at a temperature above 0, on (seed, random
stream, answer, step); never on other rows or on the order of steps.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence
from itertools import takewhile

import numpy as np
import numpy.typing as npt
import torch

from apcbatch.errors import RequestError
from apcbatch.kernels.backend import Backend
from apcbatch.model.host_copies import Fetch
from apcbatch.prefix import TokenArray, as_token_array
from apcbatch.types import Forcing, Request

NOT_FINITE = -1  # returned by the ops in place of a token
# unequal float32 logits differ by at least 2**-149: at this temperature and below, only the largest has weight
_COLDEST = 1e-200


def request_key(request: Request, answer: int = 0) -> int:
    """Return the 128-bit key of the random stream of one of a request's answers."""
    name = request.id if request.random_stream is None else request.random_stream
    if answer:
        name = f"{name}\x00{answer}"
    digest = hashlib.sha256(f"{request.seed}\x00{name}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:16], "little")


class GreedyTokens:
    """Likeliest tokens of rows of logits. tokens: (r,) int64 on the logits' device; logprobs: (r,) float32 or None. On
    a CUDA device the computation and the copies to the host may still be in progress."""

    def __init__(self, tokens: torch.Tensor, logprobs: torch.Tensor | None) -> None:
        self.tokens = tokens
        self._copies = [None if part is None else Fetch(part) for part in (tokens, logprobs)]

    def read(self) -> tuple[list[int], list[float] | None]:
        """Wait for the copies to the host. Return (tokens, logprobs)."""
        tokens, logprobs = (None if part is None else part.read().tolist() for part in self._copies)
        assert tokens is not None
        return tokens, logprobs


def greedy(ops: Backend, logits: torch.Tensor, with_logprobs: bool) -> GreedyTokens:
    """Return the likeliest token (the lowest id on ties) of each row of logits (r, vocabulary) float32, and its float32
    log-probability. The token is NOT_FINITE if a logit of the row is NaN or infinite. Log-probabilities take a second
    pass over the logits."""
    tokens, logprobs = ops.greedy(logits) if with_logprobs else (ops.argmax(logits), None)
    return GreedyTokens(tokens, logprobs)


Logits = npt.NDArray[np.float32]
Likely = list[tuple[int, float]]


def draw(
    row: Logits,
    temperature: float,
    top_k: int,
    min_p: float,
    top_p: float,
    key: int,
    step: int,
    num_top: int | None = None,
) -> tuple[int, tuple[float, Likely] | None]:
    """Draw one token from a row of logits (vocabulary,) float32. A logit of -infinity is never drawn. Return the token
    and, with num_top, its float32 log-probability in the restricted distribution beside (token, log-probability) of the
    num_top likeliest in it, the lowest id first on ties.

    The draw is inverse transform sampling over the tokens in descending order of probability, with one uniform number
    from Philox. key: key of the Philox generator, see request_key. step: its counter.

    The distribution is restricted in turn to: the top_k largest logits, the lowest ids on ties (0 or -1: all); of
    these, tokens with at least min_p times the largest probability (Nguyen et al., arXiv 2407.01082, equation 2); of
    these, the fewest tokens whose probabilities sum to top_p (Holtzman et al., "nucleus sampling", arXiv 1904.09751,
    section 3.1). The temperature is any number above 0: a very low one draws among the largest logits only, a very high
    one uniformly.
    """
    ids = _largest(row, top_k) if 0 < top_k < len(row) else None
    scaled = (row if ids is None else row[ids]).astype(np.float64) / max(temperature, _COLDEST)
    probabilities = np.exp(scaled - scaled.max())
    places = np.flatnonzero(probabilities >= min_p if min_p > 0 else probabilities > 0)  # the largest has 1
    probabilities = probabilities[places]
    ids = places if ids is None else ids[places]
    ascending = np.sort(probabilities)
    cumulative = np.cumsum(ascending[::-1])
    kept = int(np.searchsorted(cumulative, top_p * cumulative[-1])) + 1
    cumulative = cumulative[:kept]
    uniform = np.random.Generator(np.random.Philox(key=key, counter=step)).random()
    choice = min(int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right")), len(cumulative) - 1)
    value = ascending[-1 - choice]
    num_larger = len(ascending) - int(np.searchsorted(ascending, value, side="right"))
    token = int(ids[np.flatnonzero(probabilities == value)[choice - num_larger]])
    if num_top is None:
        return token, None
    best = np.argsort(-probabilities, kind="stable")[: min(num_top, kept)] if num_top else np.empty(0, np.intp)
    logprobs = np.log(np.append(probabilities[best], value) / cumulative[-1]).astype(np.float32).tolist()
    return token, (logprobs[-1], list(zip(ids[best].tolist(), logprobs[:-1], strict=True)))


def _largest(row: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.intp]:
    """Return the ids of the `count` largest logits of a row, in ascending order of id. Among equal logits, those with
    the lowest ids are taken."""
    least = np.partition(row, len(row) - count)[len(row) - count]
    above = np.flatnonzero(row > least)
    equal = np.flatnonzero(row == least)[: count - len(above)]
    return np.sort(np.concatenate((above, equal)))


def top_logprobs(row: npt.NDArray[np.float32], count: int) -> Likely:
    """Return (token id, float32 log-probability) of the `count` likeliest tokens of a row of logits (vocabulary,)
    float32, the likeliest first and on ties the lowest id first. Return all tokens if the vocabulary is smaller."""
    ids = _largest(row, min(count, len(row)))
    ids = ids[np.argsort(-row[ids], kind="stable")]
    shifted = row.astype(np.float64) - float(row[ids[0]])
    logprobs = (shifted[ids] - math.log(np.exp(shifted).sum())).astype(np.float32)
    return list(zip(ids.tolist(), logprobs.tolist(), strict=True))


_LARGEST = np.finfo(np.float32).max


class TokenCounts:
    """Distinct tokens and their counts: ids (n,) int64 and counts (n,) float32. Adding a token is amortised O(1).

    token_ids: initial tokens; each distinct one counts once. They come first, in ascending order; added tokens follow
    in order of first occurrence.
    """

    def __init__(self, token_ids: TokenArray | None = None) -> None:
        first = np.empty(0, np.int64) if token_ids is None else np.unique(token_ids).astype(np.int64)
        self._ids, self._counts = first, np.ones(len(first), np.float32)
        self._places = {int(token): place for place, token in enumerate(first)}

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """The distinct tokens."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """Count of each of `ids`."""
        return self._counts[: len(self._places)]

    def add(self, token: int) -> None:
        """Count a token once more."""
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids):
            room = max(64, len(self._ids))
            self._ids = np.concatenate((self._ids, np.empty(room, np.int64)))
            self._counts = np.concatenate((self._counts, np.zeros(room, np.float32)))
        self._ids[place] = token
        self._counts[place] += 1


class LogitsProcessors:
    """Settings of one answer that change or mask logits, and the token counts that they depend on.

    ending_ids: tokens that end an answer; ids outside the vocabulary are ignored.
    """

    def __init__(self, request: Request, prompt: TokenArray, vocab_size: int, ending_ids: Collection[int]) -> None:
        self._request = request
        self._bias_ids = np.array(list(request.logit_bias), np.int64)
        with np.errstate(over="ignore"):  # below float32's range: -infinity, which forbids a token
            self._bias = np.array(list(request.logit_bias.values()), np.float64).astype(np.float32)
        self._seen = TokenCounts(prompt) if request.repetition_penalty != 1 else None
        self._answer = TokenCounts() if request.presence_penalty or request.frequency_penalty else None
        self._ending_ids = np.array([one for one in ending_ids if 0 <= one < vocab_size], np.int64)
        self._allowed = None
        if request.allowed_token_ids is not None:
            self._allowed = as_token_array(request.allowed_token_ids).astype(np.int64)
        self._constraint = request.constraint() if request.constraint else None
        self._forcing = self._constraint if isinstance(self._constraint, Forcing) else None
        self._vocab_size = vocab_size
        self._mask = np.zeros(-(-vocab_size // 32) if self._constraint else 0, np.int32)

    def apply(self, row: Logits, step: int) -> None:
        """Apply the settings in place to a row of finite logits (vocabulary,) float32. step: number of tokens that the
        answer has.

        Raises RequestError if no token is left.
        """
        row[self._bias_ids] += self._bias
        if self._seen is not None:
            self._penalise_repetition(row, self._seen.ids)
        if self._answer is not None:
            ids, counts = self._answer.ids, self._answer.counts
            row[ids] -= np.float32(self._request.frequency_penalty) * counts
            row[ids] -= np.float32(self._request.presence_penalty)
        if step < self._request.min_tokens:
            row[self._ending_ids] = -np.inf
        if self._allowed is not None:
            _mask_others(row, self._allowed)
        if self._constraint is not None and self._constraint.fill(self._mask):
            forbidden = np.unpackbits((~self._mask).view(np.uint8), count=len(row), bitorder="little")
            np.copyto(row, -np.inf, where=forbidden.view(np.bool_))
        if row.max() == -np.inf:
            raise RequestError(
                "invalid_request",
                f"no token may come after {step} tokens of the answer: the request's settings forbid all of them "
                "together (logit_bias, allowed_token_ids, min_tokens, the form of the answer)",
            )

    def accept(self, token: int) -> bool:
        """Count the sampled token, and return whether the constraint is complete with it. Raises RequestError."""
        if self._seen is not None:
            self._seen.add(token)
        if self._answer is not None:
            self._answer.add(token)
        return self._constraint is not None and self._constraint.accept(token)

    def forced(self) -> Sequence[int]:
        """Return the tokens that the constraint forces next, up to the first one outside the vocabulary. Empty if
        the constraint raises, since a draft is optional."""
        if self._forcing is None:
            return ()
        try:
            tokens = [int(token) for token in self._forcing.forced()]
        except Exception:  # the constraint belongs to the request
            return ()
        return list(takewhile(lambda token: 0 <= token < self._vocab_size, tokens))

    def _penalise_repetition(self, row: Logits, ids: npt.NDArray[np.int64]) -> None:
        penalty = np.float32(self._request.repetition_penalty)
        logits = row[ids]
        with np.errstate(over="ignore"):
            logits = np.where(logits < 0, logits * penalty, logits / penalty)
        row[ids] = np.minimum(logits, _LARGEST)


def _mask_others(row: Logits, ids: npt.NDArray[np.int64]) -> None:
    """Mask all tokens of a row except these."""
    kept = row[ids]
    row.fill(-np.inf)
    row[ids] = kept


class Sampler:
    """Sampler of one answer. eos_token_ids: the model's own stop tokens. answer: index among those of the request.
    processed: log-probability of the latest token in the distribution that it was drawn from, and those of its
    top_logprobs likeliest tokens; at temperature 0, after penalties and masks alone. None unless asked for."""

    def __init__(
        self, request: Request, prompt: TokenArray, vocab_size: int, eos_token_ids: Collection[int], answer: int
    ) -> None:
        self._request, self._key = request, request_key(request, answer)
        self._stop_ids = frozenset(int(token) for token in request.stop_token_ids)
        self._eos_ids = frozenset() if request.ignore_eos else frozenset(eos_token_ids)
        self._ending = request.ending() if request.ending else None
        ending_ids = self._stop_ids | self._eos_ids
        self._processors = LogitsProcessors(request, prompt, vocab_size, ending_ids) if request.changes_logits else None
        self.processed: tuple[float, Likely] | None = None

    def sample(self, row: Logits, step: int) -> int:
        """Return the answer's next token. row: logits (vocabulary,) float32, not changed. step: number of tokens that
        the answer has. At temperature 0, return the largest logit's id, the lowest id on ties. Raises RequestError if
        no token is allowed."""
        request = self._request
        if self._processors is not None:
            row = row.copy()
            self._processors.apply(row, step)
        num_top = request.top_logprobs if request.logprobs and request.processed_logprobs else None
        if request.temperature > 0:
            settings = request.temperature, request.top_k, request.min_p, request.top_p
            token, self.processed = draw(row, *settings, self._key, step, num_top)
            return token
        if num_top is not None:
            [(_, logprob), *_] = likely = top_logprobs(row, max(1, num_top))
            self.processed = logprob, [one for one in likely[:num_top] if one[1] > -math.inf]
        return int(np.argmax(row))

    def forced(self) -> Sequence[int]:
        """Return the tokens of the text that the request's constraint forces next; empty for none. Use them as a draft
        only: the model may tokenise the same text in another way."""
        return self._processors.forced() if self._processors is not None else ()

    def ends_with(self, token: int, step: int) -> tuple[bool, int | str | None]:
        """Record the sampled token. step: number of tokens before it in the answer. Return whether the answer ends with
        this token, and its stop_reason. Raises RequestError."""
        complete = self._processors is not None and self._processors.accept(token)
        if token in self._eos_ids:
            return True, None
        if token in self._stop_ids:
            return True, token
        reason = self._ending.accept(token, step >= self._request.min_tokens) if self._ending is not None else None
        return complete or reason is not None, reason
