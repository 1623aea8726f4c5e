"""The configurations that users copy: each is read, and a small run with it succeeds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from apcbatch.cli.program import main
from apcbatch.config import OPTIONS

FOLDER = Path(__file__).resolve().parent.parent / "configs"
FILES = sorted(FOLDER.glob("*.yaml"))
LINE = {"id": "c", "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}


def test_there_are_configurations_and_nothing_else():
    """Fault: a file that no test reads."""
    assert FILES and sorted(FOLDER.iterdir()) == FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_small_run_with_it(path, tmp_path, monkeypatch):
    """Fault: an option that was renamed, or values that do not go together."""
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text(json.dumps(LINE) + "\n")
    smaller = ["--device", "cpu", "--max-tokens", "2", "--pool-size", "64MiB", "--max-running", "4"]
    assert main(["run", "in.jsonl", "-o", "out.jsonl", "--config", str(path), *smaller, "-q"]) == 0
    (record,) = map(json.loads, Path("out.jsonl").read_text().splitlines())
    assert record["error"] is None
    given = yaml.safe_load(path.read_text())
    assert given and given.keys() <= OPTIONS.keys()
