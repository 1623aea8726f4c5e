"""The whole engine on a CUDA device: the CPU's answers, and cached answers that equal cold ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from apcbatch import Engine
from apcbatch.model import graphs
from tests.engine.test_sameness import Answers, agent_prompts, answers

pytestmark = pytest.mark.cuda
AT_ONCE = {"hidden_size": 64, "time_step_rank": 8}  # a shape whose decode passes are one launch
MODELS = {
    "mamba": ("mamba", {}),
    "falcon_mamba": ("falcon_mamba", {}),
    "jamba": ("jamba", {}),
    "mamba at once": ("mamba", AT_ONCE),
    "falcon_mamba at once": ("falcon_mamba", AT_ONCE),
}
COLD = {"policy": "none", "max_running": 1}


@pytest.fixture
def checkpoint(tiny_checkpoint) -> Callable[[str], Path]:
    """The folder of one of MODELS."""
    return lambda model: tiny_checkpoint(MODELS[model][0], **MODELS[model][1])


def serve(folder: Path, seed: int, **options: object) -> Answers:
    options = {"device": "cuda", "pool_size_bytes": 256 << 20, **options}
    return answers(Engine(folder, **options), agent_prompts(seed))


def tokens(of: Answers) -> dict[str, list[int]]:
    return {key: answer[0] for key, answer in of.items()}


@pytest.mark.parametrize("model", MODELS)
def test_the_device_answers_like_the_cpu(model: str, checkpoint) -> None:
    """Catches any layer that computes something else than the CPU's, which equals transformers'."""
    folder = checkpoint(model)
    on_device, on_cpu = serve(folder, 3, **COLD), serve(folder, 3, device="cpu", **COLD)
    assert tokens(on_device) == tokens(on_cpu)
    for key, (_, logprobs) in on_device.items():
        assert logprobs == pytest.approx(on_cpu[key][1], rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_float32_tokens_are_the_same_cached_and_cold(model: str, block_size: int, checkpoint) -> None:
    """Catches a state that is restored from another position or slot."""
    folder, seed = checkpoint(model), random.randrange(1 << 30)
    cold = serve(folder, seed, **COLD)
    cached = serve(folder, seed, policy="all", block_size=block_size, max_running=8, max_batch_tokens=100)
    assert tokens(cached) == tokens(cold), f"seed {seed}"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_answers_are_the_same_bit_for_bit(
    model: str, dtype: str, checkpoint, tmp_path: Path
) -> None:
    """Catches bits that depend on cuts, batch mates, graphs, memory or disk, where exactness was asked for."""
    folder, seed = checkpoint(model), random.randrange(1 << 30)
    options = {"dtype": dtype, "exact": True, "block_size": 16}
    cold = serve(folder, seed, **options, **COLD)
    for further in (
        {"policy": "all", "max_running": 8, "max_batch_tokens": 64},
        {"policy": "all", "max_running": 3, "store": tmp_path / "store"},
        {"policy": "all", "max_running": 32, "store": tmp_path / "store"},
    ):
        assert serve(folder, seed, **options, **further) == cold, f"seed {seed}, {further}"


@pytest.mark.parametrize("model", MODELS)
def test_replayed_passes_equal_launched_ones(
    model: str, checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a graph that goes on with the slots, pages or tokens of the batch it was captured with."""
    folder, seed = checkpoint(model), random.randrange(1 << 30)
    options = {"exact": True, "policy": "none", "max_running": 5, "dtype": "bfloat16"}
    replayed = serve(folder, seed, **options)
    monkeypatch.setattr(graphs, "LARGEST_GRAPH", 0)
    assert serve(folder, seed, **options) == replayed, f"seed {seed}"


def test_snapshots_are_of_the_device_alone(tiny_checkpoint, tmp_path: Path) -> None:
    """Catches a state made by other arithmetic that is taken for one's own: the CPU's on the device, and the free
    products' by exact ones."""
    folder = tiny_checkpoint("mamba")
    makers = ({"device": "cpu"}, {"device": "cuda"}, {"device": "cuda", "exact": True})
    prints = set()
    for options in makers:
        engine = Engine(folder, store=tmp_path / "store", **options)
        prints.add(engine.fingerprint)
        prompt = list(range(1, 90))
        (result,) = engine.run([agent_prompts(1)[0].__class__("r", prompt, max_tokens=1)])
        assert result.cached_tokens == 0
        engine.close()
    assert len(prints) == len(makers)


def test_what_the_python_surface_gives_lies_on_the_host(tiny_checkpoint) -> None:
    """Catches tensors of the device where the contract has plain ones."""
    engine = Engine(tiny_checkpoint("jamba"), device="cuda", block_size=16)
    request = agent_prompts(2)[0]
    list(engine.run([request]))
    position = engine.boundaries(request.token_ids)[-1]
    parts = engine.snapshot(request.token_ids[:position])
    assert parts is not None and all(not part.is_cuda for part in parts.values())
    assert torch.isfinite(parts["ssm"]).all()
    engine.close()
