"""`apcbatch store`: stat, check and prune on a real store."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

from apcbatch.cli.program import main
from apcbatch.store import Store

MODELS = {"mamba": b"\x01" * 32, "jamba": b"\x02" * 32}


@pytest.fixture
def folder(tmp_path):
    """A store with three snapshots of one model and two of another."""
    path = tmp_path / "states"
    with Store.open(path, warn=pytest.fail) as store:
        for name, fingerprint in MODELS.items():
            store.register(fingerprint, name)
            for position in range(64, 64 * (4 if name == "mamba" else 3), 64):
                key = hashlib.sha256(fingerprint + bytes([position])).digest()
                assert store.put(key, position, None, fingerprint, {"ssm": np.zeros((2, 64), np.float32)})
    return path


def test_stat_counts_by_model(folder, capsys):
    """Fault: a model is missing, or the counts are those of all."""
    assert main(["store", "stat", str(folder)]) == 0
    head, *models = capsys.readouterr().out.splitlines()
    assert "5 snapshots" in head and "KiB" in head
    assert any(
        "3 snapshots" in line and "up to 192 tokens" in line and line.endswith("mamba") for line in models
    )
    assert any("2 snapshots" in line and line.endswith("jamba") for line in models)
    assert main(["store", "stat", str(folder), "--json"]) == 0
    stats = json.loads(capsys.readouterr().out)
    entries = {model["name"]: model["entries"] for model in stats["models"]}
    assert stats["entries"] == 5 and entries == {"mamba": 3, "jamba": 2}


def test_check_lists_each_fault_then_the_count(folder, capsys):
    """Fault: a damaged snapshot passes, or the exit status of a damaged store is 0."""
    assert main(["store", "check", str(folder)]) == 0
    assert capsys.readouterr().out.startswith("5 snapshots are whole")
    victim = max(path for path in folder.rglob("*.safetensors"))
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.chmod(0o644)
    victim.write_bytes(data)
    assert main(["store", "check", str(folder)]) == 1
    *faults, count = capsys.readouterr().out.splitlines()
    assert len(faults) == 1 and victim.name in faults[0] and count.startswith("4 snapshots are whole")
    assert main(["store", "check", str(folder)]) == 0, "the bad file is gone"


def test_prune_by_model_by_size_and_by_age(folder, capsys):
    """Fault: the wrong snapshots are dropped, or more of them than asked for."""
    assert main(["store", "prune", str(folder), "--model", "jamba"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("2 snapshots") and "3 (" in out
    assert main(["store", "prune", str(folder), "--older-than", "1h"]) == 0
    assert capsys.readouterr().out.startswith("0 snapshots")
    assert main(["store", "prune", str(folder), "--size", "0"]) == 0
    assert capsys.readouterr().out.startswith("3 snapshots")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["stat", "nowhere"], "nowhere is not a folder"),
        (["prune", "STORE"], "nothing says what to drop"),
        (["prune", "STORE", "--size", "much"], "--size is 'much'; expected a size such as 5GiB"),
        (["prune", "STORE", "--older-than", "long"], "--older-than is 'long'; expected an age such as"),
        (["prune", "STORE", "--model", "gamba"], "the store has no model 'gamba'; it has:"),
    ],
)
def test_what_cannot_be_done_ends_with_2_and_a_sentence(folder, capsys, arguments, sentence):
    """Fault: a slip drops everything, makes a new store, or ends in a traceback."""
    assert main(["store", *(str(folder) if word == "STORE" else word for word in arguments)]) == 2
    assert sentence in capsys.readouterr().err
