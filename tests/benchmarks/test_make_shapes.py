"""The checkpoints of the benchmarks: loadable, the same every time, of the sizes that the peers were measured with."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from apcbatch import Engine, Request
from apcbatch.data.render import Renderer
from benchmarks.make_shapes import SHAPES, write_shape
from tests.benchmarks.small_shapes import small


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_answers(tmp_path: Path, shape: str, dtype: str) -> None:
    """Faults: a tensor that is missing, mis-shaped or makes the logits overflow; a folder without its tokenizer."""
    write_shape(tmp_path, small(shape), getattr(torch, dtype))
    engine = Engine(tmp_path, dtype=dtype, policy="none")
    [result] = engine.run([Request("a", list(range(40)), max_tokens=4, ignore_eos=True, logprobs=True)])
    engine.close()
    assert result.error is None and len(result.token_ids) == 4
    assert all(math.isfinite(logprob) for logprob in result.logprobs)
    assert len(set(result.token_ids)) > 1  # not one token that wins whatever comes before
    Renderer.load(tmp_path, warn=lambda sentence: pytest.fail(sentence))


@pytest.mark.parametrize("shape", SHAPES)
def test_same_bytes_again(tmp_path: Path, shape: str) -> None:
    """Fault: weights that come from anything but the seed."""
    for name in ("one", "other"):
        write_shape(tmp_path / name, small(shape))
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "other" / path.name).read_bytes()


def test_sizes() -> None:
    """Fault: a shape that is not the one whose rates are compared."""
    mamba, jamba = SHAPES["mamba-130m"], SHAPES["jamba-small"]
    assert [mamba[k] for k in ("hidden_size", "num_hidden_layers", "vocab_size")] == [768, 24, 50280]
    assert [mamba[k] for k in ("intermediate_size", "state_size", "conv_kernel", "time_step_rank")] == [
        1536,
        16,
        4,
        48,
    ]
    assert [jamba[k] for k in ("hidden_size", "num_hidden_layers", "vocab_size")] == [512, 8, 65536]
    assert [jamba[k] for k in ("num_experts", "num_experts_per_tok", "expert_layer_period")] == [4, 2, 2]
    attention = [i for i in range(8) if i % jamba["attn_layer_period"] == jamba["attn_layer_offset"]]
    assert len(attention) == 2
