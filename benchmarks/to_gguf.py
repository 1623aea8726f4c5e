"""Converts a Mamba or Jamba checkpoint folder to a GGUF file that llama.cpp loads.

    python benchmarks/to_gguf.py shapes/mamba-130m mamba-130m-bf16.gguf --type bf16

Needs the package `gguf`. The file's vocabulary is a list of made-up words, one a token id: peers are given token ids,
so that no tokenizer takes part in a comparison. Vectors, convolutions, A and the routers stay float32, as llama.cpp
wants them; everything else takes the type asked for.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.torch import load_file

Array = npt.NDArray[np.float32]

TYPES = {
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
NAMES = {
    "backbone.embeddings.weight": "token_embd.weight",
    "model.embed_tokens.weight": "token_embd.weight",
    "backbone.norm_f.weight": "output_norm.weight",
    "model.final_layernorm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
    "norm": "attn_norm",
    "input_layernorm": "attn_norm",
    "pre_ff_layernorm": "ffn_norm",
    "in_proj": "ssm_in",
    "conv1d": "ssm_conv1d",
    "x_proj": "ssm_x",
    "dt_proj": "ssm_dt",
    "out_proj": "ssm_out",
    "dt_layernorm": "ssm_dt_norm",
    "b_layernorm": "ssm_b_norm",
    "c_layernorm": "ssm_c_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "router": "ffn_gate_inp",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}
FLOAT32_LAYERS = ("ssm_conv1d", "ffn_gate_inp", "ssm_a")


def converted(tensors: dict[str, Array]) -> Iterator[tuple[str, Array]]:
    """(llama.cpp's name, values) of every tensor; the experts of a layer become one tensor each kind."""
    experts: dict[str, list[Array]] = {}
    for name in sorted(tensors, key=_by_expert):
        values = tensors[name]
        if name in NAMES:
            yield NAMES[name], values
            continue
        _, _, layer, *path = name.split(".")
        prefix = f"blk.{layer}"
        if "experts" in path:
            experts.setdefault(f"{prefix}.{LAYER_NAMES[path[-2]]}_exps.weight", []).append(values)
        elif path[-1] == "A_log":
            yield f"{prefix}.ssm_a", -np.exp(values)
        elif path[-1] == "D":
            yield f"{prefix}.ssm_d", values
        else:
            yield f"{prefix}.{LAYER_NAMES[path[-2]]}.{path[-1]}", values.squeeze()
    for name, parts in experts.items():
        yield name, np.stack(parts)


def _by_expert(name: str) -> tuple[str | int, ...]:
    return tuple(int(part) if part.isdigit() else part for part in name.split("."))


def write_parameters(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """The sizes of the architecture."""
    jamba = config["model_type"] == "jamba"
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    writer.add_block_count(layers)
    writer.add_embedding_length(hidden)
    writer.add_context_length(config.get("max_position_embeddings", 1 << 20))
    writer.add_feed_forward_length(config["intermediate_size"] if jamba else 0)
    writer.add_head_count(config.get("num_attention_heads", 0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps" if jamba else "layer_norm_epsilon"])
    writer.add_ssm_conv_kernel(config["mamba_d_conv" if jamba else "conv_kernel"])
    writer.add_ssm_inner_size(2 * hidden)
    writer.add_ssm_state_size(config["mamba_d_state" if jamba else "state_size"])
    writer.add_ssm_time_step_rank(config["mamba_dt_rank" if jamba else "time_step_rank"])
    if jamba:
        period, offset = config["attn_layer_period"], config["attn_layer_offset"]
        kv_heads = config["num_key_value_heads"]
        writer.add_head_count_kv([kv_heads if i % period == offset else 0 for i in range(layers)])
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    else:
        writer.add_ssm_dt_b_c_rms(False)


def write_vocabulary(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """A word for each token id."""
    words = [f"<{i}>" for i in range(config["vocab_size"])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(words))
    writer.add_token_merges(["< 0"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def convert(folder: Path, target: Path, type_name: str) -> None:
    """Write the GGUF file of a checkpoint folder (one safetensors file)."""
    config = json.loads((folder / "config.json").read_text())
    quantization, file_type = TYPES[type_name]
    writer = gguf.GGUFWriter(str(target), config["model_type"])
    writer.add_file_type(file_type)
    write_parameters(writer, config)
    write_vocabulary(writer, config)
    tensors = {name: value.float().numpy() for name, value in load_file(folder / "model.safetensors").items()}
    for name, values in converted(tensors):
        whole = values.ndim == 1 or any(part in FLOAT32_LAYERS for part in name.split("."))
        kind = gguf.GGMLQuantizationType.F32 if whole else quantization
        data = gguf.quants.quantize(np.ascontiguousarray(values), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Convert one folder."""
    parser = argparse.ArgumentParser(description="convert a checkpoint to GGUF")
    parser.add_argument("folder", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--type", choices=TYPES, default="bf16", help="default: %(default)s")
    options = parser.parse_args()
    convert(options.folder, options.target, options.type)
    print(f"{options.target}: {options.target.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
