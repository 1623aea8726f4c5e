"""The sums of a run, to the last number of the summary and of the last sentence."""

from __future__ import annotations

import math
import resource
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from apcbatch.config import Config
from apcbatch.job.totals import ENGINE_COUNTS, ScoreTotals, Totals
from apcbatch.types import Result, Scores
from apcbatch.version import VERSION

SCORE_MEANS = ("mean_logprob", "perplexity", "greedy_match_share", "exact_match_share")
ENGINE: Any = SimpleNamespace(
    counters=SimpleNamespace(
        seconds={"prefill": 2.0, "decode": 0.5, "store": 0.25},
        unique_tokens=77,
        unique_tokens_is_bound=True,
        peak_device_bytes=5,
        peak_draft_bytes=6,
        drafts={"lookup": (8, 5), "history": (4, 0)},
        drafts_saved_s=1.25,
        decode_tokens=27,
        decode_chunks=18,
        **{name: 100 + number for number, name in enumerate(ENGINE_COUNTS)},
    ),
    dtype="bfloat16",
    device="cpu",
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the clock says, to be moved on by the test."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def result(prompt: int, cached: int, source: str, new: int, ideal: int | None, miss: str | None) -> Result:
    return Result(
        "r", prompt, [1] * new, cached_tokens=cached, computed_tokens=prompt - cached, cached_from=source,
        ideal_cached_tokens=ideal, miss_reason=miss,
    )  # fmt: skip


def test_the_summary_adds_up(clock: list[float]) -> None:
    """Catches a sum, a rate or a share of the summary that is taken from another number."""
    totals = Totals()
    clock[0] += 4
    totals.begin_running(already_done=6)
    clock[0] += 8
    totals.add(result(100, 80, "memory", 5, 90, "below_grid"))
    totals.add(result(60, 0, "none", 3, 0, "cold"))
    totals.add(result(50, 40, "disk", 4, 40, None))
    totals.add(result(40, 16, "memory", 1, 20, "below_grid"))
    for code in ("invalid_request", "duplicate_id"):
        totals.add_error(code)
    assert totals.answers.doubts({}) == {}, "there is no answer yet"
    totals.plan_s = 1.5
    choices = [{"finish_reason": "length", "message": {"content": ""}}, {"finish_reason": "stop", "text": "x"}]
    totals.answers.add({"response": {"body": {"choices": choices}}, "apcbatch": {"warning_kinds": ["tools"]}})
    odd = {"warning_kinds": [["tools"], "unknown", 5]}  # as a damaged OUT may have
    totals.answers.add({"response": {"body": {"choices": [5, {"finish_reason": []}], "usage": 5}}, "apcbatch": odd})
    assert totals.answers.doubts({"score": False}) == {"cut": 1, "empty": 1}
    assert totals.answers.doubts({"score": True}) == {}
    for warning in ("w", "v", "w"):
        totals.note_warning(warning)
    assert (totals.requests, totals.running_s, totals.hit_rate) == (6, 8.0, 136 / 250)
    summary = totals.summary(Config(block_size=32, policy="all", model="m"), ENGINE)
    assert 10 << 20 < summary.pop("peak_rss_bytes") <= 2 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert summary == {
        "requests": 6, "ok": 4, "errors": 2, "already_done": 6, "answers_without_line": 0,
        "restarted": 0, "idle_s": 0.0,
        "ignored_columns": {},
        "finish_reasons": {"length": 1, "stop": 1}, "empty_answers": 1, "unread_calls": 0,
        "answer_warnings": {"tools": 1},
        "errors_by_code": {"duplicate_id": 1, "invalid_request": 1},
        "workers": None, "prompt_tokens": 250, "cached_tokens": 136, "computed_tokens": 114, "unique_tokens": 77,
        "unique_tokens_is_bound": True, "ideal_is_bound": False,
        "completion_tokens": 13, "hit_rate": 136 / 250, "ideal_hit_rate": 150 / 250,
        "cached_by_source": {"memory": 96, "disk": 40}, "miss_reasons": {"below_grid": 2, "cold": 1},
        **{name: 100 + number for number, name in enumerate(ENGINE_COUNTS)},
        "drafts": {"history": {"drafted": 4, "accepted": 0}, "lookup": {"drafted": 8, "accepted": 5}},
        "tokens_per_pass": 1.5, "drafts_saved_s": 1.25,
        "score": None,
        "seconds": {"load": 4.0, "plan": 1.5, "prefill": 2.0, "decode": 0.5, "store": 0.25, "total": 12.0},
        "prefill_tokens_per_s": 111.5, "decode_tokens_per_s": 18.0,
        "peak_device_bytes": 5, "peak_draft_bytes": 6, "warnings": ["w", "v"],
        "block_size": 32, "policy": "all", "model": "m", "dtype": "bfloat16", "device": "cpu",
        "gpus": 1, "version": VERSION,
    }  # fmt: skip
    assert totals.sentence("out.jsonl") == (
        "6 requests (6 more answered before) in 12.0 s: 4 ok, 2 errors; 1 cut, 1 stop, 1 empty; 54.4 % of 250 "
        "prompt tokens restored; results in out.jsonl"
    )


def test_nothing_adds_up_to_nothing(clock: list[float]) -> None:
    """Catches a division by no tokens or no seconds, and a rate where nothing was measured."""
    totals = Totals()
    idle: Any = SimpleNamespace(**vars(ENGINE))
    idle.counters = SimpleNamespace(**vars(ENGINE.counters))
    idle.counters.seconds = {"prefill": 0.0, "decode": 0.0, "store": 0.0}
    idle.counters.drafts, idle.counters.decode_tokens, idle.counters.decode_chunks = {}, 0, 0
    summary = totals.summary(Config(), idle)
    assert (summary["requests"], summary["hit_rate"], summary["ideal_hit_rate"]) == (0, 0.0, 0.0)
    assert summary["prefill_tokens_per_s"] is None and summary["decode_tokens_per_s"] is None
    assert summary["cached_by_source"] == {"memory": 0, "disk": 0}
    assert summary["tokens_per_pass"] is None and summary["drafts"] == {}
    assert set(summary["seconds"].values()) == {0.0} and summary["warnings"] == []
    assert totals.sentence("-") == (
        "0 requests in 0.0 s: 0 ok, 0 errors; 0.0 % of 0 prompt tokens restored; results in standard output"
    )
    assert totals.sentence("+out.jsonl").endswith("; results in +out.jsonl"), "which sorts before a dash"
    totals.already_done, totals.prompt_tokens = 1234, 5678
    assert " (1,234 more answered" in totals.sentence("-") and " of 5,678 prompt" in totals.sentence("-")


def test_scores_add_up_exactly() -> None:
    """Catches a mean that is off by a rounding, and a share of other answers or tokens."""
    totals = ScoreTotals()
    nothing = {"answers": 0, "tokens": 0} | dict.fromkeys(SCORE_MEANS)
    assert totals.summary() == nothing
    totals.add(Scores(1, [0.0, -0.0], [1, 1]))
    assert totals.summary() == {"answers": 1, "tokens": 2} | dict(zip(SCORE_MEANS, (0.0, 1.0, 1.0, 1.0), strict=True))
    totals.add(Scores(1, [-1.5, -(2.0**-149)], [1, 2]))
    means = (-0.375, math.exp(0.375), 0.75, 0.5)
    assert totals.summary() == {"answers": 2, "tokens": 4} | dict(zip(SCORE_MEANS, means, strict=True))
    most = math.log(sys.float_info.max)
    for logprob, expected in ((-most, math.exp(most)), (-math.nextafter(most, math.inf), None)):
        totals = ScoreTotals()
        totals.add(Scores(1, [logprob], [1]))
        assert totals.summary()["perplexity"] == expected


def test_tokens_that_answers_share_are_decoded_once(clock: list[float]) -> None:
    """Fault: the rate of decoding counts the copies of one answer, the first token, or less than none."""
    totals, shared = Totals(), [1, 2, 3, 4]
    answers = [Result("r", 5, tokens) for tokens in (shared, shared, [5, 6, 7], [], [8])]
    totals.add(replace(answers[0], others=answers[1:]))
    summary = totals.summary(Config(), ENGINE)
    assert summary["completion_tokens"] == 12 and summary["decode_tokens_per_s"] == 5 / 0.5
    for ideal in (10, None, 10):
        totals.add(result(20, 10, "memory", 0, ideal, None))
    assert totals.summary(Config(), ENGINE)["ideal_hit_rate"] is None, "not known for one, not known for all"


def test_a_summary_holds_a_hundred_warnings() -> None:
    """Fault: a run of days holds a warning for each of its lines, or the summary drops one that there is room for."""
    totals = Totals()
    for number in range(150):
        totals.note_warning(f"line {number // 2}")
    assert totals.warnings == [f"line {number}" for number in range(75)]
    for number in range(150):
        totals.note_warning(f"line {number}")
    assert totals.warnings == [f"line {number}" for number in range(100)]
