"""The panel of drafts: its sums are those of the records and summaries, and what is not known is not made up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from apcbatch.report.requests import Requests
from apcbatch.report.tokens import draft_sums
from apcbatch.report.verdict import tokens_per_pass
from tests.chats import conversation, read_records, write_lines
from tests.job.conftest import Outcome
from tests.report.conftest import document_of, run_of
from tests.report.documents import document
from tests.report.test_numbers import answered

SUMMARY = {"drafts": {"lookup": {"drafted": 8, "accepted": 6}}, "tokens_per_pass": 2.0, "drafts_saved_s": 1.5,
           "decode_tokens_per_s": 10.0, "seconds": {"decode": 4.0}}  # fmt: skip


def sums_of(*summaries: dict[str, Any], records: int = 1, drafted: int = 8, accepted: int = 6) -> Any:
    """The panel of a run of some processes, whose records have these drafts each."""
    requests = Requests()
    for _ in range(records):
        assert requests.add(answered(drafted_tokens=drafted, accepted_tokens=accepted, out=20))
    ended = [SimpleNamespace(end=SimpleNamespace(summary=one)) for one in summaries]
    return draft_sums(requests, [*ended, SimpleNamespace(end=None)])


@pytest.mark.slow
def test_of_a_real_run_the_drafts_are_the_summarys(real: Callable[..., Outcome], tmp_path: Path) -> None:
    """Fault: the panel counts something else than the run, or a comparison does not say what drafts changed."""
    write_lines(tmp_path / "in.jsonl", [conversation(number) for number in range(3)])
    run = ("run", "in.jsonl", "--max-tokens", 40, "-q", "--ignore-eos")
    plain = real(*run, "-o", "plain.jsonl", "--draft", "none").summary
    summary = real(*run, "-o", "out.jsonl", "--draft-from", "plain.jsonl").summary
    made = document_of(tmp_path / "plain.jsonl", tmp_path / "out.jsonl")
    panel, table = made["runs"][1]["drafts"], made["runs"][1]["requests"]
    assert {row.pop("source"): row for row in map(dict, panel["sources"])} == summary["drafts"] != {}
    own = [record["apcbatch"] for record in read_records(tmp_path / "out.jsonl")]
    for name in ("drafted", "accepted"):
        assert table[name] == [one[f"{name}_tokens"] for one in own]
        assert panel[name] == sum(table[name]) == sum(one[name] for one in summary["drafts"].values()) > 0
    assert panel["tokens_per_pass"] == summary["tokens_per_pass"] > 1
    assert panel["saved_s"] == summary["drafts_saved_s"]
    made_up = document(30)["runs"][0]["drafts"]
    assert panel.keys() == made_up.keys() and panel["sources"][0].keys() == made_up["sources"][0].keys()
    assert made["runs"][0]["drafts"] is made["runs"][0]["requests"]["drafted"] is None
    [comparison] = made["comparisons"]
    rows = {row["name"]: (row["base"], row["other"]) for row in comparison["rows"]}
    assert rows["tokens per pass"] == (plain["tokens_per_pass"], summary["tokens_per_pass"])
    assert comparison["different_count"] == 0


def test_records_and_summaries_without_drafts_still_open(apcbatch: Callable[..., Outcome], tmp_path: Path) -> None:
    """Fault: an OUT or a run file of a version without drafts has no report any more."""
    write_lines(tmp_path / "in.jsonl", [{"messages": [{"role": "user", "content": "x"}]}])
    assert apcbatch("run", "in.jsonl", "-o", "out.jsonl", "-q", "--policy", "all").code == 0
    [record] = read_records(tmp_path / "out.jsonl")
    for name in ("drafted_tokens", "accepted_tokens"):
        del record["apcbatch"][name]
    write_lines(tmp_path / "out.jsonl", [record])
    path = tmp_path / "out.jsonl.run.json"
    found = orjson.loads(path.read_bytes())
    for name in ("drafts", "tokens_per_pass", "drafts_saved_s", "peak_draft_bytes"):
        del found["processes"][0]["end"]["summary"][name]
    path.write_bytes(orjson.dumps(found))
    run = run_of(tmp_path / "out.jsonl")
    assert (run["drafts"], run["verdict"]["tokens_per_pass"], run["verdict"]["requests"]) == (None, None, 1)
    assert run["requests"]["drafted"] is run["requests"]["accepted"] is None


def test_several_processes_add_up() -> None:
    """Fault: a resumed run shows the sources, the tokens a pass or the seconds of its last process alone."""
    other = {"drafts": {"lookup": {"drafted": 4, "accepted": 1}, "history": {"drafted": 9, "accepted": 9}},
             "tokens_per_pass": 4.0, "drafts_saved_s": None, "decode_tokens_per_s": 60.0,
             "seconds": {"decode": 2.0}}  # fmt: skip
    found = sums_of(SUMMARY, other, records=2)
    assert found["sources"] == [
        {"source": "history", "drafted": 9, "accepted": 9},
        {"source": "lookup", "drafted": 12, "accepted": 7},
    ]
    assert (found["drafted"], found["accepted"], found["completion_tokens"]) == (16, 12, 40)
    assert found["tokens_per_pass"] == pytest.approx((40 + 120) / (40 / 2 + 120 / 4))
    assert (found["saved_s"], found["decode_s"]) == (1.5, 4.0), "of the process that knows its own"


def test_without_entries_the_records_are_enough() -> None:
    """Fault: without entries of processes nothing is shown, or sources and seconds are made up."""
    found = sums_of()
    assert (found["drafted"], found["accepted"], found["sources"]) == (8, 6, [])
    assert found["saved_s"] is found["decode_s"] is found["tokens_per_pass"] is None
    assert sums_of(drafted=0, accepted=0) is None


def test_damaged_sums_are_left_out() -> None:
    """Fault: a summary that somebody made up ends the report in a traceback, or in a share above all."""
    for drafts in [
        None, [], "lookup", {"lookup": 5}, {"lookup": {"drafted": -1, "accepted": 0}}, {"lookup": {"drafted": 1}},
        {"lookup": {"drafted": 1, "accepted": 2}}, {"lookup": {"drafted": 0, "accepted": 0}},
    ]:  # fmt: skip
        found = sums_of(SUMMARY | {"drafts": drafts, "drafts_saved_s": "1", "seconds": 5})
        assert found["sources"] == [] and found["saved_s"] is None


def test_seconds_that_cannot_be_are_not_known() -> None:
    """Fault: a number that is not finite makes a page that no browser can read."""
    for value in [float("inf"), 1e300, True, "2", None]:
        assert sums_of(SUMMARY | {"drafts_saved_s": value})["saved_s"] is None
        assert tokens_per_pass([SUMMARY | {"tokens_per_pass": 0.0}]) is None


def test_a_record_with_drafts_that_cannot_be_is_none() -> None:
    """Fault: a damaged count is shown and summed up."""
    for own, is_taken in [
        ({"drafted_tokens": 5, "accepted_tokens": 5}, True),
        ({"drafted_tokens": -2}, False),
        ({"accepted_tokens": 1.0}, False),
        ({"drafted_tokens": None}, False),
    ]:
        assert Requests().add(answered(**own)) == is_taken
