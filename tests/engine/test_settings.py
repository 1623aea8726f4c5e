"""What the tokens and settings of a request may be, and the ceiling of its tokens: an answer or a sentence."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from apcbatch.engine.parts import EngineOptions
from apcbatch.engine.sequence import make_sequence
from apcbatch.engine.validation import MAX_REQUEST_TOKENS, room_for_answer
from apcbatch.errors import RequestError, UsageError
from apcbatch.types import Request
from tests.effort import table
from tests.engine.runs import by_id
from tests.tiny import VOCAB

PROMPT = [1, 2, 3]
NO_TOKENS = "token_ids hold something else than token ids"


def refused(token_ids: Any, **options: Any) -> str:
    """What is said of a request that cannot be used."""
    with pytest.raises(RequestError) as caught:
        make_sequence(Request("r", token_ids, **options), VOCAB, None)
    assert caught.value.code == "invalid_request" and len(caught.value.message) < 200
    return caught.value.message


@table("token_ids, sentence", [
    ([1.5, 2.0], NO_TOKENS), (["1", "2"], NO_TOKENS), ([True, False], NO_TOKENS), ([1, None], NO_TOKENS),
    ([[1], [2]], NO_TOKENS), ([[1], [2, 3]], NO_TOKENS), (7, NO_TOKENS), ([3, -1], NO_TOKENS), ([2**31], NO_TOKENS),
    ([2**70], NO_TOKENS), (np.array([1.0, 2.0]), NO_TOKENS), ([], "the prompt is empty"),
    ([1, VOCAB], f"token id {VOCAB} is outside the vocabulary; expected less than {VOCAB}"),
])  # fmt: skip
def test_a_prompt_of_anything_but_token_ids_is_refused(token_ids: Any, sentence: str) -> None:
    """Fault: token ids 1.5 and 2.0 were answered as 1 and 2."""
    assert sentence in refused(token_ids)


@table("field, value", [
    (field, value) for field, values in {
        "max_tokens": (0, -1, 1.5, "9", None, True, math.nan, 1 << 63, 10**5000),
        "temperature": (-1e-9, math.nan, math.inf, 10**400, 10**5000, "1", None, True),
        "top_p": (0, -0.1, 1.0001, math.nan, 10**400, "1", None),
        "top_k": (-2, 1.5), "min_p": (1.1, -0.1, math.nan), "min_tokens": (-1, 0.5),
        "seed": (1.5, "x", 1 << 64, 10**5000, None), "n": (0, -1, 129, 1.5, True, None),
        "repetition_penalty": (0.0, math.nan), "presence_penalty": (math.nan, 1e7), "frequency_penalty": ("1", -1e7),
        "logit_bias": ({1: math.nan}, {1: math.inf}), "stop_token_ids": ([-1],), "allowed_token_ids": ([1.5],),
        "top_logprobs": (21, -1), "score_from": (0, 4, True), "score_top": (21, -1),
    }.items() for value in values
])  # fmt: skip
def test_a_number_that_cannot_be_used_is_an_error_record(field: str, value: object) -> None:
    """Fault: a TypeError, OverflowError or ValueError out of the engine, which ends the job, for one request."""
    beside = {"logprobs": True, "score_from": 1} if field in ("top_logprobs", "score_top") else {}
    said = refused(PROMPT, **beside | {field: value})
    assert said.startswith(f"{field} is ") and "; expected " in said


@table("options, sentence", [
    ({"max_tokens": 0}, "max_tokens is 0; expected an integer from 1 to"),
    ({"max_tokens": -1, "score_from": 1}, "max_tokens is -1; expected an integer from 0 to"),
    ({"n": 129}, "n is 129; expected an integer from 1 to 128"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5 and max_tokens 4; expected no more"),
    ({"logit_bias": {VOCAB: 1.0}}, f"logit_bias has the token id {VOCAB}; expected less than {VOCAB}"),
    ({"logit_bias": dict.fromkeys(range(9, 0, -1), math.nan)}, "logit_bias is {2: nan, 3: nan, 4: nan, 5: nan, ...};"),
    ({"stop_token_ids": [-1]}, "stop_token_ids is [-1]; expected"),
    ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
    ({"top_logprobs": 2}, "top_logprobs is 2 without logprobs"),
    ({"score_from": 4}, "score_from is 4; expected a position from 1 to 3"),
    ({"score_from": 1, "score_top": 21}, "score_top is 21; expected an integer from 0 to 20"),
    ({"score_top": 2}, "score_top is 2 without score_from"),
    ({"draft": 1}, "draft is 1; expected True or False"),
    ({"references": {"recorder": []}}, "references is {'recorder': []}; expected lists of answers by source: recorded"),
    ({"references": []}, "references is []; expected lists of answers by source"),
    ({"references": {"previous": [[1], [VOCAB]]}}, f"references['previous'] has the token id {VOCAB}; expected less"),
    ({"references": {"previous": [[1], [-1]]}}, "references['previous'] holds something else than lists of token ids"),
    ({"references": {"recorded": [1]}}, "references['recorded'] holds something else than lists of token ids"),
])  # fmt: skip
def test_a_setting_that_is_refused_says_what_is_expected(options: dict[str, Any], sentence: str) -> None:
    """Fault: settings that exclude each other are taken, or a sentence names another bound than the one that holds."""
    assert sentence in refused(PROMPT, **options)


@table("field, value", [
    ("max_tokens", 1), ("temperature", 5e-324), ("temperature", 1.7e308), ("temperature", 3), ("top_p", 5e-324),
    ("top_p", 1), ("seed", -(1 << 63)), ("seed", (1 << 64) - 1), ("n", 128), ("top_k", -1), ("min_p", 1),
    ("repetition_penalty", 1e6), ("presence_penalty", -1e6), ("score_from", 2), ("logit_bias", {VOCAB - 1: -math.inf}),
    *(("token_ids", ids) for ids in ([96, 0], (96, 0), np.array([96, 0], np.uint64), np.array([96, 0], np.int8))),
])  # fmt: skip
def test_a_number_at_the_edge_is_taken(field: str, value: object) -> None:
    """Fault: a bound that is one too narrow, a sequence of integers that is refused or not made int32, and a caller's
    array that is written to."""
    sequence = make_sequence(Request("r", **{"token_ids": [96, 0], field: value}), VOCAB, None)  # type: ignore[arg-type]
    assert (sequence.num_prompt, sequence.tokens[:2].tolist(), sequence.tokens.dtype) == (2, [96, 0], np.int32)


@table("arguments, found", [
    ((10, 7, None, 17), 7), ((10, 7, 12, 17), 2), ((10, 10**10, 12, 17), 2), ((11, 1, 12, 17), 1),
    ((100, 0, 100, 1000), 0),
    ((10, 8, None, 17), r"has 10 tokens and max_tokens is 8; together at most 17 .* --max-request-tokens"),
    ((10, 8, 18, 17), "together at most 17 are served"),
    ((12, 1, 12, 100), "has 12 tokens and the model's context holds 12, one of them for the answer"),
    ((101, 0, 100, 1000), "has 101 tokens and the model's context holds 100; shorten"),
])  # fmt: skip
def test_the_answer_has_the_room_that_is_left(arguments: tuple[Any, ...], found: int | str) -> None:
    """Catches a bound that is off by one, a context that does not end the answer, a token of the context that is set
    aside for an answer that was not asked for, and a request that is begun although there is no room for it."""
    if isinstance(found, int):
        assert room_for_answer(*arguments) == found
        return
    with pytest.raises(RequestError, match=found) as caught:
        room_for_answer(*arguments)
    assert caught.value.code == "context_length_exceeded"


def test_one_request_never_stops_the_others(tiny_checkpoint, open_engine) -> None:
    """Catches `max_tokens` 10**10 on a model without a context limit: a MemoryError, and no request answered."""
    engine = open_engine(tiny_checkpoint("mamba"), policy="none")
    prompts = {"a": 4, "b": 10**10, "c": MAX_REQUEST_TOKENS, "d": 4}
    requests = [Request(id, [5, 6, 7], max_tokens=count) for id, count in prompts.items()]
    assert engine.can_run(Request("edge", [5, 6, 7], max_tokens=MAX_REQUEST_TOKENS - 3))
    results = by_id(engine.run(requests))
    codes = {id: result.error and result.error.code for id, result in results.items()}
    assert codes == {"a": None, "b": "context_length_exceeded", "c": "context_length_exceeded", "d": None}
    assert len(results["a"].token_ids) <= 4


@table("options, sentence", [
    ({"draft": "lookup"}, "draft is 'lookup'; expected a tuple with any of recorded, previous, siblings, history"),
    ({"draft": ("lookup", "auto")}, "draft is ('lookup', 'auto'); expected a tuple"),
    ({"draft_memory_bytes": -1}, "draft_memory_bytes is -1; expected an integer from 0"),
    ({"draft_memory_bytes": 1.5}, "draft_memory_bytes is 1.5; expected an integer from 0"),
])  # fmt: skip
def test_drafts_of_an_engine_are_checked(options: dict[str, Any], sentence: str) -> None:
    """Fault: a source of drafts that is not there is ignored, or a text is taken for its letters."""
    with pytest.raises(UsageError) as caught:
        EngineOptions(**options)
    assert sentence in str(caught.value)
