"""Windows of a run: what is read ahead is bounded, and what they restore is what a forecast says."""

from __future__ import annotations

import gc
import itertools
import json
import operator
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from apcbatch.cli.program import main
from apcbatch.config import Config
from apcbatch.data.input.inputs import find_inputs
from apcbatch.data.output.parser import OutputParser
from apcbatch.job import planning
from apcbatch.job.record import Ticket
from apcbatch.job.work import Tag
from apcbatch.plan import windows
from apcbatch.plan.footprint import Footprint
from apcbatch.plan.windows import Windows
from apcbatch.resolution import load
from apcbatch.tuning.forecast import Forecaster
from apcbatch.tuning.prediction import of_run
from apcbatch.tuning.survey import survey
from apcbatch.types import Request
from tests.chats import conversation, forked_lines, read_records, write_lines
from tests.effort import table
from tests.job.conftest import answers
from tests.job.fakes import FakeEngine
from tests.tuning.forecasts import Seen


def requests(*conversations: tuple[int, ...]) -> list[Request]:
    """A line for each tuple of prompt lengths, whose prompts are views of one array."""
    made = []
    for line, lengths in enumerate(conversations, start=1):
        whole = np.zeros(max(lengths), np.int32)
        for turn, length in enumerate(lengths, start=1):
            ticket = Ticket(len(made), line, turn, f"c-{line}#{turn}", f"c-{line}")
            made.append(Request(ticket.request_id, whole[:length], tag=Tag(ticket, None)))
    return made


class Source:
    """A feeder of these requests."""

    def __init__(self, work: list[Request]) -> None:
        self.work = work

    @property
    def exhausted(self) -> bool:
        return not self.work

    def next(self) -> Request | None:
        return self.work.pop(0) if self.work else None

    def opening(self) -> str:
        return "what was read"

    def follow_up(self, result: Any) -> list[Any]:
        return [result]


def engine_of(**facts: Any) -> Any:
    """What a planned feeder asks of an engine; request 1 is refused."""
    asked = {"can_run": lambda request: request.id != "apc-000001", "key_fingerprint": b"k", "held": lambda keys: set()}
    return SimpleNamespace(**{"num_unfinished": 0, "footprint": Footprint(7, 1), "device": "cpu", **asked, **facts})


def test_reading_pauses_after_each_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: workers idle while the next window is read, more is read at once than the engine's last step took, a
    window is planned before the last one is handed out, or the first request of the last window is lost."""
    clock = itertools.count()
    monkeypatch.setattr(planning.time, "perf_counter", lambda: float(next(clock)))
    engine: Any = engine_of(num_unfinished=1)
    source = Source(requests((3,), (3,), (4,), (3,)))
    feeder: Any = planning.PlannedFeeder(Config(window_tokens=1), source, engine)
    engine.num_unfinished = 0
    assert not feeder.pause(), "nothing to compute meanwhile"
    assert (feeder.next().id, feeder.next().id) == ("apc-000001", "apc-000000"), "a refused one comes first"
    left = len(source.work)
    engine.num_unfinished = 1
    assert feeder.pause() and len(source.work) == left, "the engine runs first"
    while feeder.pause():
        left -= 1
        assert len(source.work) == left, "as long as a step: one tick"
    found = feeder.next()
    assert (found.id, found.plan is not None, list(found.token_ids)) == ("apc-000002", True, [0] * 4)
    engine.num_unfinished = 0
    assert (feeder.exhausted, feeder.next().id, feeder.exhausted, feeder.next()) == (False, "apc-000003", True, None)
    assert feeder.num_open_rollouts == 0 and feeder.plan_s > 0 and feeder.follow_up("result") == ["result"]


@pytest.mark.slow
def test_what_waits_is_compact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: each of 100,000 short requests that wait for their turn holds its settings, names and parser in objects of
    its own, 1.9 KB in all, and until the last one of its window is answered."""
    count = 1000

    class Lines(Source):
        def next(self) -> Request | None:
            if not self.work:
                return None
            number, line = self.work.pop(), count - len(self.work)
            digest = f"{number:032x}"
            ticket = Ticket(line, line, 1, f"l-{number}#1", f"l-{number}", False, digest, digest[::-1])
            tokens = np.concatenate([np.arange(100), [1000 + number], np.arange(20)]).astype(np.int32)
            return Request(ticket.request_id, tokens, tag=Tag(ticket, None, OutputParser()), random_stream="[1]")

    def held() -> float:
        gc.collect()
        return (tracemalloc.get_traced_memory()[0] - before) / count

    monkeypatch.setattr(windows, "FIRST_TOKENS", 1 << 40)
    engine = engine_of(can_run=lambda request: True)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    feeder: Any = planning.PlannedFeeder(Config(), Lines(list(range(count))), engine)  # type: ignore[arg-type]
    given = feeder.next()
    assert held() < 900
    for _ in range(count - 10):
        given = feeder.next()
    ticket = given.tag.ticket
    assert (given.id, given.random_stream, ticket.custom_id) == (ticket.request_id, None, f"{ticket.conversation}#1")
    assert held() < 400, "little but the tree of prompts"
    tracemalloc.stop()


