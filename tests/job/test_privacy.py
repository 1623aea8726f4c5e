"""What a run leaves of its user's secrets and paths, and what the tenants of one store can tell of each other."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path

import pytest

from apcbatch.cli.program import main
from apcbatch.fingerprint import key_fingerprint
from apcbatch.model.locate import DEMO_DIR, name_of
from tests.chats import conversation, read_records, write_lines

SALT = "kHj4-zebra-9Qx"


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """run(*options) -> (prompt tokens that came from disk, texts) of one conversation with the bundled model and the
    store `states`; code: the exit code, with nothing to return where it is not 0."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("APCBATCH_BLOCK_SIZE", "16")
    monkeypatch.delenv("APCBATCH_POLICY")
    write_lines(tmp_path / "in.jsonl", [conversation(1, turns=3)])

    def answer(*options, code=0):
        command = ["run", "in.jsonl", "-o", "out.jsonl", "--store", "states", "--max-tokens", "2", *options]
        capsys.readouterr()
        assert main([*command, *(["--overwrite"] * ("--resume" not in options))]) == code
        if code:
            return None
        summary = json.loads(capsys.readouterr().out.splitlines()[-1])
        records = read_records(tmp_path / "out.jsonl")
        texts = {record["custom_id"]: record["response"]["body"]["choices"][0]["message"] for record in records}
        return summary["cached_by_source"]["disk"], texts

    return answer


def holders(folder: Path, secret: str) -> list[str]:
    """The files below a folder that hold a text, in any of its usual forms."""
    forms = [secret.encode(), secret.encode().hex().encode(), secret.encode("utf-16-le")]
    return [str(path) for path in folder.rglob("*") if path.is_file() and any(f in path.read_bytes() for f in forms)]


@pytest.mark.drawn(1)
@pytest.mark.slow
@pytest.mark.parametrize("policy", ["planned", "all"])
def test_tenants_with_two_salts_find_nothing_of_each_other(run, policy) -> None:
    """Fault: whoever shares a store sees by a hit which prompts another one sent."""
    choice = ["--policy", policy]
    found, cold = run(*choice, "--cache-salt", SALT)
    assert found == 0
    for other in (["--cache-salt", SALT + "!"], []):
        assert run(*choice, *other) == (0, cold)
    for own in (["--cache-salt", SALT], []):
        found, warm = run(*choice, *own)
        assert found > 0
        assert warm == cold


def test_a_salt_makes_other_keys_and_none_leaves_them() -> None:
    """Fault: stores of earlier runs are lost to those who give no salt; or the salt is not in the keys."""
    print_of_a_model = bytes(range(32))
    assert key_fingerprint(print_of_a_model, None) == print_of_a_model
    made = {key_fingerprint(print_of_a_model, salt) for salt in ("a", "b", "ab", "é", "a" * 100)}
    assert len(made | {print_of_a_model}) == 6
    assert {len(key) for key in made} == {32}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("given", ["flag", "variable", "file"])
def test_the_salt_is_written_nowhere(run, tmp_path, capsys, monkeypatch, given) -> None:
    """Fault: the run file, the store, what is printed or the command that continues tells the salt."""
    options = {"flag": ["--cache-salt", SALT], "variable": [], "file": ["--config", "c.yaml"]}[given]
    (tmp_path / "c.yaml").write_text(f"cache_salt: {SALT}\n")
    if given == "variable":
        monkeypatch.setenv("APCBATCH_CACHE_SALT", SALT)
    run(*options)
    assert holders(tmp_path, SALT) == [str(tmp_path / "c.yaml")]
    main(["run", "--show-config", *options])
    shown = capsys.readouterr()
    assert SALT not in shown.out + shown.err
    assert "cache_salt: null" in shown.out and "(a secret, not shown)" in shown.out


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("options", "variable", "expected"),
    [
        (["--cache-salt", SALT], None, ["--cache-salt", "@FILE"]),
        (["--cache-salt", "@salt"], None, ["--cache-salt", "@salt"]),
        ([], "@salt", ["--cache-salt", "@salt"]),
        ([], SALT, []),  # the variable is still there
    ],
)
def test_the_command_that_continues_asks_for_the_salt(
    run, tmp_path, capsys, monkeypatch, options, variable, expected
) -> None:
    """Fault: it holds the salt, or continues without one and keeps the rest of the prompts where all find them."""
    (tmp_path / "salt").write_text(SALT)
    with open(tmp_path / "in.jsonl", "a") as file:
        file.write("this is no JSON\n")
    if variable:
        monkeypatch.setenv("APCBATCH_CACHE_SALT", variable)
    run(*options, "--strict", code=1)
    words = shlex.split(capsys.readouterr().err.splitlines()[-1])
    found = words[words.index("--cache-salt") :][:2] if "--cache-salt" in words else []
    assert found == expected


def test_another_salt_may_resume(run) -> None:
    """Fault: a salt, which changes no answer, binds OUT; forgotten, the answers would be lost."""
    run("--cache-salt", SALT)
    assert len(run("--cache-salt", SALT + "!", "--resume")[1]) == 3


def test_the_store_holds_no_path(run, tmp_path, capsys) -> None:
    """Fault: models.name is the --model path, so that whoever shares the store reads home folders and project names."""
    model = tmp_path / "secret-project" / "my-mamba"
    shutil.copytree(DEMO_DIR, model)
    run("--model", str(model))
    assert not holders(tmp_path / "states", "secret-project")
    capsys.readouterr()
    assert main(["store", "stat", "states"]) == 0
    assert capsys.readouterr().out.splitlines()[1].endswith("  my-mamba")
    assert main(["store", "prune", "states", "--model", str(model)]) == 0
    assert "; 0 (0 B) are left" in capsys.readouterr().out


def test_names_of_models(tmp_path, monkeypatch) -> None:
    """Fault: a hub id loses its organisation, or a folder given in another way its name."""
    monkeypatch.chdir(tmp_path)
    os.makedirs("models/mine")
    names = ["demo", "org/name", "models/mine", "./models/mine/", "models/../models/mine", "/a/b/c", "~/x"]
    assert [name_of(name) for name in names] == ["demo", "org/name", "mine", "mine", "mine", "c", "x"]
    monkeypatch.chdir("models/mine")
    assert name_of(".") == "mine"
