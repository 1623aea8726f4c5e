"""Writes checkpoints of the shapes that the benchmarks measure, with seeded random weights.

    python benchmarks/make_shapes.py OUTPUT [--shape mamba-130m] [--shape jamba-small] [--dtype bfloat16]

Each shape (by default those that are measured on the CPU) becomes a Hugging Face folder OUTPUT/<shape> with the
bundled model's tokenizer; the vocabulary of the weights is the shape's own, larger than the tokenizer's. Running it
again gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

Array = npt.NDArray[np.float32]

DEMO = Path(__file__).resolve().parent.parent / "apcbatch" / "demo"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SEED = 20261121
DT_MIN, DT_MAX = 0.001, 0.1
LOGIT_STD = 3.0
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

MAMBA = {
    "architectures": ["MambaForCausalLM"],
    "model_type": "mamba",
    "state_size": 16,
    "conv_kernel": 4,
    "expand": 2,
    "use_bias": False,
    "use_conv_bias": True,
    "hidden_act": "silu",
    "layer_norm_epsilon": 1e-5,
    "residual_in_fp32": True,
    "tie_word_embeddings": True,
    "vocab_size": 50280,
}
JAMBA = {
    "architectures": ["JambaForCausalLM"],
    "model_type": "jamba",
    "num_hidden_layers": 8,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "num_experts_per_tok": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "use_mamba_kernels": False,
    "vocab_size": 65536,
}
SHAPES: dict[str, dict[str, Any]] = {
    "mamba-130m": {
        **MAMBA,
        "hidden_size": 768,
        "num_hidden_layers": 24,
        "intermediate_size": 1536,
        "time_step_rank": 48,
    },
    "jamba-small": {
        **JAMBA,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_experts": 4,
        "mamba_dt_rank": 32,
    },
    "mamba-2.8b": {
        **MAMBA,
        "hidden_size": 2560,
        "num_hidden_layers": 64,
        "intermediate_size": 5120,
        "time_step_rank": 160,
    },
    "falcon-mamba-7b": {
        **MAMBA,
        "architectures": ["FalconMambaForCausalLM"],
        "model_type": "falcon_mamba",
        "hidden_size": 4096,
        "num_hidden_layers": 64,
        "intermediate_size": 8192,
        "time_step_rank": 256,
        "mixer_rms_eps": 1e-6,
        "tie_word_embeddings": False,
        "vocab_size": 65024,
    },
    # One of the four blocks of Jamba-mini.
    "jamba-mini-block": {
        **JAMBA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_experts": 16,
        "mamba_dt_rank": 256,
    },
    "qwen3.5-0.8b": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "tie_word_embeddings": True,
    },
    "granite-4.0-h-350m": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "vocab_size": 100352,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "shared_intermediate_size": 2048,
        "max_position_embeddings": 32768,
        "num_hidden_layers": 32,
        "layer_types": ["attention" if layer in (10, 13, 17, 27) else "mamba" for layer in range(32)],
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "mamba_n_heads": 48,
        "mamba_d_head": 32,
        "mamba_d_state": 128,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "embedding_multiplier": 12,
        "residual_multiplier": 0.246,
        "attention_multiplier": 0.015625,
        "logits_scaling": 3,
        "position_embedding_type": "nope",
        "tie_word_embeddings": True,
    },
}
FOR_THE_CPU = ("mamba-130m", "jamba-small")


class Draws:
    """Weights from one seeded stream; the order of the calls is part of the result."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Generator(np.random.PCG64(seed))

    def uniform(self, shape: tuple[int, ...], std: float) -> Array:
        """Uniform around 0 with the given standard deviation."""
        draws = self._generator.random(shape, dtype=np.float32)
        return (draws * np.float32(2.0) - np.float32(1.0)) * np.float32(std * math.sqrt(3.0))

    def matrix(self, out_features: int, in_features: int, gain: float = 1.0) -> Array:
        """(out_features, in_features) with standard deviation gain / sqrt(in_features)."""
        return self.uniform((out_features, in_features), gain / math.sqrt(in_features))

    def dt_bias(self, size: int) -> Array:
        """(size,): softplus of it is log-uniform from DT_MIN to DT_MAX. Gu and Dao, arXiv 2312.00752, section 3.6."""
        span = math.log(DT_MAX) - math.log(DT_MIN)
        dt = np.exp(self._generator.random(size) * span + math.log(DT_MIN))
        return (dt + np.log(-np.expm1(-dt))).astype(np.float32)


def mixer(draws: Draws, hidden: int, d_inner: int, d_state: int, dt_rank: int) -> Iterator[tuple[str, Array]]:
    """The tensors of one Mamba mixer."""
    yield "in_proj.weight", draws.matrix(2 * d_inner, hidden, gain=1.4)
    yield "conv1d.weight", draws.uniform((d_inner, 1, 4), 0.6)
    yield "conv1d.bias", draws.uniform((d_inner,), 0.1)
    yield "x_proj.weight", draws.matrix(dt_rank + 2 * d_state, d_inner)
    yield "dt_proj.weight", draws.matrix(d_inner, dt_rank)
    yield "dt_proj.bias", draws.dt_bias(d_inner)
    yield "A_log", np.log(np.tile(np.arange(1, d_state + 1, dtype=np.float32), (d_inner, 1)))
    yield "D", np.ones(d_inner, np.float32)
    yield "out_proj.weight", draws.matrix(hidden, d_inner, gain=2.0)


