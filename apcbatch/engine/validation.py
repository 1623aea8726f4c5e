"""Validate a request: its prompt, its settings, its length. Invariant: a valid request's settings need no further
check."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice

from apcbatch.config import Config
from apcbatch.errors import RequestError
from apcbatch.prefix import TokenArray, as_token_array
from apcbatch.sampling import LARGEST_PENALTY, SETTINGS, Bounds
from apcbatch.types import DRAFT_SOURCES, Request

_BOUNDS = {
    name: bounds
    for name, row in SETTINGS.items()
    if row.in_request and (bounds := row.engine_bounds or row.bounds) is not None
}
_BOUNDS["score_top"] = _BOUNDS["top_logprobs"]


def invalid(message: str) -> RequestError:
    """Return an invalid_request error."""
    return RequestError("invalid_request", message)


def check_request(
    request: Request, vocab_size: int, context_length: int | None, max_request_tokens: int
) -> tuple[TokenArray, int]:
    """Return the token ids of a valid request's prompt, and the most new tokens it may have. Raises RequestError with
    the reason. Drafts are checked by `check_drafts`."""

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
    """Raise RequestError for an invalid setting, with its name and the expected values."""
    for name, bounds in _BOUNDS.items():
        if name == "max_tokens" and request.score_from is not None:
            bounds = replace(bounds, least=0)
        value = getattr(request, name)
        if value not in bounds:
            raise invalid(f"{name} is {_shown(value)}; expected {bounds}")
    if request.min_tokens > request.max_tokens:
        raise invalid(
            f"min_tokens is {_shown(request.min_tokens)} and max_tokens {_shown(request.max_tokens)}; "
            "expected no more than max_tokens"
        )
    if request.top_logprobs and not request.logprobs:
        raise invalid(f"top_logprobs is {request.top_logprobs} without logprobs; set logprobs too")
    first, end = request.score_from, len(request.token_ids)
    if first is not None and first not in Bounds(int, 1, end):
        raise invalid(f"score_from is {_shown(first)}; expected a position from 1 to {end}, the prompt's end")
    if request.score_top and first is None:
        raise invalid(f"score_top is {request.score_top} without score_from; set score_from too")
    _check_tokens(request, vocab_size)


def check_drafts(request: Request, vocab_size: int) -> None:
    """Check `draft` and `references`. A token outside the vocabulary would fail the pass that verifies it."""
    if not isinstance(request.draft, bool):
        raise invalid(f"draft is {_shown(request.draft)}; expected True or False")
    if not isinstance(request.references, Mapping) or not request.references.keys() <= set(DRAFT_SOURCES):
        sources = ", ".join(DRAFT_SOURCES)
        raise invalid(f"references is {_shown(request.references)}; expected lists of answers by source: {sources}")
    for source, answers in request.references.items():
        try:
            highest = max((int(ids.max()) for ids in map(as_token_array, answers) if len(ids)), default=0)
        except (OverflowError, ValueError, TypeError):
            raise invalid(f"references[{source!r}] holds something else than lists of token ids") from None
        if highest >= vocab_size:
            raise invalid(f"references[{source!r}] has the token id {highest}; expected less than {vocab_size}")


def _check_tokens(request: Request, vocab_size: int) -> None:
    """Check the settings that are token ids."""
    bias = request.logit_bias
    if not isinstance(bias, Mapping) or not all(
        token in Bounds(int) and value in Bounds(float, most=LARGEST_PENALTY) for token, value in bias.items()
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


def _shown(value: object) -> str:
    """Return a value for an error sentence: abbreviated, without digits that Python refuses to convert."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, Mapping):
        return reprlib.repr(dict(islice(value.items(), 8)))
    return reprlib.repr(value)


MAX_REQUEST_TOKENS = Config.max_request_tokens


def room_for_answer(num_prompt: int, max_tokens: int, context_length: int | None, max_request_tokens: int) -> int:
    """Return the most new tokens. Raises RequestError context_length_exceeded if the prompt leaves none.

    context_length: the model's own limit, at which an answer ends, or None. max_request_tokens: limit of prompt and
    answer of any request.
    """
    room = max_tokens
    if context_length is not None:
        if num_prompt + min(1, max_tokens) > context_length:
            answer = ", one of them for the answer" if max_tokens else ""
            raise RequestError(
                "context_length_exceeded",
                f"the prompt has {num_prompt} tokens and the model's context holds {context_length}{answer}; "
                "shorten the conversation",
            )
        room = min(room, context_length - num_prompt)
    if num_prompt + room > max_request_tokens:
        raise RequestError(
            "context_length_exceeded",
            f"the prompt has {num_prompt} tokens and max_tokens is {max_tokens}; together at most "
            f"{max_request_tokens} are served: lower one of them, or raise --max-request-tokens",
        )
    return room