@table("store, reserved", [("s", Footprint(7, 1).pool_bytes(198)), (None, 0)])
def test_a_plan_leaves_room_for_the_largest_stored_snapshot(
    store: str | None, reserved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a snapshot that is read from the store evicts one that the plan counts on; or a store is asked for that
    is not there."""
    kept: list[int] = []
    plan = planning.planner_for
    monkeypatch.setattr(
        planning, "planner_for", lambda *given, reserved_bytes: kept.append(reserved_bytes) or plan(*given)
    )
    engine = engine_of(held=lambda keys: keys, can_run=lambda request: True)
    feeder: Any = planning.PlannedFeeder(Config(store=store, block_size=2), Source(requests((5,), (200,))), engine)
    assert feeder.next().plan.resume_at == (4 if store else 0) and kept == [reserved]


@pytest.mark.drawn(1)
@pytest.mark.slow
@pytest.mark.parametrize(("order", "turns"), [("auto", 1), ("file", 1), ("auto", 3)])
def test_what_windows_restore_is_what_is_planned_and_the_ideal_is_that_of_all(
    order: str, turns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a run that ends its windows elsewhere than its plan, a shared prefix that each window computes anew, and
    an ideal or unique tokens that forget what earlier windows had."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("APCBATCH_POLICY", "planned")
    lines = forked_lines(150, systems=6, shuffled=True) if turns == 1 else [conversation(i, turns) for i in range(40)]
    write_lines(tmp_path / "in.jsonl", lines)
    common = ["in.jsonl", "--order", order, "--window-tokens", "4000"]
    assert main(["plan", *common, "--json", "plan.json"]) == 0
    capsys.readouterr()
    assert main(["run", *common, "-o", "out.jsonl", "--max-tokens", "1", "--max-running", "8", "-q"]) == 0
    printed = capsys.readouterr()
    summary, document = json.loads(printed.out), json.loads(Path("plan.json").read_text())
    config = load({"order": order, "window_tokens": "4000"}, None, {})
    seen, read = Seen(), []
    add = Forecaster.add
    monkeypatch.setattr(Forecaster, "add", lambda made, *given: (read.append(given[:3]), add(made, *given)))
    made = of_run(config, [64], seen)  # type: ignore[arg-type]
    forecast = survey(config, find_inputs(["in.jsonl"]), made, pytest.fail).forecast
    assert forecast.num_windows > 3
    records = read_records(tmp_path / "out.jsonl")
    in_order = sorted(records, key=lambda record: record["id"])
    resumed = [record["apcbatch"]["cached_tokens"] for record in in_order]
    served = seen.requests["planned", 64]
    assert resumed == seen.resume_at("planned", 64)
    prompts = [tuple(tokens.tolist()) for tokens, _, _ in read]
    named = dict(zip((record["custom_id"] for record in in_order), prompts, strict=True))
    seen_before: set[tuple[int, ...]] = {()}
    ideal = 0
    for record in (in_order[one.index] for one in served):
        prompt = named[record["custom_id"]]
        ideal += max(end for end in range(len(prompt)) if prompt[:end] in seen_before)
        seen_before.update(prompt[:end] for end in range(len(prompt) + 1))
    inner, ordered = {prompt[:end] for prompt in prompts for end in range(len(prompt))}, sorted(prompts)
    whole = sum(prompt in inner for prompt in ordered) + sum(map(operator.eq, ordered, ordered[1:]))
    unique = len(seen_before) - 1
    assert summary["unique_tokens"] == unique
    assert sum(record["apcbatch"]["ideal_cached_tokens"] for record in records) == ideal
    candidate = next(one for one in document["candidates"] if one["block_size"] == 64)
    for name in ("cached_tokens", "computed_tokens", "snapshots_written", "snapshots_read"):
        assert candidate[name] == summary[name], name
    for name in ("prompt_tokens", "unique_tokens", "ideal_hit_rate", "unique_tokens_is_bound", "ideal_is_bound"):
        assert document["dataset"][name] == summary[name], name
    assert summary["ideal_is_bound"] is summary["unique_tokens_is_bound"] is False
    cut, sizes = Windows[None](4000), list[int]()
    for tokens, line, resumable in read:
        cut.add(None, line, tokens, resumable)
        while cut.is_complete:
            sizes.append(cut.take().num_requests)
    third = sum(sizes[:2])
    reuse = [record["apcbatch"] for record in in_order[third:]]
    beyond = sum(one["ideal_cached_tokens"] - one["cached_tokens"] for one in reuse)
    assert (f"would have restored up to {beyond:,} tokens more" in printed.err) == (beyond > 0)
    main(["run", *common[:-1], "100000", "-o", "one.jsonl", "--max-tokens", "1", "-q"])
    printed = capsys.readouterr()
    assert json.loads(printed.out)["computed_tokens"] <= unique + whole and "--window-tokens" not in printed.err
    assert answers(read_records(tmp_path / "one.jsonl")) == answers(records)


def test_a_request_beyond_the_ceiling_is_an_error_record_and_the_others_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches one line whose max_tokens takes all memory, and a plan that counts it."""
    monkeypatch.chdir(tmp_path)
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4000}
    lines = [conversation(number, turns=2) for number in range(3)]
    lines.insert(1, {"custom_id": "b", "method": "POST", "url": "/v1/chat/completions", "body": body})
    write_lines(tmp_path / "in.jsonl", lines)
    for policy in ("planned", "all"):
        options = ["-q", "--max-tokens", "2", "--policy", policy, "--overwrite"]
        assert main(["run", "in.jsonl", "-o", "out.jsonl", *options, "--max-request-tokens", "2000"]) == 3
        failed = [record for record in read_records(tmp_path / "out.jsonl") if record["error"] is not None]
        assert [record["line"] for record in failed] == [2]
        error = failed[0]["error"]
        assert error["code"] == "context_length_exceeded" and error["retryable"] is False
        assert "max_tokens is 4000; together at most 2000 are served" in error["message"]
        assert "--max-request-tokens" in error["message"]
    capsys.readouterr()
    options = ["--max-tokens", "2", "--max-request-tokens", "2000", "--json", "-"]
    assert main(["plan", "in.jsonl", *options]) == 0
    assert json.loads(capsys.readouterr().out)["dataset"]["requests"] == 6


