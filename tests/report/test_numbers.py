"""The numbers of a report are those of the run: its summary, its records, its run file."""

from __future__ import annotations

import gzip
import json
import random
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import orjson
import pytest

from apcbatch.job.out_file import find_out
from apcbatch.report.panels import read_run
from apcbatch.report.requests import Requests, answer_of
from apcbatch.report.tokens import turn_sums
from apcbatch.report.verdict import verdict
from tests.chats import conversation, read_records, write_lines
from tests.conftest import SHARED_DATA
from tests.job.conftest import Outcome
from tests.report.conftest import EXAMPLES, run_of

COUNTS = (
    "requests", "ok", "errors", "errors_by_code", "finish_reasons", "empty_answers", "unread_calls", "answer_warnings",
    "prompt_tokens", "cached_tokens", "computed_tokens",
    "completion_tokens", "hit_rate", "ideal_hit_rate",
)  # fmt: skip
MEASURES = ("prefill_tokens_per_s", "decode_tokens_per_s", "seconds", "peak_rss_bytes", "store_skipped", "warnings")
RUN = ("run", "in.jsonl", "-o", "out.jsonl", "--max-tokens", 4, "--max-running", 3, "--progress", "none")


def check_sums(run: dict[str, Any], records: list[dict[str, Any]]) -> None:
    """Every sum of a run, worked out once more from OUT and between its own parts."""
    answered = [record for record in records if record["error"] is None]
    own = [record["apcbatch"] for record in answered]
    table, tokens, verdict = run["requests"], run["tokens"], run["verdict"]
    assert verdict["requests"] == len(records) == len(table["id"])
    assert table["id"] == [record["custom_id"] or f"line-{record['line']}" for record in records]
    assert verdict["errors_by_code"] == Counter(r["error"]["code"] for r in records if r["error"] is not None)
    assert verdict["cached_tokens"] == sum(one["cached_tokens"] for one in own) == sum(table["cached"])
    assert tokens["memory"] + tokens["disk"] == verdict["cached_tokens"]
    assert tokens["computed"] == verdict["computed_tokens"] == sum(one["computed_tokens"] for one in own)
    ideals = [one["ideal_cached_tokens"] for one in own]
    assert tokens["ideal"] == verdict["ideal_tokens"] == sum(ideals)
    lost = [max(0, i - one["cached_tokens"]) for i, one in zip(ideals, own, strict=True)]
    assert tokens["lost"] == sum(lost) == sum(miss["tokens"] for miss in tokens["misses"])
    reasons = Counter(one["miss_reason"] for one in own if one["miss_reason"])
    assert {miss["reason"]: miss["requests"] for miss in tokens["misses"]} == reasons
    prompts = [record["response"]["body"]["usage"]["prompt_tokens"] for record in answered]
    times = [(one["prefill_ms"] + one["decode_ms"]) / 1000 for one in own]
    told = {row.pop("name"): list(row.values()) for row in map(dict, verdict["percentiles"] or ())}
    for name, values in (
        ("prompt", prompts),
        ("computed", [one["computed_tokens"] for one in own]),
        ("seconds", times),
    ):
        expected = numpy.percentile(values, (50, 95, 99), method="inverted_cdf").tolist() if own else None
        assert told.get(name) == (expected and pytest.approx(expected, abs=2e-4)), name
    by_turn = Counter({turn: 0 for turn in run["turns"]["turn"]})
    for record in answered:
        if record["turn"] is not None:
            by_turn[record["turn"]] += record["apcbatch"]["computed_tokens"]
    assert dict(zip(run["turns"]["turn"], run["turns"]["computed"], strict=True)) == by_turn
    if run["tree"] is not None:
        assert sum(run["tree"]["restored"]) == verdict["cached_tokens"]
        assert sum(run["tree"]["computed"]) == verdict["computed_tokens"]


def check_equals_summary(run: dict[str, Any], summary: dict[str, Any], exit_code: int) -> None:
    verdict = run["verdict"]
    for name in (*COUNTS, *MEASURES):
        assert verdict[name] == summary[name], name
    assert verdict["exit_code"] == exit_code and not verdict["unfinished"] and verdict["processes"] == 1
    assert {name: run["tokens"][name] for name in ("memory", "disk")} == summary["cached_by_source"]
    assert {miss["reason"]: miss["requests"] for miss in run["tokens"]["misses"]} == summary["miss_reasons"]


