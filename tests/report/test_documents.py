"""The made-up documents, with which the page is tested, are as those of real runs are."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from apcbatch.errors import UsageError
from apcbatch.report.curve import MOST_CANDIDATES, read_curve
from tests.chats import conversation, write_lines
from tests.job.conftest import Outcome
from tests.report.conftest import document_of
from tests.report.documents import document

FREE = {"errors_by_code", "finish_reasons", "answer_warnings", "run_file", "machine"}  # mappings whose keys are data


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
    real = document_of(tmp_path / "a.jsonl", tmp_path / "b.jsonl", prompts=tmp_path / "in.jsonl")
    made = document(100, random.randrange(1 << 30), runs=3)
    made["comparisons"] = made["comparisons"][1:]
    real["curve"] = made["curve"] = None
    for run in (*real["runs"], *made["runs"]):  # the fake engine drafts nothing: tests/report/test_drafts.py
        run["drafts"] = run["requests"]["drafted"] = run["requests"]["accepted"] = None
    assert real["comparisons"][0]["changed_options"] and real["comparisons"][0]["different"]
    assert shape(real) == shape(made)


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


ROW = {"block_size": 64, "cached_tokens": 5, "computed_tokens": 0, "store_bytes": (1 << 60) - 1, "hit_rate": 0}


def test_the_bounds_of_a_curve(tmp_path: Path) -> None:
    """Fault: as many candidates as may be, or numbers at the ends of what they may be, are refused or changed."""
    path, rows = tmp_path / "tune.json", [ROW | {"block_size": size} for size in range(MOST_CANDIDATES, 0, -1)]
    for chosen in (7, None, "7"):
        recommended = {"block_size": chosen} if chosen else []
        path.write_text(json.dumps({"candidates": rows, "recommended": recommended, "policy": 3, "model": "m"}))
        curve = read_curve(str(path))
        assert [row["block_size"] for row in curve["candidates"]] == [*range(1, MOST_CANDIDATES + 1)]
        assert (curve["recommended"] or {}).get("block_size") == (7 if chosen == 7 else None)
        assert (curve["source"], curve["policy"], curve["model"]) == ("tune-block-size", "", "m")
        assert curve["candidates"][0] == ROW | {"block_size": 1, "predicted_s": None, "measured_s": None}


def test_another_file_than_a_curve(tmp_path: Path) -> None:
    """Fault: a traceback, or a picture of nothing or of numbers that no command writes."""
    for content, sentence in [
        ("", "cannot be read"),
        ("[]", "has no candidates"),
        ("{}", "has no candidates"),
        ('{"candidates":[]}', "has no candidates"),
        ({"candidates": [ROW] * (MOST_CANDIDATES + 1)}, "has no candidates"),
        ({"candidates": {"block_size": 1}}, "has no candidates"),
        ({"candidates": [3]}, "candidate 1 lacks"),
        ({"candidates": [ROW, ROW | {"block_size": True}]}, "candidate 2 lacks"),
        ({"candidates": [ROW | {"cached_tokens": -1}]}, "candidate 1 lacks"),
        ({"candidates": [ROW | {"store_bytes": 1 << 60}]}, "candidate 1 lacks"),
        ({"candidates": [ROW | {"hit_rate": None}]}, "candidate 1 lacks"),
        ({"candidates": [ROW | {"hit_rate": True}]}, "candidate 1 lacks"),
        ({"candidates": [ROW | {"measured_prefill_s": -0.5}]}, "candidate 1 lacks"),
        ({"candidates": [ROW | {"predicted_prefill_s": "1"}]}, "candidate 1 lacks"),
    ]:
        path = tmp_path / "tune.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        with pytest.raises(UsageError, match=f"--tune {path}:? {sentence}.*tune-block-size --json"):
            read_curve(str(path))
