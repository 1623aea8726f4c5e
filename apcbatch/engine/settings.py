"""What the settings of a request may be.

Must not know: tensors, sequences. Invariant: each setting of a request that passes can be used as it is.
"""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Mapping
from itertools import islice
from numbers import Integral, Real

from apcbatch.engine.room import room_for_answer
from apcbatch.errors import RequestError
from apcbatch.prefix import TokenArray, as_token_array
from apcbatch.types import MOST_ANSWERS, MOST_TOP_LOGPROBS, Request

LARGEST_NUMBER = (1 << 63) - 1  # of tokens
SEEDS = range(-(1 << 63), 1 << 64)  # signed and unsigned 64-bit numbers
LARGEST_PENALTY = 1e6  # as a factor or a summand it leaves a float32 logit finite


def invalid(message: str) -> RequestError:
    """An invalid_request error."""
    return RequestError("invalid_request", message)


def check_request(
    request: Request, vocab_size: int, context_length: int | None, max_request_tokens: int
) -> tuple[TokenArray, int]:
    """The prompt of a request that can run, and the most new tokens that it gets; RequestError says what is wrong with
    one that cannot."""

    try:
        prompt = as_token_array(request.token_ids)
    except (OverflowError, ValueError, TypeError):
        raise invalid("token_ids hold something else than token ids; expected integers of the vocabulary") from None
    if not len(prompt):
        raise invalid("the prompt is empty; expected at least one token")
    if int(prompt.max()) >= vocab_size:
        raise invalid(f"token id {int(prompt.max())} is outside the vocabulary; expected less than {vocab_size}")
    check_settings(request, vocab_size)
    return prompt, room_for_answer(len(prompt), request.max_tokens, context_length, max_request_tokens)


def check_settings(request: Request, vocab_size: int) -> None:
    """RequestError says which setting cannot be used, and what was expected."""
    least = 1 if request.score_from is None else 0
    if not _is_whole(request.max_tokens) or not least <= request.max_tokens <= LARGEST_NUMBER:
        raise invalid(
            f"max_tokens is {_shown(request.max_tokens)}; expected a whole number of at least {least}, "
            f"and at most {LARGEST_NUMBER}"
        )
    if not _is_whole(request.n) or not 1 <= request.n <= MOST_ANSWERS:
        raise invalid(f"n is {_shown(request.n)}; expected a whole number from 1 to {MOST_ANSWERS}")
    if not _is_whole(request.min_tokens) or request.min_tokens < 0:
        raise invalid(f"min_tokens is {_shown(request.min_tokens)}; expected a whole number of at least 0")
    if request.min_tokens > request.max_tokens:
        raise invalid(
            f"min_tokens is {_shown(request.min_tokens)} and max_tokens {_shown(request.max_tokens)}; "
            "expected no more than max_tokens"
        )
    if not _is_number(request.temperature) or not 0 <= request.temperature <= sys.float_info.max:
        raise invalid(f"temperature is {_shown(request.temperature)}; expected a number of at least 0")
    if not _is_whole(request.top_k) or request.top_k < -1:
        raise invalid(f"top_k is {_shown(request.top_k)}; expected a whole number of at least 1, or 0 or -1 for all")
    if not _is_number(request.min_p) or not 0 <= request.min_p <= 1:
        raise invalid(f"min_p is {_shown(request.min_p)}; expected a number from 0 to 1")
    if not _is_number(request.top_p) or not 0 < request.top_p <= 1:
        raise invalid(f"top_p is {_shown(request.top_p)}; expected more than 0 and at most 1")
    if not _is_whole(request.seed) or int(request.seed) not in SEEDS:
        raise invalid(f"seed is {_shown(request.seed)}; expected a whole number of 64 bits")
    _check_penalties(request)
    _check_tokens(request, vocab_size)
    if not _is_whole(request.top_logprobs) or not 0 <= request.top_logprobs <= MOST_TOP_LOGPROBS:
        raise invalid(
            f"top_logprobs is {_shown(request.top_logprobs)}; expected a whole number from 0 to {MOST_TOP_LOGPROBS}"
        )
    if request.top_logprobs and not request.logprobs:
        raise invalid(f"top_logprobs is {request.top_logprobs} without logprobs; set logprobs too")
    _check_scores(request)


def _check_scores(request: Request) -> None:
    first, end = request.score_from, len(request.token_ids)
    if first is not None and not (_is_whole(first) and 1 <= first <= end):
        raise invalid(f"score_from is {_shown(first)}; expected a position from 1 to {end}, the prompt's end")
    if not _is_whole(request.score_top) or not 0 <= request.score_top <= MOST_TOP_LOGPROBS:
        raise invalid(
            f"score_top is {_shown(request.score_top)}; expected a whole number from 0 to {MOST_TOP_LOGPROBS}"
        )
    if request.score_top and first is None:
        raise invalid(f"score_top is {request.score_top} without score_from; set score_from too")


def _check_penalties(request: Request) -> None:
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(request, name)
        if not _is_number(value) or not -LARGEST_PENALTY <= value <= LARGEST_PENALTY:
            raise invalid(f"{name} is {_shown(value)}; expected a number of at most {LARGEST_PENALTY:g} either way")
    value = request.repetition_penalty
    if not _is_number(value) or not 1 / LARGEST_PENALTY <= value <= LARGEST_PENALTY:
        raise invalid(
            f"repetition_penalty is {_shown(value)}; expected a number from {1 / LARGEST_PENALTY:g} "
            f"to {LARGEST_PENALTY:g}"
        )


def _check_tokens(request: Request, vocab_size: int) -> None:
    """The settings that name tokens."""
    bias = request.logit_bias
    if not isinstance(bias, Mapping) or not all(
        _is_whole(token) and _is_number(value) and not math.isnan(value) and value <= LARGEST_PENALTY
        for token, value in bias.items()
    ):
        raise invalid(
            f"logit_bias is {_shown(bias)}; expected token ids and for each one a number of at most {LARGEST_PENALTY:g}"
        )
    tokens = (("logit_bias", list(bias)), ("stop_token_ids", request.stop_token_ids))
    for name, token_ids in (*tokens, ("allowed_token_ids", request.allowed_token_ids)):
        if token_ids is None:
            continue
        try:
            ids = as_token_array(token_ids)
        except (OverflowError, ValueError, TypeError):
            raise invalid(f"{name} is {_shown(token_ids)}; expected integers of the vocabulary") from None
        if len(ids) and int(ids.max()) >= vocab_size:
            raise invalid(f"{name} has the token id {int(ids.max())}; expected less than {vocab_size}")
    if request.allowed_token_ids is not None and not len(request.allowed_token_ids):
        raise invalid("allowed_token_ids is empty; expected at least one token id, or None for all")


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _shown(value: object) -> str:
    """A value as a sentence shows it: never long, and no digits of a number that Python refuses to write."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, Mapping):
        return reprlib.repr(dict(islice(value.items(), 8)))
    return reprlib.repr(value)
