"""Weights that change on disk while a model is loaded, or while it runs: the answers of the untouched file, or a
sentence."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from apcbatch import Engine, Request
from apcbatch.engine import parts
from apcbatch.errors import ModelError
from apcbatch.model.devices import make_arena
from apcbatch.model.weights import Checkpoint
from tests.engine.runs import serve, tokens, told
from tests.model.folders import SINGLE, sharded
from tests.tiny import FAMILIES

OPTIONS = {"block_size": 8, "pool_size_bytes": 4 << 20, "policy": "all"}
REQUESTS = [Request(f"r{seed}", tokens(30, seed), max_tokens=8, ignore_eos=True) for seed in range(3)]


def rewrite(path: Path, other: Path) -> None:
    """As `cp` and `rsync --inplace` do: other bytes in the same file."""
    with open(path, "r+b") as file:
        file.write(other.read_bytes())


def cut(path: Path, other: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replace(path: Path, other: Path) -> None:
    """As `hf download` and `rsync` do: another file of the same name."""
    shutil.copy(other, f"{path}.new")
    os.replace(f"{path}.new", path)


def remove(path: Path, other: Path) -> None:
    path.unlink()


CHANGES = {change.__name__: change for change in (rewrite, cut, replace, remove)}


@pytest.fixture
def folder(family: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of a tiny checkpoint, written a second ago."""
    copied = Path(shutil.copytree(tiny_checkpoint(family), tmp_path / "model"))
    written = (copied / SINGLE).stat().st_mtime_ns - 10**9
    os.utime(copied / SINGLE, ns=(written, written))
    return copied


@pytest.mark.drawn(5)
@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_that_change_under_a_run(
    family: str, dtype: str, change: str, folder: Path, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Fault: weights that were used from the mapped file became those of another model, or ended the process with
    SIGBUS; the store kept the states of both under the fingerprint of the first."""
    options, other = {**OPTIONS, "dtype": dtype}, tiny_checkpoint(family, seed=1)
    expected = serve(Engine(folder, **options), REQUESTS)
    engine = Engine(folder, **options, store=tmp_path / "store")
    CHANGES[change](folder / SINGLE, other / SINGLE)
    results = serve(engine, REQUESTS)
    assert {name: told(result) for name, result in results.items()} == {
        name: told(result) for name, result in expected.items()
    }
    for model in (tiny_checkpoint(family), other):
        cold = expected if model != other else serve(Engine(other, **options), REQUESTS)
        results = serve(Engine(model, **options, store=tmp_path / "store"), REQUESTS)
        assert {name: told(result) for name, result in results.items()} == {
            name: told(result) for name, result in cold.items()
        }
        assert any(result.cached_tokens for result in results.values()) == (model != other)


@pytest.mark.drawn(6)
@pytest.mark.slow
@pytest.mark.pairwise
@pytest.mark.parametrize("taken", [1, 5, 12])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_that_change_while_they_are_read(
    family: str, change: str, taken: int, folder: Path, tiny_checkpoint: Callable[..., Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Fault: a model of two files' tensors computes answers; a file that is cut is SIGBUS."""
    take, count = Checkpoint.take, [0]

    def change_later(self: Checkpoint, name: str, shape: tuple[int, ...]):
        count[0] += 1
        if count[0] == taken:
            CHANGES[change](folder / SINGLE, tiny_checkpoint(family, seed=1) / SINGLE)
        return take(self, name, shape)

    tiny_checkpoint(family, seed=1)
    monkeypatch.setattr(Checkpoint, "take", change_later)
    with pytest.raises(ModelError, match=f"{SINGLE} changed while it was read; run again once nothing writes to it$"):
        Engine(folder, **OPTIONS, store=tmp_path / "store")
    assert not list(tmp_path.glob("store/**/*.safetensors"))


@pytest.mark.parametrize("family", ["mamba"])
def test_weights_that_change_after_they_were_checked(
    family: str, folder: Path, tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: the file that is loaded is not the one whose sizes were checked."""
    other = tiny_checkpoint(family, seed=1)

    def make_later(*given: Any) -> Any:
        replace(folder / SINGLE, other / SINGLE)
        return make_arena(*given)

    monkeypatch.setattr(parts, "make_arena", make_later)
    with pytest.raises(ModelError, match=f"{SINGLE} changed while it was read"):
        Engine(folder, **OPTIONS)


@pytest.mark.parametrize("family", ["mamba"])
def test_one_of_several_files_changes(
    family: str, folder: Path, stages: Callable[[int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: only the file that was read last is compared, or a model over several devices compares none."""
    shards = sharded(folder, tmp_path / "shards", 3)
    finish = Checkpoint.finish
    for path in sorted(shards.glob("*.safetensors")):
        whole = path.read_bytes()

        def change_first(self: Checkpoint, path: Path = path) -> bytes:
            path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\0")
            return finish(self)

        os.utime(path, ns=(0, 0))
        monkeypatch.setattr(Checkpoint, "finish", change_first)
        for count in (1, 2):
            stages(count)
            with pytest.raises(ModelError, match=f"{path.name} changed while it was read"):
                Engine(shards, **OPTIONS)
        path.write_bytes(whole)