def batch(number: int, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"The same beginning, then number {number}"}]
    body = {"messages": messages, "max_tokens": 3, **body}
    return {"custom_id": f"b-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


@pytest.mark.drawn(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("--turns", "each", "--policy", "all", "--store", "store"),
        ("--turns", "rollout", "--limit", 1),
        ("--turns", "last", "--score"),
        ("--policy", "none"),
        ("--policy", "all", "--store", "store", "--store-size", "0"),
    ],
    ids=lambda options: options[-1] if isinstance(options[-1], str) else "rollout",
)
def test_of_a_real_run_every_number_is_the_summarys(
    options: tuple[object, ...], real: Callable[..., Outcome], tmp_path: Path
) -> None:
    """Fault: the page counts something else than the run, which prints its summary."""
    common = ("--max-tokens", 3, "--block-size", 16, "-q", "-o", "out.jsonl")
    done = real("run", EXAMPLES, "--limit", 2, *common, *options)
    assert done.code == 0, done.stderr
    run = run_of(tmp_path / "out.jsonl", None if "rollout" in options else EXAMPLES)
    check_equals_summary(run, done.summary, 0)
    assert (done.summary["store_skipped"] > 0) == ("--store-size" in options)
    check_sums(run, read_records(tmp_path / "out.jsonl"))
    assert (run["tree"] is None) == ("rollout" in options) and not run["notes"]
    [timeline] = run["timelines"]
    assert 0 < max(timeline["running"]) <= 32 and max(timeline["failed"]) == 0
    assert sum(timeline["phases"].values()) == pytest.approx(done.summary["seconds"]["total"])


@pytest.mark.drawn(1)
@pytest.mark.slow
@pytest.mark.data
@pytest.mark.parametrize("name", ["taskmaster4", "toolbench_dfs", "tau_bench"])
def test_of_real_conversations_too(name: str, real: Callable[..., Outcome], tmp_path: Path) -> None:
    """Fault: real histories have what the examples have not, such as trees that fork in the middle."""
    limit = {"taskmaster4": 40, "toolbench_dfs": 2, "tau_bench": 1}[name]
    done = real("run", SHARED_DATA / f"{name}.jsonl", "-o", "out.jsonl", "--limit", limit, "--max-tokens", 2, "-q")
    run = run_of(tmp_path / "out.jsonl", SHARED_DATA / f"{name}.jsonl")
    check_equals_summary(run, done.summary, done.code)
    check_sums(run, read_records(tmp_path / "out.jsonl"))


def test_errors_several_inputs_and_several_answers(real: Callable[..., Outcome], tmp_path: Path) -> None:
    """Fault: a record of another form, an error or one with n answers, falls out of the sums."""
    write_lines(tmp_path / "a.jsonl", [batch(1, n=3, temperature=1.0), "nonsense", batch(2, max_tokens=-1), batch(3)])
    lines = [batch(4), batch(1), {"messages": []}]
    (tmp_path / "b.gz").write_bytes(gzip.compress(b"".join(orjson.dumps(line) + b"\n" for line in lines)))
    done = real("run", "a.jsonl", "b.gz", "-o", "out.jsonl", "-q")
    assert done.code == 3 and done.summary["errors"] == 4, done.stderr
    run = run_of(tmp_path / "out.jsonl")
    check_equals_summary(run, done.summary, 3)
    records = read_records(tmp_path / "out.jsonl")
    check_sums(run, records)
    table = run["requests"]
    for row, record in enumerate(records):
        if record["error"] is None:
            contents = [choice["message"]["content"] or "" for choice in record["response"]["body"]["choices"]]
            assert all(text in table["answer"][row] for text in contents)
            assert table["out"][row] == record["response"]["body"]["usage"]["completion_tokens"]
            assert table["prefill_ms"][row] == round(10 * record["apcbatch"]["prefill_ms"])
        else:
            said = table["errors"][table["error"][row]]
            assert said == f"{record['error']['code']}: {record['error']['message']}"
            assert (table["ideal"][row], table["prompt"][row], table["finish"][row]) == (-1, 0, 0)
    assert sum("[answer 3 of 3]" in answer for answer in table["answer"]) == 1


