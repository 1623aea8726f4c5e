"""`apcbatch store`: stat, check and prune on a real store."""

from __future__ import annotations

import errno
import hashlib
import json
import sqlite3
import time
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from apcbatch.cli.program import main
from apcbatch.cli.store import _parse_age
from apcbatch.store import Store
from apcbatch.store.index import ModelStats
from apcbatch.store.store import StoreStats

STORE_COMMANDS = {"stat": (), "check": (), "prune": ("--size", "1")}
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
    assert "5 snapshots, " in head and "KiB" in head and "stranded" not in head
    assert any(line.startswith(f"  {'01' * 6}  ") for line in models)
    assert any("3 snapshots" in line and "up to 192 tokens" in line and line.endswith("mamba") for line in models)
    assert any("2 snapshots" in line and line.endswith("jamba") for line in models)
    assert main(["store", "stat", str(folder), "--json"]) == 0
    stats = json.loads(capsys.readouterr().out)
    entries = {model["name"]: model["entries"] for model in stats["models"]}
    assert stats["entries"] == 5 and entries == {"mamba": 3, "jamba": 2}


def test_check_lists_each_fault_then_the_count(folder, capsys):
    """Fault: a damaged snapshot passes, or the exit status of a damaged store is 0."""
    assert main(["store", "check", str(folder)]) == 0
    assert capsys.readouterr().out.startswith("5 whole snapshots (")
    victim = max(path for path in folder.rglob("*.safetensors"))
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.chmod(0o644)
    victim.write_bytes(data)
    assert main(["store", "check", str(folder)]) == 1
    *faults, count = capsys.readouterr().out.splitlines()
    assert len(faults) == 1 and victim.name in faults[0] and count.startswith("4 whole snapshots (")
    assert main(["store", "check", str(folder)]) == 0, "the bad file is gone"


