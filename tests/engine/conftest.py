"""Engines of tiny models, closed when their test ends; on one thread, since more would only wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from apcbatch.model.causal_lm import CausalLM
from tests.engine.opened import OpenedEngine


@pytest.fixture(autouse=True)
def _on_one_thread(one_thread: None) -> None:
    pass


@pytest.fixture(params=["mamba", "jamba", "qwen3_5"])
def folder(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path]) -> Path:
    """A checkpoint of a one-state and of a hybrid model."""
    return tiny_checkpoint(request.param)


@pytest.fixture(params=["mamba", "jamba", "qwen3_5"])
def untied_folder(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path]) -> Path:
    """A checkpoint of a one-state and of a hybrid model. With tied embeddings the first repeats one token for ever."""
    return tiny_checkpoint(request.param, tie_word_embeddings=False)


@pytest.fixture
def open_engine() -> Iterator[Callable[..., OpenedEngine]]:
    """open_engine(folder, **options) -> an engine with blocks of 16 tokens and 16 MiB of memory."""
    opened: list[OpenedEngine] = []

    def make(folder: Path | str, **options: Any) -> OpenedEngine:
        opened.append(OpenedEngine(folder, **{"block_size": 16, "pool_size_bytes": 16 << 20, **options}))
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()


@pytest.fixture(params=["replays", "writes states"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The two ways to the state after the accepted tokens: the CPU's, and that of a device."""
    if request.param == "writes states":
        monkeypatch.setattr(CausalLM, "replays", False)
        monkeypatch.setattr("apcbatch.engine.parts.writes_draft_states", lambda device: True)
    return request.param
