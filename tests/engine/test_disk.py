"""Snapshots that outlive the engine: found again, put together, never believed when not whole (cases 16 to 19)."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from apcbatch import Engine, Request, Result
from apcbatch.model.arena import StateArena
from apcbatch.store import Store
from tests.engine.runs import tokens


def serve(folder: Path, store: Path, prompt: list[int], **options: object) -> tuple[Result, list[str]]:
    """(the result, the warnings) of one request in an engine of its own."""
    warnings: list[str] = []
    options = {"block_size": 16, "pool_size_bytes": 64 << 20, "warn": warnings.append, **options}
    engine = Engine(folder, store=store, **options)
    (result,) = engine.run([Request("r", prompt, max_tokens=4, ignore_eos=True, logprobs=True)])
    engine.close()
    assert result.error is None
    return result, warnings


def snapshot_files(store: Path) -> list[Path]:
    """The store's snapshot files, largest position last (a later link of a chain is never older)."""

    def position(path: Path) -> int:
        size = int.from_bytes(path.read_bytes()[:8], "little")
        return int(json.loads(path.read_bytes()[8 : 8 + size])["__metadata__"]["position"])

    return sorted(store.glob("objects/**/*.safetensors"), key=position)


@pytest.fixture(params=[True, False], ids=["on the host", "staged"], autouse=True)
def on_host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slots where the host reaches them, and as if they were on a device."""
    monkeypatch.setattr(StateArena, "on_host", request.param)


def test_other_weights_never_hit(tiny_checkpoint, tmp_path: Path) -> None:
    """Catches a fingerprint without the weights, the dtype or the architecture."""
    prompt = tokens(300, 3)
    serve(tiny_checkpoint("mamba"), tmp_path, prompt)
    for other, options in (
        (tiny_checkpoint("mamba", seed=1), {}),
        (tiny_checkpoint("mamba"), {"dtype": "bfloat16"}),
        (tiny_checkpoint("mamba", conv_kernel=3), {}),
    ):
        assert serve(other, tmp_path, prompt, **options)[0].cached_tokens == 0


def test_the_last_position_where_both_exist(tiny_checkpoint, tmp_path: Path) -> None:
    """Catches a hit whose KV or recurrent state is not there: without its last file the hit is one boundary shorter,
    and without one in the middle of the chain it is the boundary before that."""
    folder = tiny_checkpoint("jamba")
    prompt = tokens(200, 4)
    cold, _ = serve(folder, tmp_path, prompt)
    files = snapshot_files(tmp_path)
    assert len(files) == 12
    files[11].unlink()
    assert serve(folder, tmp_path / "", prompt, policy="last")[0].cached_tokens == 176
    snapshot_files(tmp_path)[5].unlink()
    warm, _ = serve(folder, tmp_path, prompt)
    assert (warm.cached_tokens, warm.miss_reason) == (80, "stranded")
    assert (warm.token_ids, warm.logprobs) == (cold.token_ids, cold.logprobs)


@pytest.mark.drawn(8)
@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "swap"])
def test_a_bad_file_is_a_miss(damage: str, folder: Path, tmp_path: Path) -> None:
    """Catches a damaged file that becomes an answer, or that ends the run."""
    prompt = tokens(100, 5)
    cold, _ = serve(folder, tmp_path, prompt)
    last, before = snapshot_files(tmp_path)[-1], snapshot_files(tmp_path)[-2]
    content = bytearray(last.read_bytes())
    if damage == "flip":
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    last.write_bytes({"truncate": content[:-1], "flip": content, "empty": b"", "swap": before.read_bytes()}[damage])
    warm, warnings = serve(folder, tmp_path, prompt)
    assert warm.cached_tokens == 80
    assert len(warnings) == 1
    assert (warm.token_ids, warm.logprobs) == (cold.token_ids, cold.logprobs)


@contextmanager
def closing_engine(folder: Path, **options: object) -> Iterator[Engine]:
    engine = Engine(folder, **{"pool_size_bytes": 64 << 20, **options})
    try:
        yield engine
    finally:
        engine.close()


def test_an_engine_that_is_left_in_haste_ends(tiny_checkpoint, tmp_path: Path) -> None:
    """Catches threads that wait for a buffer that is never given back, and snapshots on their way that are lost:
    what waits is dropped after one step, with reads and writes under way."""
    folder, options = tiny_checkpoint("mamba"), {"block_size": 16, "pool_size_bytes": 64 << 20, "max_running": 2}
    prompts = [tokens(300, seed) for seed in range(20)]
    requests = [Request(str(i), prompt, max_tokens=2, ignore_eos=True) for i, prompt in enumerate(prompts)]
    for number in range(3):
        engine = Engine(folder, store=tmp_path, **options)
        for request in requests[: 20 if number else 2]:
            engine.submit(request)
        engine.step()
        engine.drop_waiting()
        engine.step()
        engine.abort()
        engine.close()
    assert not engine.num_unfinished
    with Store.open(tmp_path, warn=pytest.fail) as store:
        report = store.check()
        assert not report.faults and store.stats().entries == 2 * 18


@pytest.mark.drawn(3)
@pytest.mark.parametrize("num_left", [0, 3, 10])
def test_the_limit_holds_where_nothing_is_stored(num_left: int, tiny_checkpoint, tmp_path: Path) -> None:
    """Fault: 15 MB stayed in a store under --store-size 30KiB, and some under 0, if a run stored nothing new. And a run
    evicted nearly all without a word; looking into a store evicts nothing."""
    folder, told = tiny_checkpoint("mamba"), list[str]()
    with closing_engine(folder, store=tmp_path, block_size=16) as engine:
        list(engine.run([Request("r", tokens(200, 1), max_tokens=1)]))
    with Store.open(tmp_path, size_limit_bytes=0, warn=pytest.fail) as store:
        count, num_bytes = store.held
    assert count == 12
    limit = num_left * num_bytes // count
    with closing_engine(folder, store=tmp_path, store_size_bytes=limit, block_size=16, warn=told.append) as engine:
        (warm,) = engine.run([Request("r", tokens(200, 1), max_tokens=1)])
    assert warm.cached_tokens == 192
    with Store.open(tmp_path, warn=pytest.fail) as store:
        assert limit - num_bytes / count < store.held[1] <= limit and not store.check().faults
    wanted = [
        f"{num_bytes:,} bytes in 12 snapshots",
        f"--store-size is {limit:,} bytes",
        f"{num_bytes - limit:,} bytes",
    ]
    assert all(one in " ".join(told) for one in wanted) if num_left < 6 else not told