@pytest.mark.slow
def test_after_a_kill_the_lines_that_are_there(start: Callable[..., Any], tmp_path: Path) -> None:
    """Fault: without the end of its last process a run has no report, or one that says it ended; a killed process has
    another's requests."""
    write_lines(tmp_path / "in.jsonl", [conversation(number) for number in range(20)])
    out = tmp_path / "out.jsonl"
    process = start(*RUN, FAKE_STEP_S=0.02, APCBATCH_POLICY="all")
    process.wait_for_lines(out, 7)
    process.send(signal.SIGKILL)
    process.end()
    whole = [line for line in out.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    run = run_of(out)
    assert run["verdict"]["requests"] == len(whole) > 0 and run["verdict"]["exit_code"] is None
    assert run["verdict"]["unfinished"] and run["verdict"]["continue"].endswith("--resume")
    [killed] = run["timelines"]
    assert killed["phases"] is None and 0 < max(killed["running"]) <= 3
    done = start(*RUN, "--resume", APCBATCH_POLICY="all").end()
    run = run_of(out)
    check_sums(run, read_records(out))
    assert run["verdict"]["requests"] == 40 and run["verdict"]["exit_code"] == 0 == done.code
    assert run["verdict"]["processes"] == len(run["timelines"]) == len(run["ran"]["processes"]) == 2
    assert all(0 < max(one["running"]) <= 3 for one in run["timelines"])


def test_a_resumed_run_adds_up(apcbatch: Callable[..., Outcome], tmp_path: Path) -> None:
    """Fault: the report of a resumed run shows its last process alone, or counts one twice."""
    write_lines(tmp_path / "in.jsonl", [conversation(number) for number in range(20)])
    first = apcbatch(*RUN, "--limit", 5, "--policy", "all").summary
    second = apcbatch(*RUN, "--resume", "--policy", "all").summary
    run = run_of(tmp_path / "out.jsonl", tmp_path / "in.jsonl")
    check_sums(run, read_records(tmp_path / "out.jsonl"))
    verdict = run["verdict"]
    assert verdict["processes"] == len(run["timelines"]) == 2
    for name in ("requests", "ok", "prompt_tokens", "cached_tokens", "computed_tokens", "completion_tokens"):
        assert verdict[name] == first[name] + second[name], name
    for stage, seconds in verdict["seconds"].items():
        assert seconds == pytest.approx(first["seconds"][stage] + second["seconds"][stage])


def test_without_entries_the_records_are_enough(apcbatch: Callable[..., Outcome], tmp_path: Path) -> None:
    """Fault: an OUT of an earlier version has no report, or one that makes up times, or does not say what is missing;
    its trace is read, or left out without a word."""
    write_lines(tmp_path / "in.jsonl", [conversation(number) for number in range(4)])
    done = apcbatch(*RUN, "--policy", "all")
    path = tmp_path / "out.jsonl.run.json"
    facts = json.loads(path.read_text())
    (tmp_path / "out.jsonl.trace.jsonl").write_text("old\n")
    for earlier, said in (
        ({}, "has no entry of a process, as in earlier versions"),
        ({"processes": []}, "has no entry of a process, as in earlier versions"),
        ({"processes": [5], "dropped_processes": 3}, "the entry of process 1 in"),
    ):
        bare = {name: value for name, value in facts.items() if name not in ("begin", "processes", "dropped_processes")}
        path.write_text(json.dumps(bare | earlier))
        run = run_of(tmp_path / "out.jsonl", tmp_path / "in.jsonl")
        check_sums(run, read_records(tmp_path / "out.jsonl"))
        assert all(run["verdict"][name] == done.summary[name] for name in COUNTS)
        assert run["verdict"]["seconds"] is run["verdict"]["exit_code"] is None and not run["timelines"]
        *notes, trace = run["notes"]
        assert said in notes[-1] and trace.endswith("out.jsonl.trace.jsonl is of an earlier version and is not read")
        assert len(notes) == 1 + ("dropped_processes" in earlier)
        assert run["ran"]["run_file"]["config"]["policy"] == "all"


def test_lines_that_are_no_records_are_counted(apcbatch: Callable[..., Outcome], tmp_path: Path) -> None:
    """Fault: a torn last line, zeros of a power cut or a stranger's line is an error, or is passed over in silence."""
    write_lines(tmp_path / "in.jsonl", [conversation(number) for number in range(6)])
    apcbatch(*RUN, "--policy", "all")
    out = tmp_path / "out.jsonl"
    lines = out.read_bytes().splitlines(keepends=True)
    record = json.loads(lines[3])
    record["apcbatch"]["cached_tokens"] = random.choice((-1, 10**18, "5", None, 2.5, True))
    wrong = orjson.dumps(record) + b"\n"
    strange = [b'{"a": 1}\n', b"[]\n", b"nonsense\n", wrong]
    out.write_bytes(b"".join([*lines[:5], *strange, b"\0\0\0\n", b"\n", *lines[5:], lines[0][: len(lines[0]) // 2]]))
    run = run_of(out)
    assert run["verdict"]["requests"] == len(lines)
    torn, foreign = (next(note for note in run["notes"] if word in note) for word in ("torn", "not records"))
    assert torn.endswith("are left out: 2") and foreign.endswith("are left out: 4, the first one is line 6")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_packed_out_finished_or_not(suffix: str, apcbatch: Callable[..., Outcome], tmp_path: Path) -> None:
    """Fault: a packed OUT is read as it is, or one that waits for its run is not found."""
    write_lines(tmp_path / "in.jsonl", [conversation(number) for number in range(6)])
    out = tmp_path / f"out.jsonl{suffix}"
    done = apcbatch("run", "in.jsonl", "-o", out.name, "--policy", "all", "--max-tokens", 3)
    run = run_of(out)
    check_equals_summary(run, done.summary, 0)
    plain = tmp_path / "plain.jsonl"
    apcbatch("run", "in.jsonl", "-o", plain.name, "--policy", "all", "--max-tokens", 3)
    (tmp_path / f"out.jsonl{suffix}.part").write_bytes(plain.read_bytes())
    out.unlink()
    run = run_of(out)
    assert run["verdict"]["requests"] == done.summary["requests"]
    assert any("not complete" in note for note in run["notes"])


def test_a_damaged_packed_out_is_refused(apcbatch: Callable[..., Outcome], tmp_path: Path) -> None:
    """Fault: the report of half an archive looks like that of half a run."""
    write_lines(tmp_path / "in.jsonl", [conversation(number) for number in range(6)])
    apcbatch("run", "in.jsonl", "-o", "out.jsonl.gz", "--policy", "all")
    data = (tmp_path / "out.jsonl.gz").read_bytes()
    (tmp_path / "out.jsonl.gz").write_bytes(data[: len(data) // 2])
    done = apcbatch("report", "out.jsonl.gz")
    assert done.code == 2 and "cannot be read further" in done.stderr


def test_turns_from_the_hundredth_on_are_one_row() -> None:
    """Fault: a turn is counted in another's row, or an error as if it had been answered."""
    numbers = {"turn": [0, 1, 1, 99, 100, 101], "cached": [7, 1, 2, 3, 4, 5], "error": [0, 0, 1, 0, 0, 0]}
    requests: Any = SimpleNamespace(numbers=numbers | {"computed": [9, 10, 20, 30, 40, 50]})
    assert turn_sums(requests) == {
        "turn": [1, 99, 100], "requests": [1, 1, 2], "cached": [1, 3, 9], "computed": [10, 30, 90],
    }  # fmt: skip


def test_what_a_summary_says_wrongly_is_not_known(apcbatch: Callable[..., Outcome], tmp_path: Path) -> None:
    """Fault: an entry that somebody made up, or one of another version, ends the report in a traceback, or a number
    that cannot be is shown."""
    write_lines(tmp_path / "in.jsonl", [conversation(1)])
    apcbatch(*RUN, "--policy", "all")
    found = read_run(find_out(str(tmp_path / "out.jsonl")))
    [process] = found.processes
    assert process.end is not None
    for given, seconds, peak, skipped in (
        ({}, 0.0, None, None),
        ({"seconds": {"load": 2.5}, "peak_rss_bytes": 1, "store_skipped": 0}, 2.5, 1, 0),
        ({"seconds": {"load": 2**53}, "peak_rss_bytes": 0, "store_skipped": 2**53}, 2**53, None, 2**53),
        ({"seconds": {"load": 2**53 + 1}, "peak_rss_bytes": True, "store_skipped": 2**53 + 1}, 0.0, None, None),
        ({"seconds": {"load": -1}, "peak_rss_bytes": "1", "store_skipped": -1}, 0.0, None, None),
        ({"seconds": [1], "peak_rss_bytes": 1.5, "store_skipped": None}, 0.0, None, None),
    ):
        end = replace(process.end, summary=given)
        told = verdict(found.requests, [replace(process, end=end)], {})
        assert (told["seconds"]["load"], told["peak_rss_bytes"], told["store_skipped"]) == (seconds, peak, skipped)
    ends = [
        replace(process.end, summary={"prefill_tokens_per_s": rate, "seconds": {"prefill": took}, "warnings": said})
        for rate, took, said in ((10.0, 1.0, ["a", "b"]), (40.0, 0.5, ["b"]), (None, 9.0, "c"), (70.0, 0.0, None))
    ]
    told = verdict(found.requests, [replace(process, end=end) for end in ends], {})
    assert told["prefill_tokens_per_s"] == 20.0 and told["decode_tokens_per_s"] is None
    untimed = verdict(found.requests, [replace(process, end=end) for end in ends[2:]], {})
    assert untimed["prefill_tokens_per_s"] is None, "of no time there is no rate"
    assert told["warnings"] == ["a", "b"] and told["seconds"]["prefill"] == 10.5


def test_of_nothing_no_share_is_restored() -> None:
    """Fault: a run of errors alone is said to have restored all its tokens, or ends the report."""
    told = verdict(Requests(), [], {})
    assert (told["requests"], told["hit_rate"], told["prompt_tokens"], told["unfinished"]) == (0, 0.0, 0, False)
    assert told["ideal_hit_rate"] in (None, 0.0)


def test_without_a_run_file_the_report_says_so(apcbatch: Callable[..., Outcome], tmp_path: Path) -> None:
    """Fault: options and model of a run are left out without a word."""
    write_lines(tmp_path / "in.jsonl", [conversation(1)])
    apcbatch(*RUN)
    (tmp_path / "out.jsonl.run.json").unlink()
    [note] = [note for note in run_of(tmp_path / "out.jsonl")["notes"] if "run.json" in note]
    assert note.endswith(
        "out.jsonl.run.json is missing, so nothing says what the run was made with, how long it took and how it ended"
    )


def answered(**own: Any) -> dict[str, Any]:
    """A record of an answer, with these values of its `apcbatch` object."""
    choice = {"finish_reason": "stop", "text": "x"}
    body = {"choices": [choice], "usage": {"prompt_tokens": 10, "completion_tokens": own.pop("out", 2)}}
    known = {"cached_tokens": 4, "computed_tokens": 6, "ideal_cached_tokens": 5, "cached_from": "disk",
             "miss_reason": "cold", "prefill_ms": 1.26, "decode_ms": 0, "completion_token_ids": [1, 2]}  # fmt: skip
    record = {"id": "apc-000000", "custom_id": own.pop("custom_id", "c"), "line": 1, "turn": None, "error": None}
    return record | {"response": {"body": body}, "apcbatch": known | own}


def test_a_record_is_a_row_if_its_numbers_can_be() -> None:
    """Fault: a damaged number is shown and summed up, or an answer at its bounds is left out."""
    for own, is_taken in [
        ({}, True), ({"ideal_cached_tokens": None}, True), ({"miss_reason": None}, True), ({"out": 2**52 - 1}, True),
        ({"out": 2**52}, False), ({"out": -2}, False), ({"out": None}, False), ({"out": 2.0}, False),
        ({"cached_tokens": 5}, False), ({"cached_from": "tape"}, False), ({"miss_reason": 5}, False),
        ({"prefill_ms": -0.1}, False), ({"prefill_ms": None}, False), ({"decode_ms": 1e300}, False),
    ]:  # fmt: skip
        requests = Requests()
        assert requests.add(answered(**own)) == is_taken == len(requests)
        if is_taken:
            row = {name: column[0] for name, column in requests.numbers.items()}
            assert (row["prefill_ms"], row["decode_ms"], row["from"], row["line"], row["turn"]) == (13, 0, 2, 1, 0)
            assert row["ideal"] == (5 if "ideal_cached_tokens" not in own else -1)
            assert requests.reasons[row["reason"]] == ("" if "miss_reason" in own else "cold")


def test_a_prompt_without_its_digest_is_equal_to_none() -> None:
    """Fault: a digest that another program wrote ends the report, or makes two prompts equal."""
    for digest in ["0f" * 16, "0f" * 15, "zz" * 16, 5, None]:
        requests = Requests()
        requests.add(answered(request_digest=digest, custom_id="x" * 513))
        assert requests.prompt_digest(0) == (b"\x0f" if digest == "0f" * 16 else b"\0") * 16
        assert requests.ids == ["x" * 512]


def test_the_text_of_an_answer_is_all_that_was_said() -> None:
    """Fault: a thought, a choice or a call is missing in the table, or a part of a damaged record ends the report."""
    call = {"function": {"name": "f", "arguments": "{}"}}
    damaged = [None, {"function": None}, {"function": {"name": "g"}}, {"function": {"name": 5, "arguments": "{}"}}]
    message = {"content": "ho", "reasoning_content": "hm", "tool_calls": [call, *damaged]}
    whole = ("[reasoning]\nhm\n[answer]\nho", [{"name": "f", "arguments": "{}"}])
    for choices, expected in (
        ([{"text": "x"}], ("x", None)),
        ([{"message": message}], whole),
        ([{"message": {"content": None}}], ("", None)),
        ([{"message": None, "text": 5}], ("", None)),
        ([{"text": "x"}, {"message": message}], (f"[answer 1 of 2]\nx\n[answer 2 of 2]\n{whole[0]}", whole[1])),
        ([5, {"text": "y"}], ("[answer 1 of 2]\n[answer 2 of 2]\ny", None)),
    ):
        assert answer_of({"response": {"body": {"choices": choices}}}) == expected
