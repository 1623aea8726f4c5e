"""The benchmarks' shapes made small: the same layers and names, few channels."""

from __future__ import annotations

from typing import Any

from benchmarks.make_shapes import SHAPES

MAMBA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "time_step_rank": 2,
    "vocab_size": 4096,
}
JAMBA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "mamba_dt_rank": 2,
    "vocab_size": 4096,
}


def small(shape: str) -> dict[str, Any]:
    """The configuration of a shape with the sizes above."""
    return {**SHAPES[shape], **(JAMBA if SHAPES[shape]["model_type"] == "jamba" else MAMBA)}
