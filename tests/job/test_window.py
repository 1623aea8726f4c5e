"""Windows: what is read ahead is bounded in conversations and in tokens, and forecasts know where they end."""

from __future__ import annotations

import itertools
import json
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from apcbatch.cli.program import main
from apcbatch.config import Config
from apcbatch.data.input.inputs import find_inputs
from apcbatch.job import planning
from apcbatch.job.planning import REQUEST_TOKENS, Window
from apcbatch.job.record import Ticket
from apcbatch.job.work import Tag
from apcbatch.plan.footprint import Footprint
from apcbatch.plan.planner import Planner
from apcbatch.tuning.survey import survey
from apcbatch.types import Request
from tests.chats import conversation, read_records, write_lines
from tests.job.conftest import answers
from tests.job.fakes import FakeEngine


def requests(*conversations: tuple[int, ...]) -> list[Request]:
    """A line for each tuple of prompt lengths, whose prompts are views of one array."""
    made = []
    for line, lengths in enumerate(conversations, start=1):
        whole = np.zeros(max(lengths), np.int32)
        for turn, length in enumerate(lengths, start=1):
            ticket = Ticket(len(made), line, turn, f"c-{line}#{turn}", f"c-{line}")
            made.append(Request(str(len(made)), whole[:length], tag=Tag(ticket, None)))
    return made


def lines_by_window(config: Config, work: list[Request]) -> list[list[int]]:
    """The input lines of each window."""
    window, windows = Window(config), [[]]
    for request in work:
        if not window.takes(request):
            window = Window(config)
            assert window.takes(request), "a window takes its first request whatever it weighs"
            windows.append([])
        windows[-1].append(request.tag.ticket.line)
    return [[line for line, _ in groupby(lines)] for lines in windows]


def test_a_window_closes_at_either_bound() -> None:
    """Catches a bound that is off by one, a history that counts once for each of its turns, and a conversation that
    is cut in two."""
    work = requests((10, 20, 1000), (5,), (5, 5), (7,))
    assert lines_by_window(Config(window=2), work) == [[1, 2], [3, 4]]
    assert lines_by_window(Config(window=3), work) == [[1, 2, 3], [4]]
    first, second = 1000 + 3 * REQUEST_TOKENS, 5 + REQUEST_TOKENS
    for tokens, expected in (
        (1, [[1], [2], [3], [4]]),
        (first, [[1], [2, 3, 4]]),
        (first + 1, [[1, 2], [3, 4]]),
        (first + second, [[1, 2], [3, 4]]),
        (first + second + 1, [[1, 2, 3], [4]]),
    ):
        assert lines_by_window(Config(window_tokens=tokens), work) == expected, tokens


class Source:
    """A feeder of these requests."""

    def __init__(self, work: list[Request]) -> None:
        self._work = work

    @property
    def exhausted(self) -> bool:
        return not self._work

    def next(self) -> Request | None:
        return self._work.pop(0) if self._work else None

    def follow_up(self, result: Any) -> list[Any]:
        return [result]


def engine_of(**facts: Any) -> Any:
    """What a planned feeder asks of an engine; request 1 is refused."""
    asked = {"can_run": lambda request: request.id != "1", "key_fingerprint": b"k", "held": lambda keys: set()}
    return SimpleNamespace(**{"num_unfinished": 0, "footprint": Footprint(7, 1), **asked, **facts})


