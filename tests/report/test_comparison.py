"""Two runs of the same requests: what is the same, what differs and where."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from apcbatch.report.comparison import (
    MOST_LISTED,
    _tokens_of,
    first_difference,
)
from tests.chats import conversation, read_records, write_lines
from tests.job.conftest import Outcome
from tests.report.conftest import document_of

RUN = ("run", "in.jsonl", "--max-tokens", 6, "--progress", "none", "-q")


def write_records(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in records))


@pytest.fixture
def out(apcbatch: Callable[..., Outcome], tmp_path: Path) -> Path:
    """An OUT of the fake engine: 38 answers and four errors, two of them of an id that is there already."""
    lines: list[Any] = [conversation(number) for number in (*range(19), 3, 3)]
    write_lines(tmp_path / "in.jsonl", [*lines, {"messages": []}, {"messages": 3}])
    assert apcbatch(*RUN, "-o", "out.jsonl", "--policy", "all").code == 3
    return tmp_path / "out.jsonl"


def test_equal_runs_are_the_same_bit_for_bit(real: Callable[..., Outcome], tmp_path: Path) -> None:
    """Fault: cold and warm runs of the bundled model are said to differ, or differ in more than what was reused."""
    write_lines(tmp_path / "in.jsonl", [conversation(number, turns=3) for number in range(4)])
    cold = real(*RUN, "-o", "cold.jsonl", "--policy", "none").summary
    warm = real(*RUN, "-o", "warm.jsonl", "--policy", "all", "--block-size", 16).summary
    [made] = document_of(tmp_path / "cold.jsonl", tmp_path / "warm.jsonl")["comparisons"]
    assert (made["both"], made["same_answers"], made["different_count"], made["different"]) == (12, 12, 0, [])
    assert (made["only_base"], made["only_other"], made["other_requests"]) == (0, 0, 0)
    rows = {row["name"]: (row["base"], row["other"]) for row in made["rows"]}
    assert rows["prompt tokens restored"] == (0, warm["cached_tokens"]) and warm["cached_tokens"] > 0
    assert rows["total seconds"] == (cold["seconds"]["total"], warm["seconds"]["total"])
    assert {row["reason"]: row["base"] for row in made["misses"] if row["base"]} == cold["miss_reasons"]
    assert {row["reason"]: row["other"] for row in made["misses"] if row["other"]} == warm["miss_reasons"]
    counts = [row["base"] + row["other"] for row in made["misses"]]
    assert len(counts) > 1 and counts == sorted(counts, reverse=True), "the most frequent reasons first"
    changed = {row["name"]: (row["base"], row["other"]) for row in made["changed_options"]}
    assert changed == {"policy": ("none", "all"), "block_size": (64, 16)}


def test_each_changed_answer_is_listed_where_it_parts(out: Path, tmp_path: Path) -> None:
    """Fault: a token that differs is passed over, or is shown at another place or of another request."""
    records = read_records(out)
    expected = []
    draw = random.Random(random.randrange(1 << 30))
    for row in draw.sample(range(len(records)), 12):
        record = records[row]
        tokens = (record["apcbatch"] or {}).get("completion_token_ids")
        if record["error"] is not None:
            record["error"]["message"] += "!"
            at = -1
        elif draw.random() < 0.2:
            record["response"], at = None, -1
            record["error"] = {"code": "internal", "message": "lost", "line": record["line"], "retryable": True}
        elif draw.random() < 0.3:
            at = len(tokens) - 1
            tokens.pop()
        else:
            at = draw.randrange(len(tokens))
            tokens[at] += 1
        expected.append((record["custom_id"] or f"line-{record['line']}", record["turn"] or 0, at))
    twice = [record for record in records if record["line"] in (20, 21)]  # equal ids keep their order
    shuffled = [*draw.sample(others := [r for r in records if r not in twice], len(others)), *twice]
    write_records(tmp_path / "other.jsonl", shuffled)
    document = document_of(out, tmp_path / "other.jsonl")
    base, other = (run["requests"] for run in document["runs"])
    [made] = document["comparisons"]
    assert made["different_count"] == 12 == len(made["different"])
    assert made["same_answers"] == made["both"] - 12 == len(records) - 12
    found = []
    for row in made["different"]:
        assert base["id"][row["base_row"]] == other["id"][row["other_row"]] == row["id"]
        found.append((row["id"], base["turn"][row["base_row"]], row["at"]))
        assert row["choice"] == 0
    assert sorted(found) == sorted(expected)


def test_requests_of_one_side_alone_and_other_prompts(out: Path, tmp_path: Path) -> None:
    """Fault: a request that one run has not is called different, or other prompts are not told."""
    records = read_records(out)
    kept = [record for record in records if record["line"] > 4]
    changed = [record for record in kept if record["error"] is None][:3]
    for record in changed:
        record["apcbatch"]["request_digest"] = f"{random.getrandbits(128):032x}"
    write_records(tmp_path / "part.jsonl", kept)
    forward, back = (
        document_of(*files)["comparisons"][0]
        for files in ((out, tmp_path / "part.jsonl"), (tmp_path / "part.jsonl", out))
    )
    assert forward["only_base"] == back["only_other"] == len(records) - len(kept) > 0
    assert forward["only_other"] == back["only_base"] == 0 and forward["both"] == len(kept)
    assert forward["other_requests"] == back["other_requests"] == 3 and forward["same_answers"] == len(kept)


def test_failures_and_other_models_are_told_apart(out: Path, tmp_path: Path) -> None:
    """Fault: a request that failed in one run, or an answer of another model, is counted as a wrong answer."""
    records = read_records(out)
    first = next(record for record in records if record["error"] is None)
    first["response"] = None
    first["error"] = {"code": "internal", "message": "lost", "line": first["line"], "retryable": True}
    write_records(tmp_path / "failed.jsonl", records)
    [made] = document_of(out, tmp_path / "failed.jsonl")["comparisons"]
    assert (made["different_count"], made["failed_count"], made["other_model"]) == (1, 1, True)  # it has no run file
    alone = {row["name"]: row["base"] for row in made["rows"] if row["other"] is None}
    assert alone["total seconds"] > 0 and None not in alone.values(), "a number that the other run has not"
    assert {row["name"]: row["other"] for row in made["changed_options"]} == {
        "version": None,
        "model_fingerprint": None,
    }
    facts = orjson.loads((tmp_path / "out.jsonl.run.json").read_bytes())
    for fingerprint, is_other in ((facts["model_fingerprint"], False), ("0" * 32, True)):
        other = {"model_fingerprint": fingerprint} | ({"version": "0"} if is_other else {})
        (tmp_path / "failed.jsonl.run.json").write_bytes(orjson.dumps(facts | other))
        [made] = document_of(out, tmp_path / "failed.jsonl")["comparisons"]
        assert made["other_model"] == is_other
        changed = {row["name"]: row["other"] for row in made["changed_options"]}
        assert changed == ({"version": "0", "model_fingerprint": fingerprint} if is_other else {})


def test_of_many_differences_the_first_are_listed(out: Path, tmp_path: Path) -> None:
    """Fault: two unrelated runs of many requests make a page of any size."""
    record = next(record for record in read_records(out) if record["error"] is None)
    for name, token in (("one.jsonl", 5), ("two.jsonl", 6)):
        record["apcbatch"]["completion_token_ids"] = [1, 2, token]
        lines = (record | {"id": f"apc-{n:06d}", "custom_id": f"r-{n}"} for n in range(MOST_LISTED + 200))
        write_records(tmp_path / name, list(lines))
    [made] = document_of(tmp_path / "one.jsonl", tmp_path / "two.jsonl")["comparisons"]
    assert made["different_count"] == MOST_LISTED + 200 and len(made["different"]) == MOST_LISTED
    assert {row["at"] for row in made["different"]} == {2}


def test_three_runs_are_compared_with_the_first(out: Path, tmp_path: Path) -> None:
    """Fault: a third run is compared with the second, or not at all."""
    for name in ("b.jsonl", "c.jsonl"):
        (tmp_path / name).write_bytes(out.read_bytes())
    made = document_of(out, tmp_path / "b.jsonl", tmp_path / "c.jsonl")["comparisons"]
    assert [(one["base"], one["other"]) for one in made] == [(0, 1), (0, 2)]


def test_scores_are_answers_too(real: Callable[..., Outcome], tmp_path: Path) -> None:
    """Fault: runs with --score generate nothing, so any two of them seem to be the same."""
    write_lines(tmp_path / "in.jsonl", [conversation(number) for number in range(3)])
    real("run", "in.jsonl", "-o", "one.jsonl", "--score", "--turns", "last", "-q")
    records = read_records(tmp_path / "one.jsonl")
    records[1]["apcbatch"]["score"]["token_logprobs"][2] -= 1e-7
    write_records(tmp_path / "two.jsonl", records)
    [made] = document_of(tmp_path / "one.jsonl", tmp_path / "two.jsonl")["comparisons"]
    assert [(row["id"], row["choice"], row["at"]) for row in made["different"]] == [(records[1]["custom_id"], 1, 2)]


def test_the_first_difference_of_several_answers() -> None:
    """Fault: only the first answer is looked at, or one that is missing is none."""
    draw = random.Random(random.randrange(1 << 30))
    for _ in range(300):
        one = [[draw.randrange(3) for _ in range(draw.randrange(4))] for _ in range(draw.randrange(1, 4))]
        two = [list(answer) for answer in one]
        choice = draw.randrange(len(two))
        at = draw.randrange(len(two[choice]) + 1)
        two[choice][at:] = [9] if at == len(two[choice]) or draw.random() < 0.5 else []
        if at < len(two[choice]) or at < len(one[choice]):
            assert first_difference(one, two) == first_difference(two, one) == (choice, at)
        assert first_difference(one, [*one, [1]]) == (len(one), 0)
        assert first_difference(one, [*one, []]) == first_difference([*one, []], one) == (len(one), 0)
        assert first_difference(one, one) == (0, 0), "they differ in something else, such as how they ended"


def test_a_line_that_is_too_long_has_no_tokens() -> None:
    """Fault: a line of an OUT that is left out because of its size ends the report when answers are compared."""
    out: Any = SimpleNamespace(read=lambda: iter([(1, None), (2, b'{"id":"other","x":1}')]))
    assert _tokens_of(out, {"a"}) == {}
