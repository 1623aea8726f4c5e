"""The table of the policies: which runs are made, what a row says, and that a kill loses nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.policies import COLUMNS, Case, Table, as_markdown, cases_of, skipped

ROOT = Path(__file__).resolve().parents[2]
SUMMARY = {
    "requests": 10, "ok": 9, "errors": 1, "prompt_tokens": 1000, "cached_tokens": 600, "computed_tokens": 399,
    "unique_tokens": 390, "hit_rate": 0.6, "ideal_hit_rate": 0.61, "snapshots_written": 20, "snapshots_read": 20,
    "snapshots_for_later": 0, "snapshots_evicted": 0, "peak_live_snapshots": 4,
    "seconds": {"prefill": 1.0, "plan": 0.1, "total": 2.0},
}  # fmt: skip
PLANNED = Case("chats", "planned", 1, "auto", 32)
EVERYTHING = Case("chats", "all", 1, "file", 32)
NOTHING = Case("chats", "none", None, "file", 32)


def run(wall_s: float = 2.0, **changes: object) -> dict:
    """What a run that finished leaves."""
    return {"exit": 3, "wall_s": wall_s, "summary": SUMMARY | changes}


def row(table: Table, case: Case) -> dict:
    """A case's row."""
    return next(row for row in table.document()["rows"] if row["case"] == asdict(case))


def test_a_run_that_differs_in_nothing_is_made_once():
    """Fault: `none` runs for each block, or `all` for each order, which takes hours for the same figures."""
    cases = cases_of(["a"], ["none", "all", "planned"], [1, 64], ["file", "auto"], [1, 32])
    assert len(cases) == len(set(cases)) == 2 * (1 + 2 + 4)
    assert sum(skipped(case, ("a:none", "a:planned:64", "b:all")) for case in cases) == 2 + 4


@pytest.mark.parametrize(
    ("changes", "broken"),
    [
        ({}, set()),
        ({"computed_tokens": 400}, {"computes_unique"}),
        ({"snapshots_written": 22}, {"written_per_read"}),
        ({"cached_tokens": 599}, {"hit_rate_of_all"}),
    ],
)
def test_a_broken_promise_is_named(changes, broken):
    """Fault: the table says ok where it is not, or complains where it is."""
    table = Table([PLANNED, EVERYTHING], {}, None)
    table.add(EVERYTHING, run(computed_tokens=500))
    table.add(PLANNED, run(**changes))
    verdicts = row(table, PLANNED)["verdicts"]
    assert verdicts.keys() == {"computes_unique", "written_per_read", "hit_rate_of_all"}
    assert {name for name, holds in verdicts.items() if not holds} == broken
    assert row(table, EVERYTHING)["verdicts"] == {}
    cells = as_markdown(table.document()["rows"]).splitlines()[-2].split(" | ")
    assert cells[-1] == f"{', '.join(broken) or 'ok'} |"


def test_all_is_no_measure_where_it_had_no_room():
    """Fault: planned is blamed for restoring more than an `all` whose snapshots had to go."""
    table = Table([PLANNED, EVERYTHING], {}, None)
    table.add(EVERYTHING, run(cached_tokens=300, snapshots_evicted=5))
    table.add(PLANNED, run())
    assert "hit_rate_of_all" not in row(table, PLANNED)["verdicts"]


def test_seconds_are_medians_and_failed_runs_are_counted_apart():
    """Fault: one slow run, or one that failed, decides what the policy costs."""
    table = Table([PLANNED, NOTHING], {}, None)
    for wall_s in (2.0, 9.0, 3.0):
        table.add(PLANNED, run(wall_s))
    table.add(PLANNED, {"exit": 1, "wall_s": 0.1, "failure": "out of memory"})
    table.add(NOTHING, run(4.0))
    found = row(table, PLANNED)
    assert (found["wall_s"], found["wall_over_none"], found["finished"], found["failed"]) == (3.0, 0.75, 3, 1)
    assert found["counts_agree"]
    table.add(PLANNED, run(3.0, snapshots_read=19))
    assert not row(table, PLANNED)["counts_agree"]


def test_a_case_that_never_finished_has_a_row():
    """Fault: a failure ends the table, or its row is missing."""
    table = Table([PLANNED], {}, None)
    table.add(PLANNED, {"exit": 2, "wall_s": 0.1, "failure": "no such option"})
    last = as_markdown(table.document()["rows"]).splitlines()[-1]
    assert last.count(" | -") == len(COLUMNS) and "1 failed" in last


def test_what_was_measured_before_a_kill_is_taken_up(tmp_path):
    """Fault: hours of runs are lost or made again, or runs with other options are mixed in."""
    path = tmp_path / "kept.json"
    before = Table([PLANNED, NOTHING], {"with": ""}, path)
    before.add(PLANNED, run())
    before.add(NOTHING, {"exit": 1, "wall_s": 0.1, "failure": "killed"})
    after = Table([PLANNED, NOTHING], {"with": ""}, path)
    assert (after.num_runs(PLANNED), after.num_runs(NOTHING)) == (1, 0)
    with pytest.raises(Exception, match="other options"):
        Table([PLANNED], {"with": "--limit 3"}, path)


def test_real_runs_make_a_table(tmp_path):
    """Fault: an option or a field of the summary has another name than here, or an error record stops it."""
    messages = [{"role": "user", "content": "What is the time?"}, {"role": "assistant", "content": "Noon."}]
    lines = [json.dumps({"id": "c", "messages": messages}), '{"id": "d"}']
    (tmp_path / "chats.jsonl").write_text("\n".join(lines) + "\n")
    command = [sys.executable, str(ROOT / "benchmarks" / "policies.py"), str(tmp_path / "chats.jsonl")]
    command += [
        "--policies",
        "none,planned",
        "--blocks",
        "1",
        "--out",
        str(tmp_path / "out.json"),
        "--threads",
        "1",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *table, last = done.stdout.splitlines()
    document = json.loads(last)
    assert document == json.loads((tmp_path / "out.json").read_text())
    assert len(table) == 2 + len(document["rows"]) == 4
    for found in document["rows"]:
        assert (found["requests"], found["errors"], found["failed"]) == (2, 1, 0)
        assert found["verdicts"].keys() == (
            {"computes_unique", "written_per_read"} if found["case"]["policy"] == "planned" else set()
        )
