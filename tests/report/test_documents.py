"""The made-up documents, with which the page is tested, are as those of real runs are."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from apcbatch.job.trace_file import read_trace
from apcbatch.report.curve import read_curve
from apcbatch.report.tree import merge_stems
from tests.chats import conversation, write_lines
from tests.job.conftest import Outcome
from tests.report.conftest import document_of
from tests.report.documents import document, trace_lines

FREE = {"errors_by_code", "run_file", "machine"}  # mappings whose keys are data


def shape(value: Any, name: str = "") -> Any:
    """The keys of all mappings, as far as they do not depend on data."""
    if isinstance(value, dict) and name not in FREE:
        return {key: shape(one, key) for key, one in sorted(value.items())}
    if isinstance(value, list) and value and isinstance(value[0], dict) and name != "calls":
        return [shape(value[0])]
    return ...


def test_a_made_up_document_has_the_form_of_a_real_one(apcbatch: Callable[..., Outcome], tmp_path: Path) -> None:
    """Fault: the page is tested with a form that no run has."""
    write_lines(tmp_path / "in.jsonl", [conversation(number) for number in range(20)])
    for name, number in (("a.jsonl", 4), ("b.jsonl", 5)):
        apcbatch("run", "in.jsonl", "-o", name, "--max-tokens", number, "--policy", "all", "-q")
    real = document_of(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    made = document(100, random.randrange(1 << 30), runs=3)
    made["comparisons"] = made["comparisons"][1:]
    real["curve"] = made["curve"] = None
    assert real["comparisons"][0]["changed_options"] and real["comparisons"][0]["different"]
    assert shape(real) == shape(made)


def test_a_made_up_trace_is_one(tmp_path: Path) -> None:
    """Fault: the reports of a test are made of what no reader of traces accepts."""
    path = tmp_path / "out.jsonl.trace.jsonl"
    path.write_bytes(b"".join(trace_lines(120, random.randrange(1 << 30), 3)))
    trace = read_trace(path)
    assert len(trace.segments) == 3 and not trace.notes
    tree = merge_stems(trace.segments)
    assert tree is not None and sum(tree["restored"]) == sum(map(sum, (one.stems.restored for one in trace.segments)))


def test_the_curve_of_a_plan(real: Callable[..., Outcome], tmp_path: Path) -> None:
    """Fault: a document that `plan --json` writes today is refused, or shown with other numbers."""
    write_lines(tmp_path / "in.jsonl", [conversation(number, turns=3) for number in range(4)])
    assert real("plan", "in.jsonl", "--json", "plan.json", "--block-sizes", "16,1,64").code == 0
    curve = read_curve(str(tmp_path / "plan.json"))
    assert [row["block_size"] for row in curve["candidates"]] == [1, 16, 64]
    assert curve["source"] == "plan" and curve["recommended"] is None
    assert all(row["predicted_s"] is None and row["cached_tokens"] >= 0 for row in curve["candidates"])
    made = document(10)["curve"]
    assert shape(curve) | {"recommended": ...} == shape(made) | {"recommended": ...}


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"candidates":[]}', b'{"candidates":[3]}', b'{"candidates":[{"block_size":true}]}']
)
def test_another_file_than_a_curve(content: bytes, real: Callable[..., Outcome], tmp_path: Path) -> None:
    """Fault: a traceback, or a picture of nothing."""
    (tmp_path / "out.jsonl").write_bytes(b"")
    (tmp_path / "tune.json").write_bytes(content)
    done = real("report", "out.jsonl", "--tune", "tune.json")
    assert done.code == 2 and "tune-block-size --json" in done.stderr and not (tmp_path / "out.report.html").exists()
