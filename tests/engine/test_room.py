"""The ceiling of a request's tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from apcbatch.engine.engine import Engine
from apcbatch.engine.room import MAX_REQUEST_TOKENS, room_for_answer
from apcbatch.errors import RequestError
from apcbatch.types import Request
from tests.tiny import save_tiny


def test_the_answer_has_the_room_that_is_left() -> None:
    """Catches a bound that is off by one, and a context that does not end the answer."""
    assert room_for_answer(10, 7, None, 17) == 7
    assert room_for_answer(10, 7, 12, 17) == 2
    assert room_for_answer(10, 10**10, 12, 17) == 2
    assert room_for_answer(11, 1, 12, 17) == 1
    for arguments, words in (
        ((10, 8, None, 17), r"has 10 tokens and max_tokens is 8; together at most 17 .* --max-request-tokens"),
        ((10, 8, 18, 17), "together at most 17 are served"),
        ((12, 1, 12, 100), "has 12 tokens and the model's context holds 12"),
    ):
        with pytest.raises(RequestError, match=words) as caught:
            room_for_answer(*arguments)
        assert caught.value.code == "context_length_exceeded"


def test_one_request_never_stops_the_others(tmp_path: Path) -> None:
    """Catches `max_tokens` 10**10 on a model without a context limit: a MemoryError, and no request answered."""
    save_tiny(tmp_path, "mamba", 3, {})
    engine = Engine(tmp_path, policy="none")
    prompts = {"a": 4, "b": 10**10, "c": MAX_REQUEST_TOKENS, "d": 4}
    requests = [Request(id, [5, 6, 7], max_tokens=count) for id, count in prompts.items()]
    assert engine.can_run(Request("edge", [5, 6, 7], max_tokens=MAX_REQUEST_TOKENS - 3))
    results = {result.id: result for result in engine.run(requests)}
    engine.close()
    assert {id for id, result in results.items() if result.error is not None} == {"b", "c"}
    assert {results[id].error.code for id in "bc"} == {"context_length_exceeded"}
    assert len(results["a"].token_ids) <= 4