def test_reading_pauses_once_after_each_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: workers idle while the next window is read, a window is planned before the last one is handed out, or the
    first request of the last window is lost."""
    clock = itertools.count()
    monkeypatch.setattr(planning.time, "perf_counter", lambda: float(next(clock)))
    engine: Any = engine_of(num_unfinished=1)
    feeder: Any = planning.PlannedFeeder(Config(window=2), Source(requests((3,), (3,), (3,))), engine)
    assert not feeder.pause(), "nothing was read"
    assert (feeder.next().id, feeder.pause(), feeder.next().id) == ("1", False, "0"), "a refused one comes first"
    engine.num_unfinished = 0
    assert not feeder.pause(), "nothing to compute meanwhile"
    engine.num_unfinished = 1
    assert [feeder.pause(), feeder.pause(), feeder.exhausted] == [True, False, False]
    last = feeder.next()
    assert (last.id, last.plan is not None, feeder.exhausted) == ("2", True, True)
    assert [feeder.pause(), feeder.pause(), feeder.next()] == [True, False, None]
    assert feeder.num_open_rollouts == 0 and feeder.plan_s == 3.0 and feeder.follow_up("result") == ["result"]


@pytest.mark.parametrize(("store", "reserved"), [("s", Footprint(7, 1).pool_bytes(198)), (None, 0)])
def test_a_plan_leaves_room_for_the_largest_stored_snapshot(
    store: str | None, reserved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a snapshot that is read from the store evicts one that the plan counts on; or a store is asked for that
    is not there."""
    kept: list[int] = []
    plan = planning.planner_for
    reserves = lambda config, footprint, *, reserved_bytes: kept.append(reserved_bytes) or plan(config, footprint)  # noqa: E731
    monkeypatch.setattr(planning, "planner_for", reserves)
    engine = engine_of(held=lambda keys: keys, can_run=lambda request: True)
    feeder: Any = planning.PlannedFeeder(Config(store=store, block_size=2), Source(requests((5,), (200,))), engine)
    assert feeder.next().plan.resume_at == (4 if store else 0) and kept == [reserved]


@pytest.mark.parametrize("bound", [("--window", "2"), ("--window-tokens", "1"), ("--window-tokens", "1500")])
def test_forecasts_see_the_windows_of_the_run(
    bound: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Catches a window by conversations alone, which took memory without a bound (614 MiB for 135 MB), and a
    forecast that counts others than the run plans."""
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "in.jsonl", [conversation(number, turns=3) for number in range(5)])
    planned = []
    plan = Planner.plan
    monkeypatch.setattr(Planner, "plan", lambda self, tree, held: planned.append(1) or plan(self, tree, held))
    options = ("-q", "--max-tokens", "3", "--policy", "planned")
    assert main(["run", "in.jsonl", "-o", "whole.jsonl", *options]) == 0
    assert len(planned) == 1
    assert main(["run", "in.jsonl", "-o", "parts.jsonl", *options, *bound]) == 0
    num_windows = len(planned) - 1
    assert num_windows > 1
    assert answers(read_records(tmp_path / "whole.jsonl")) == answers(read_records(tmp_path / "parts.jsonl"))
    config = Config(**{bound[0][2:].replace("-", "_"): int(bound[1])})
    assert survey(config, find_inputs(["in.jsonl"]), lambda sentence: None).num_windows == num_windows
    capsys.readouterr()
    assert main(["plan", "in.jsonl", *bound]) == 0
    assert f"`run` plans this input in {num_windows} windows" in capsys.readouterr().out


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
    """Catches workers of a cluster, which takes whatever it is given, that wait until the whole input is planned."""
    monkeypatch.setenv("APCBATCH_POLICY", "planned")
    hungry = {
        "wants_more": property(lambda self: True),
        "can_run": lambda self, request: True,
        "held": lambda self, keys: set(),
        "footprint": Footprint(1),
        "key_fingerprint": b"k",
    }
    for name, value in hungry.items():
        monkeypatch.setattr(FakeEngine, name, value, raising=False)
    write_lines(tmp_path / "in.jsonl", [conversation(number) for number in range(12)])
    done = apcbatch("run", "in.jsonl", "-o", "out.jsonl", "--window", 2)
    assert done.code == 0
    num_requests = len(read_records(tmp_path / "out.jsonl"))
    assert num_requests >= 12 and engines[0].most_waiting <= num_requests / 6
    assert done.summary["seconds"]["plan"] > 0
