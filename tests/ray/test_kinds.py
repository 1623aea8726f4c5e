"""Workers whose arithmetic differs, in one run: each record has the bits of a run that has that arithmetic alone."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from apcbatch.kernels.isa import available_isas
from tests.ray.conftest import ROOT
from tests.ray.test_run import command, environment, run, without_times

pytestmark = [pytest.mark.ray, pytest.mark.ray_runs]


def bits(record: dict[str, Any]) -> Any:
    """What the arithmetic decides of a record."""
    return without_times(record["response"]["body"]["choices"])


def read(path: Path) -> dict[str, dict[str, Any]]:
    return {record["id"]: record for record in map(json.loads, path.read_text().splitlines())}


@pytest.fixture
def unlike(conversations: Path, tmp_path: Path) -> Path:
    """Conversations that begin in different ways: only what begins alike stays with one arithmetic."""
    path, lines = tmp_path / "unlike.jsonl", []
    for number, line in enumerate(3 * conversations.read_text().splitlines()):
        record = json.loads(line)
        record["messages"][0]["content"] = f"{number} {record['messages'][0]['content']}"
        record["id"] = f"{number}"
        lines.append(json.dumps(record) + "\n")
    path.write_text("".join(lines))
    return path


@pytest.mark.skipif("avx512bf16" not in available_isas(), reason="the kernels of this processor all compute alike")
def test_records_say_which_arithmetic_they_have(
    nodes: Any, tmp_path: Path, unlike: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a state that goes from one arithmetic to the other, and a record that does not say which one it has."""
    words = (unlike, "--dtype", "bfloat16", "--logprobs")
    cluster = ("--ray", nodes.address)
    mixed = command(*words, "-o", tmp_path / "mixed.jsonl", *cluster, "-q")
    mixed[1:3] = ["-m", "tests.ray.two_kinds"]
    done = subprocess.run(mixed, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    own = json.loads((tmp_path / "mixed.jsonl.run.json").read_text())["numerics"][0]
    records = read(tmp_path / "mixed.jsonl")
    of_isa = {}
    for isa in ("avx2", "avx512bf16"):
        out = tmp_path / f"{isa}.jsonl"
        monkeypatch.setenv("APCBATCH_ISA", isa)
        run(*words, "-o", out)
        numerics = json.loads(out.with_name(out.name + ".run.json").read_text())["numerics"][0]
        of_isa[numerics] = read(out)
    used = set()
    for name, record in records.items():
        numerics = record["apcbatch"].get("numerics", own)
        used.add(numerics)
        assert bits(record) == bits(of_isa[numerics][name])
    assert used == set(of_isa), "one of the workers got nothing to do"
