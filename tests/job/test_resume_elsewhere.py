"""Going on where the same weights are computed by another arithmetic: on a cluster that may be, elsewhere not."""

from __future__ import annotations

import json

import pytest

from apcbatch.cluster import opening as cluster_opening
from tests.chats import conversation, read_records, write_lines
from tests.job.conftest import answers
from tests.job.fakes import FakeEngine

OPTIONS = ("--max-tokens", 3)
GPU = {"FAKE_FINGERPRINT": "e" * 64, "FAKE_NUMERICS": "bf16-of-a-gpu"}


@pytest.fixture
def ray(monkeypatch):
    """`--ray local` with the fake engine in the workers' place."""
    monkeypatch.setattr(
        cluster_opening, "open_cluster", lambda config, address, salt, warn, *rest: FakeEngine(config, warn)
    )
    return ("--ray", "local")


@pytest.fixture
def six(tmp_path):
    write_lines(tmp_path / "in.jsonl", [conversation(number) for number in range(6)])


def on_a_gpu(monkeypatch, whether=True):
    for name, value in GPU.items():
        monkeypatch.setenv(name, value) if whether else monkeypatch.delenv(name)


@pytest.mark.parametrize("where", ["then", "now"])
def test_a_cluster_goes_on_with_workers_of_another_kind(apcbatch, six, ray, tmp_path, monkeypatch, where):
    """Faults: a run that lost its GPUs cannot be ended on CPUs; records that do not say which arithmetic they have."""
    whole = apcbatch("run", "in.jsonl", "-o", "whole.jsonl", *OPTIONS)
    assert whole.code == 0
    apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS, "--limit", 2, *(ray if where == "then" else ()))
    first = read_records(tmp_path / "out.jsonl")
    on_a_gpu(monkeypatch)
    done = apcbatch(
        "run", "in.jsonl", "-o", "out.jsonl", *OPTIONS, "--resume", *(ray if where == "now" else ()), "--limit", 4
    )
    assert done.code == 0 and "f32-fake-1" in done.stderr and "bf16-of-a-gpu" in done.stderr
    again = apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS, "--resume", "--limit", 5)
    assert again.code == 0, "what was let pass once is let pass again, without a cluster too"
    on_a_gpu(monkeypatch, False)
    done = apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS, "--resume")
    assert done.code == 0 and "numerics" not in done.stderr
    records = read_records(tmp_path / "out.jsonl")
    assert answers(records) == answers(read_records(tmp_path / "whole.jsonl"))
    by_line = {}
    for record in records:
        by_line.setdefault(record["line"], set()).add(record["apcbatch"].get("numerics"))
    begun = {record["line"] for record in first}
    assert begun == {1, 2} and by_line == {
        line: {"bf16-of-a-gpu" if line in (3, 4, 5) else None} for line in range(1, 7)
    }
    facts = json.loads((tmp_path / "out.jsonl.run.json").read_text())
    assert facts["numerics"] == ["f32-fake-1", "bf16-of-a-gpu"] and facts["model_fingerprint"] == "f" * 64


def test_elsewhere_it_is_refused(apcbatch, six, tmp_path, monkeypatch):
    """Fault: answers of two arithmetics in one OUT without anybody having asked for it."""
    apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS, "--limit", 2)
    on_a_gpu(monkeypatch)
    done = apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS, "--resume")
    assert done.code == 2 and "model_fingerprint" in done.stderr


def test_other_weights_are_refused_on_a_cluster_too(apcbatch, six, ray, tmp_path, monkeypatch):
    """Fault: a cluster that goes on with another model under the same name."""
    apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS, "--limit", 2, *ray)
    on_a_gpu(monkeypatch)
    monkeypatch.setenv("FAKE_WEIGHTS", "c" * 64)
    before = (tmp_path / "out.jsonl").read_bytes()
    done = apcbatch("run", "in.jsonl", "-o", "out.jsonl", *OPTIONS, "--resume", *ray)
    assert done.code == 2 and "model_fingerprint" in done.stderr
    assert (tmp_path / "out.jsonl").read_bytes() == before