def test_an_engine_begins_before_the_next_window_is_read(apcbatch, engines, tmp_path, monkeypatch) -> None:
    """Catches workers of a cluster, which takes requests as they come, that wait until the whole input is planned."""
    monkeypatch.setenv("APCBATCH_POLICY", "planned")
    hungry = {
        "wants_more": property(lambda self: True),
        "can_run": lambda self, request: True,
        "held": lambda self, keys: set(),
        "add_readers": lambda self, key, count: None,
        "footprint": Footprint(1),
        "key_fingerprint": b"k",
    }
    for name, value in hungry.items():
        monkeypatch.setattr(FakeEngine, name, value, raising=False)
    write_lines(tmp_path / "in.jsonl", [conversation(number) for number in range(12)])
    done = apcbatch("run", "in.jsonl", "-o", "out.jsonl", "--window-tokens", 1)
    assert done.code == 0
    num_requests = len(read_records(tmp_path / "out.jsonl"))
    assert num_requests >= 12 and engines[0].most_waiting <= num_requests / 6
    assert done.summary["seconds"]["plan"] > 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--turns", "each"), "3 conversations, 6 requests: each recorded turn; --turns last asks for 3\n"),
        (("--turns", "last"), "3 conversations, 3 requests\n"),
        (("--turns", "rollout"), "3 conversations, 6 requests: each turn, after the answers to those before it\n"),
        (("--turns", "each", "--limit", "1"), "1 conversation, 1 request\n"),
    ],
)
def test_a_run_opens_with_what_it_is_asked(apcbatch: Any, options: tuple[str, ...], sentence: str) -> None:
    """Fault: a log whose lines have the whole history each is answered turn by turn without a word."""
    write_lines(Path("chats.jsonl"), [conversation(1, turns) | {"id": f"c-{turns}"} for turns in (1, 2, 3)])
    assert sentence in apcbatch("run", "chats.jsonl", "-o", "out.jsonl", *options).stderr


@table(
    "lines, sentence",
    [
        ([conversation(1, 1), {}], "1 conversation, 2 requests\n"),
        ([conversation(1, 2), {}], "1 conversation, 3 requests: each recorded turn; --turns last asks for 2\n"),
    ],
)
def test_a_run_opens_with_the_error_records_that_last_has_too(apcbatch: Any, lines: Any, sentence: str) -> None:
    """Fault: where a line cannot be read, `--turns last` is said to ask for fewer requests than it does."""
    write_lines(Path("chats.jsonl"), lines)
    assert sentence in apcbatch("run", "chats.jsonl", "-o", "out.jsonl", "--overwrite").stderr


@table(
    "lines, sentence",
    [
        ([(3,), (4,)], "what was read"),
        ([(3,), (9, 3, 4), (3, 4)], "what was read; 3 repeat the prompt of another request"),
    ],
)
def test_a_run_opens_with_prompts_that_repeat_others(lines: list[tuple[int, ...]], sentence: str) -> None:
    """Fault: a log whose lines have the whole history each looks like one whose requests all differ."""
    feeder: Any = planning.PlannedFeeder(Config(), Source(requests(*lines)), engine_of(can_run=lambda request: True))
    feeder.next()
    assert feeder.opening() == sentence
