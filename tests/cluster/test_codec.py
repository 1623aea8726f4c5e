"""What a worker's process says: every word arrives as it was, and nothing else is taken for one."""

from __future__ import annotations

import json
import math
import random

import pytest

from apcbatch.cluster.codec import Notice, decode, encode
from apcbatch.cluster.seam import WorkerFacts
from apcbatch.cluster.unit import Alive, Answer, Done, Made, Without
from apcbatch.errors import RequestError
from apcbatch.plan.footprint import Footprint
from apcbatch.types import Result, Scores

KEY = bytes(range(32))
FULL = Result(
    "id", 9, [1, 2], [-0.1, -math.inf], "stop", 4, 5, "disk", 8, 4, "below_grid", "a clause", 1.5, 2.5, None, None,
    [[(1, -0.1), (0, -math.inf)], []], "END", [Result("id", 9, [3], stop_reason=3)],
    Scores(1, [-1e-45, 0.1 + 0.2], [1, 7], [[(5, -2.0)]]),
)  # fmt: skip
FACTS = WorkerFacts(
    "ab", b"\0\xff", "here", "cpu", "float32", 2, Footprint(10, 3, 64), None, 97, frozenset({0, 5}), 1 << 20
)
WORDS = [
    Answer(1, 2, FULL), Answer(1, 2, Result("r", 3)), Made(1, KEY, 64, 100, "2-0"), Without(1, KEY), Alive(1, 4096),
    Done(1, 0.1, 3, 4, {"prefill_s": 0.25}), FACTS, Notice("a sentence", is_last=True),
]  # fmt: skip


@pytest.mark.parametrize("word", WORDS, ids=lambda word: type(word).__name__)
def test_a_word_arrives_as_it_was(word: object) -> None:
    """Catches a field that is lost, a rounded number, and a tuple that arrives as a list."""
    arrived = decode(encode(word))
    assert arrived == word and repr(arrived) == repr(word)


def test_an_error_arrives() -> None:
    """Catches an error record that arrives as an answer, or with another code."""
    error = RequestError("non_finite", "a sentence", 3)
    arrived = decode(encode(Answer(1, 2, Result("r", 3, error=error))))
    assert isinstance(arrived, Answer) and arrived.result.error is not None
    found = arrived.result.error
    assert (found.code, found.message, found.line) == ("non_finite", "a sentence", 3)


def test_what_is_no_word_is_refused() -> None:
    """Catches bytes that end the driver otherwise than by a ValueError, or that pass for a word."""
    strange = [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b"3",
        b'["os.system", {"command": "true"}]',
        b'["Done", {"unit": 1}]',
        b"[" * 9999,
    ]
    answer = json.loads(encode(WORDS[0]))
    answer[1]["result"]["error"] = ["no_such_code", "m", None]
    strange.append(json.dumps(answer).encode())
    source = random.Random(1)
    whole = encode(WORDS[0])
    for _ in range(200):
        strange.append(whole[: source.randrange(len(whole))])
    for data in strange:
        with pytest.raises(ValueError, match="nothing that a worker says"):
            decode(data)