def test_prune_by_model_by_size_and_by_age(folder, capsys):
    """Fault: the wrong snapshots are dropped, or more of them than asked for."""
    assert main(["store", "prune", str(folder), "--model", "models/jamba/"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("2 snapshots") and "3 (" in out
    assert main(["store", "prune", str(folder), "--older-than", "1h"]) == 0
    assert capsys.readouterr().out.startswith("0 snapshots")
    assert main(["store", "prune", str(folder), "--size", "0"]) == 0
    assert capsys.readouterr().out.startswith("3 snapshots")


def test_what_cannot_be_done_ends_with_2_and_a_sentence(folder, capsys):
    """Fault: a slip drops everything, makes a new store, or ends in a traceback."""
    for arguments, sentence in [
        *(([one, "nowhere", *more], "there is no store at nowhere; give the") for one, more in STORE_COMMANDS.items()),
        *(([one, *more], "Missing argument 'DIR'") for one, more in STORE_COMMANDS.items()),
        (["prune", "STORE"], "nothing says what to drop"),
        (["prune", "STORE", "--size", "much"], "--size is 'much'; expected a size such as 5GiB"),
        (["prune", "STORE", "--older-than", "long"], "--older-than is 'long'; expected an age such as"),
        (["prune", "STORE", "--model", "gamba"], "the store has no model 'gamba'; it has:"),
    ]:
        assert main(["store", *(str(folder) if word == "STORE" else word for word in arguments)]) == 2
        assert sentence in capsys.readouterr().err


def test_what_is_no_store_and_what_has_no_index_say_nothing_of_a_run(folder, capsys):
    """Fault: the commands ask for a new folder, as `run` does, or warn of a run that continues."""
    for command, more in STORE_COMMANDS.items():
        assert main(["store", command, str(folder.parent), *more]) == 2
        assert "so nothing in it is touched; give the --store folder of an earlier run\n" in capsys.readouterr().err
    (folder / "index.sqlite").unlink()
    assert main(["store", "stat", str(folder)]) == 2
    said = capsys.readouterr().err
    assert "no index that can be read; run: apcbatch store check" in said and "continues" not in said


def test_a_store_that_this_user_cannot_read_says_so(folder, capsys, monkeypatch):
    """Fault: the commands warn of a run that continues without it, name the cause twice, and advise themselves."""
    monkeypatch.setattr("apcbatch.store.folder.identify", refused)
    for command, more in STORE_COMMANDS.items():
        assert main(["store", command, str(folder), *more]) == 2
        said = f"apcbatch: the store {folder} cannot be read: Permission denied; check its owner and mode\n"
        assert capsys.readouterr().err == said
    monkeypatch.setattr("apcbatch.store.environment.Files.kind", refused)
    assert main(["store", "stat", str(folder / "below")]) == 2
    assert "below cannot be read: Permission denied; check its owner and mode" in capsys.readouterr().err


def refused(*_):
    raise PermissionError(errno.EACCES, "Permission denied")


def test_stat_of_any_time(folder, capsys):
    """Fault: a time that no clock shows ended `store stat` in an internal error."""
    for last_used in [1e300, -1e300, 1e11, 0.0]:
        db = sqlite3.connect(folder / "index.sqlite")
        db.execute("UPDATE snapshots SET last_used = ?", (last_used,))
        db.commit()
        db.close()
        assert main(["store", "stat", str(folder)]) == 0
        assert f"last used {'20' if last_used > 0 else 'never'}" in capsys.readouterr().out
        assert main(["store", "stat", str(folder), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["models"][0]["last_used"] <= time.time()


def test_prune_by_any_number_or_name(folder, capsys):
    """Fault: a size of 5,000 digits ended in an internal error."""
    for option, value, status in [
        ("--size", "9" * 30 + "TiB", 0),
        ("--size", "9" * 5000, 2),
        ("--size", "-5", 2),
        ("--size", "1e3", 2),
        ("--older-than", "9" * 5000 + "d", 0),
        ("--older-than", "-5d", 2),
        ("--older-than", "0s", 0),
        ("--model", "", 2),
        ("--model", "\udcff", 2),
    ]:
        assert main(["store", "prune", str(folder), option, value]) == status
        assert "internal error" not in capsys.readouterr().err


def test_a_name_out_of_the_store_cannot_command_the_terminal(folder, capsys):
    """Fault: a model's name, or a file's, is printed with the escapes that it holds."""
    db = sqlite3.connect(folder / "index.sqlite")
    db.execute("UPDATE models SET name = 'a' || char(27) || '[2Jb' || char(10) || 'c' || id")
    db.commit()
    db.close()
    (folder / "objects" / "x\x1b[2J\ny").write_text("mine")
    assert main(["store", "stat", str(folder)]) == 0
    assert main(["store", "check", str(folder)]) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out and len(out.splitlines()) == 3 + 2
    assert (folder / "objects" / "x\x1b[2J\ny").exists()


def test_a_folder_whose_name_is_no_text(folder, capsys):
    """Fault: `store stat --json` of a folder whose name is not UTF-8 ended in an internal error."""
    odd = folder.rename(folder.with_name("st\udcffates"))
    assert main(["store", "stat", str(odd), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["entries"] == 5
    for command in (["stat"], ["check"], ["prune", "--size", "0"]):
        assert main(["store", command[0], str(odd), *command[1:]]) == 0


def test_an_age_is_in_its_unit():
    """Fault: snapshots are dropped that are younger than was said."""
    for age, seconds in [
        ("90s", 90),
        ("90m", 5_400),
        ("12h", 43_200),
        ("30d", 2_592_000),
        ("8w", 4_838_400),
        (" 1.5H ", 5_400),
    ]:
        assert _parse_age(age) == seconds


@pytest.mark.parametrize(
    ("words", "given", "options", "out"),
    [
        (["stat"], None, {"read_only": True}, (
            "S: 5 snapshots, 2 of them stranded, 1.5 KiB\n"
            "  abababababab         4 snapshots     1.0 KiB  up to 192 tokens  restored 7 times  last used TIME  a?b\n"
            "  cdcdcdcdcdcd          1 snapshot       512 B  up to 64 tokens  restored 0 times  last used never  \n"
        )),
        (["check"], (), {"maintenance": True}, (
            "a?b is torn\n"
            "1 whole snapshot (2.0 KiB), 1 fault; 3 files and 4 index rows removed, 5 rows added, "
            "6 snapshots stranded\n"
        )),
        (["prune", "--size", "2KiB"], (2048, None, None), {"maintenance": True},
         "1 snapshot (2.0 KiB) dropped; 3 (4.0 KiB) are left\n"),
        (["prune", "--older-than", "2m", "--model", "org/m"], (None, 120.0, "org/m"), {"maintenance": True}, None),
        (["prune", "--model", "./x/m/"], (None, None, "m"), {"maintenance": True}, None),
    ],
)  # fmt: skip
def test_each_number_stands_in_its_place(tmp_path, monkeypatch, capsys, words, given, options, out):
    """Fault: a number is printed as another one, a store is locked to look into it, or a bound is lost on its way."""
    used = time.mktime((2026, 5, 4, 3, 2, 1, 0, 0, -1))
    models = [ModelStats("a\x1bb", "ab" * 32, 4, 1024, 192, 7, used), ModelStats("", "cd" * 32, 1, 512, 64, 0, 0.0)]
    stats = StoreStats("S", 1, 5, 1536, 9, 2, models)
    numbers = {"num_verified": 1, "num_bytes": 2048, "num_files_removed": 3, "num_rows_dropped": 4, "num_adopted": 5}
    checked = SimpleNamespace(faults=["a\x1bb is torn"], num_stranded=6, **numbers)
    left = {"num_removed": 1, "num_bytes_removed": 2048, "num_left": 3, "num_bytes_left": 4096}
    calls = []
    opened = SimpleNamespace(
        stats=lambda: stats,
        check=lambda *of: calls.append(of) or checked,
        prune=lambda *of: calls.append(of) or SimpleNamespace(**left),
    )
    monkeypatch.setattr(Store, "open", lambda folder, warn, **how: calls.append(how) or nullcontext(opened))
    assert main(["store", words[0], str(tmp_path), *words[1:]]) == (words == ["check"])
    assert calls == [options] + [given] * (given is not None)
    assert out is None or capsys.readouterr().out == out.replace("TIME", "2026-05-04 03:02")