def mamba_tensors(config: dict[str, Any], draws: Draws) -> Iterator[tuple[str, Array]]:
    """Every tensor of a mamba or falcon_mamba shape by its name on the hub."""
    hidden, d_inner = config["hidden_size"], config["intermediate_size"]
    yield "backbone.embeddings.weight", draws.matrix(config["vocab_size"], hidden, gain=LOGIT_STD)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"backbone.layers.{layer}"
        for name, array in mixer(draws, hidden, d_inner, config["state_size"], config["time_step_rank"]):
            yield f"{prefix}.mixer.{name}", array
        yield f"{prefix}.norm.weight", np.ones(hidden, np.float32)
    yield "backbone.norm_f.weight", np.ones(hidden, np.float32)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", draws.matrix(config["vocab_size"], hidden, gain=LOGIT_STD)


def attention(draws: Draws, config: dict[str, Any]) -> Iterator[tuple[str, Array]]:
    """The tensors of one attention mixer."""
    hidden = config["hidden_size"]
    kv_features = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    for name, size in (("q", hidden), ("k", kv_features), ("v", kv_features)):
        yield f"{name}_proj.weight", draws.matrix(size, hidden, gain=1.5)
    yield "o_proj.weight", draws.matrix(hidden, hidden, gain=2.0)


def mlp(draws: Draws, hidden: int, intermediate: int) -> Iterator[tuple[str, Array]]:
    """The tensors of one dense layer or of one expert."""
    yield "gate_proj.weight", draws.matrix(intermediate, hidden, gain=1.5)
    yield "up_proj.weight", draws.matrix(intermediate, hidden, gain=1.5)
    yield "down_proj.weight", draws.matrix(hidden, intermediate, gain=1.5)


def jamba_layer(config: dict[str, Any], draws: Draws, layer: int) -> Iterator[tuple[str, Array]]:
    """The tensors of one jamba layer, named from the layer on."""
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    if layer % config["attn_layer_period"] == config["attn_layer_offset"]:
        for name, array in attention(draws, config):
            yield f"self_attn.{name}", array
    else:
        d_inner, d_state, dt_rank = 2 * hidden, config["mamba_d_state"], config["mamba_dt_rank"]
        for name, array in mixer(draws, hidden, d_inner, d_state, dt_rank):
            yield f"mamba.{name}", array
        for name, size in (("dt", dt_rank), ("b", d_state), ("c", d_state)):
            yield f"mamba.{name}_layernorm.weight", np.ones(size, np.float32)
    if layer % config["expert_layer_period"] == config["expert_layer_offset"]:
        yield "feed_forward.router.weight", draws.matrix(config["num_experts"], hidden, gain=1.5)
        for expert in range(config["num_experts"]):
            for name, array in mlp(draws, hidden, intermediate):
                yield f"feed_forward.experts.{expert}.{name}", array
    else:
        for name, array in mlp(draws, hidden, intermediate):
            yield f"feed_forward.{name}", array
    yield "input_layernorm.weight", np.ones(hidden, np.float32)
    yield "pre_ff_layernorm.weight", np.ones(hidden, np.float32)


def jamba_tensors(config: dict[str, Any], draws: Draws) -> Iterator[tuple[str, Array]]:
    """Every tensor of the jamba shape by its name on the hub."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", draws.uniform((vocabulary, hidden), 1.0)
    for layer in range(config["num_hidden_layers"]):
        for name, array in jamba_layer(config, draws, layer):
            yield f"model.layers.{layer}.{name}", array
    yield "model.final_layernorm.weight", np.ones(hidden, np.float32)
    yield "lm_head.weight", draws.matrix(vocabulary, hidden, gain=LOGIT_STD)


def drawn_by_transformers(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The whole config of another family, and every tensor with the weights that transformers draws for a new model;
    but A and dt of Mamba-2 are of the sizes with which its authors begin (as in mixer), since with those of
    transformers states decay to denormal numbers, which are slow."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    draws = Draws(SEED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("mamba.A_log"):
                parameter.copy_(torch.rand_like(parameter).mul_(15).add_(1).log_())
            elif name.endswith("mamba.dt_bias"):
                parameter.copy_(torch.from_numpy(draws.dt_bias(len(parameter))))
    tied = {"lm_head.weight"} if config["tie_word_embeddings"] else set()
    whole = json.loads(model.config.to_json_string(use_diff=False))
    return {**whole, **config}, {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


def write_shape(folder: Path, config: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the checkpoint of a config (one of SHAPES, or smaller) and the bundled tokenizer into folder."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {"jamba": jamba_tensors, "mamba": mamba_tensors, "falcon_mamba": mamba_tensors}.get(config["model_type"])
    if arrays is None:
        config, drawn = drawn_by_transformers(config)
    else:
        drawn = {name: torch.from_numpy(array) for name, array in arrays(config, Draws(SEED))}
    contents = {**config, **SPECIAL, "dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(contents, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in drawn.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name in TOKENIZER_FILES:
        shutil.copyfile(DEMO / name, folder / name)


def main() -> None:
    """Write the shapes that were asked for and say how large they are."""
    parser = argparse.ArgumentParser(description="write random checkpoints of the benchmarks' shapes")
    parser.add_argument("output", type=Path)
    parser.add_argument("--shape", action="append", choices=SHAPES, help=f"default: {' and '.join(FOR_THE_CPU)}")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="default: %(default)s")
    options = parser.parse_args()
    for shape in options.shape or FOR_THE_CPU:
        folder = options.output / shape
        write_shape(folder, SHAPES[shape], getattr(torch, options.dtype))
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(f"{folder}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
