"""Writes the table of docs/models.md: each family with its sub-blocks, released checkpoints, devices, states and chat
template.

    python -m tools.models_table

`architectures`, sub-blocks, devices and sizes follow from the code: families, backends, layouts of states. What is
written here by hand is which checkpoints were released, the values of their config.json that determine a state, and how
their templates write calls. A test compares the page with what this script would write.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from apcbatch.data.output.tool_parsers import tool_parsers
from apcbatch.kernels.backend import NOT_FUSED, KindOnDevice
from apcbatch.kernels.cpu.backend import CpuBackend
from apcbatch.kernels.cuda.backend import CudaBackend
from apcbatch.model.attention import Attention
from apcbatch.model.families import families, state_layout
from apcbatch.model.family import Family
from apcbatch.model.feed_forward import Mlp
from apcbatch.model.hf_config import ConfigReader, ModelConfig
from apcbatch.model.sub_blocks import SubBlockKind

TARGET = Path(__file__).resolve().parent.parent / "docs" / "models.md"
BEGIN, END = "<!-- families: begin -->\n", "<!-- families: end -->\n"
DTYPE = "bfloat16"  # of the released weights; a recurrent value is float32 in every dtype
DEVICES = {"CPU": CpuBackend, "CUDA": CudaBackend}
WORDS = {
    "mamba": "Mamba-1",
    "mamba2": "Mamba-2",
    "delta": "gated delta nets",
    "short_conv": "gated short convolutions",
    "mixture": "mixture of experts",
}


class Released(NamedTuple):
    """Released checkpoints of a family. text: their names. shapes: values of config.json, by a short name. parser: tool
    parser that reads their calls; None if their templates have none. template: what else there is to say of it."""

    text: str
    shapes: Mapping[str, Mapping[str, Any]]
    parser: str | None
    template: str


def _granite(hidden: int, head_dim: int, heads: int, layers: int = 40, experts: int = 0) -> dict[str, Any]:
    """Granite 4.0-H with four layers of attention."""
    attention = (10, 13, 17, 27) if layers == 32 else (5, 15, 25, 35)
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "layer_types": ["attention" if layer in attention else "mamba" for layer in range(layers)],
        "num_attention_heads": 12 if hidden < 2048 else 32,
        "num_key_value_heads": 4 if hidden < 2048 else 8,
        "mamba_n_heads": heads,
        "mamba_d_head": head_dim,
        "mamba_d_state": 128,
        "num_local_experts": experts,
    }


_FALCON_H1 = {"mamba_d_ssm": 3072, "num_key_value_heads": 2, "head_dim": 128}
RELEASED = {
    "mamba": Released(
        "`state-spaces/mamba-130m-hf` to `mamba-2.8b-hf`, and what is fine-tuned from them",
        {
            "130m": {"hidden_size": 768, "num_hidden_layers": 24, "time_step_rank": 48},
            "2.8b": {"hidden_size": 2560, "num_hidden_layers": 64},
        },
        None,
        "none: base models",
    ),
    "falcon_mamba": Released(
        "`tiiuae/falcon-mamba-7b`, `falcon-mamba-7b-instruct`",
        {"7b": {"hidden_size": 4096, "intermediate_size": 8192, "num_hidden_layers": 64, "time_step_rank": 256}},
        None,
        "of the instruct model; it knows no tools",
    ),
    "jamba": Released(
        "AI21's Jamba 1.5, 1.6 and 1.7 (Mini, Large), Jamba Reasoning 3B, Jamba 2 3B",
        {"Mini": {"hidden_size": 4096, "num_hidden_layers": 32, "num_key_value_heads": 8}},
        "jamba",
        "of the reasoning model with `<think>`",
    ),
    "qwen3_5": Released(
        "the dense models of Qwen3.5 (`Qwen/Qwen3.5-0.8B`, 2B, 4B, 9B, 27B), Qwen3.6 (`Qwen/Qwen3.6-27B`) and Qwen3.8 "
        "(`Qwen/Qwen3.8-27B`), as text models",
        {
            "0.8B": {"num_hidden_layers": 24, "num_key_value_heads": 2, "linear_num_value_heads": 16},
            "4B and 9B": {"num_hidden_layers": 32, "num_key_value_heads": 4, "linear_num_value_heads": 32},
            "27B": {"num_hidden_layers": 64, "num_attention_heads": 24, "linear_num_value_heads": 48},
        },
        "qwen-coder",
        "with `<think>`",
    ),
    "qwen3_5_moe": Released(
        "Qwen3.5 with experts (`Qwen/Qwen3.5-35B-A3B`, 122B-A10B, 397B-A17B) and Qwen3.6 (`Qwen/Qwen3.6-35B-A3B`), as "
        "text models",
        {"35B-A3B": {"num_hidden_layers": 40, "num_key_value_heads": 2, "linear_num_value_heads": 32}},
        "qwen-coder",
        "with `<think>`",
    ),
    "qwen3_next": Released(
        "Qwen3-Next (`Qwen/Qwen3-Next-80B-A3B-Instruct`, `-Thinking`) and `Qwen/Qwen3-Coder-Next`",
        {"80B-A3B": {"num_hidden_layers": 48, "num_key_value_heads": 2, "linear_num_value_heads": 32}},
        "hermes",
        "of Qwen3-Coder-Next `qwen-coder`; of the thinking model with `<think>`",
    ),
    "mamba2": Released(
        "`mistralai/Mamba-Codestral-7B-v0.1`, and `state-spaces/mamba2-130m` to `mamba2-2.7b` as converted for "
        "transformers",
        {
            "130m": {"hidden_size": 768, "num_hidden_layers": 24, "num_heads": 24, "n_groups": 1},
            "2.7b": {"hidden_size": 2560, "num_hidden_layers": 64, "num_heads": 80, "n_groups": 1},
            "Codestral": {"hidden_size": 4096, "num_hidden_layers": 64, "num_heads": 128},
        },
        None,
        "as the checkpoint has it; most have none",
    ),
    "granitemoehybrid": Released(
        "Granite 4.0-H (`ibm-granite/granite-4.0-h-350m`, `-h-1b`, `-h-micro`; with experts `-h-tiny`, `-h-small`)",
        {
            "350m": _granite(768, 32, 48, layers=32),
            "1b and tiny": _granite(1536, 64, 48),
            "micro": _granite(2048, 64, 64),
            "small": _granite(4096, 64, 128, experts=72),
        },
        "hermes",
        "",
    ),
    "nemotron_h": Released(
        "NVIDIA's Nemotron-H, Nemotron Nano 2 (`nvidia/NVIDIA-Nemotron-Nano-9B-v2`), Nemotron 3 "
        "(`nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16`) and Nemotron 3.5 "
        "(`nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16`)",
        {
            "30B-A3B": {
                "mamba_num_heads": 64,
                "num_key_value_heads": 2,
                "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
            },
            "9B": {
                "mamba_head_dim": 80,
                "num_attention_heads": 40,
                "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
            },
        },
        "qwen-coder",
        "of Nano 2 `nemotron`; of the instruct models, with `<think>`",
    ),
    "bamba": Released(
        "`ibm-ai-platform/Bamba-9B-v1`, `Bamba-9B-v2`",
        {"9B": {"attn_layer_indices": [9, 18, 27], "num_key_value_heads": 8, "mamba_d_state": 128}},
        None,
        "as the checkpoint has it; base models have none",
    ),
    "falcon_h1": Released(
        "Falcon-H1 (`tiiuae/Falcon-H1-0.5B-Instruct` to `Falcon-H1-34B-Instruct`, the tiny models and Falcon-H1R)",
        {
            "1.5B": {**_FALCON_H1, "num_hidden_layers": 24, "num_attention_heads": 8, "mamba_n_heads": 48},
            "7B": {**_FALCON_H1, "num_hidden_layers": 44, "num_attention_heads": 12, "mamba_n_heads": 24},
        },
        None,
        "of the instruct models",
    ),
    "lfm2": Released(
        "LFM2 and LFM2.5, the dense models (`LiquidAI/LFM2-350M` to `LFM2-2.6B`)",
        {"1.2B": {"hidden_size": 2048, "num_hidden_layers": 16, "full_attn_idxs": [2, 5, 8, 10, 12, 14]}},
        "lfm2",
        "",
    ),
    "lfm2_moe": Released(
        "LFM2 and LFM2.5 with experts (`LiquidAI/LFM2-8B-A1B`)",
        {"8B-A1B": {"hidden_size": 2048, "num_hidden_layers": 24, "full_attn_idxs": [2, 6, 10, 14, 18, 21]}},
        "lfm2",
        "",
    ),
}


def lines() -> Iterator[str]:
    """The lines of the table."""
    heads = [
        "`architectures` in `config.json`",
        "sub-blocks",
        "released checkpoints",
        *DEVICES,
        "a state, MiB (KV a token, KiB)",
    ]
    yield f"| {' | '.join([*heads, 'chat template: calls are read by'])} |"
    yield "|" + "---|" * (len(heads) + 1)
    for family in families():
        released = RELEASED[family.model_type]
        configs = {name: config_of(family, values) for name, values in released.shapes.items()}
        kinds = [kind for config in configs.values() for kind in family.kinds(config)]
        cells = [
            ", ".join(f"`{name}`" for name in family.architectures),
            ", ".join(dict.fromkeys(map(words, kinds))),
            released.text,
            *(on_device(kinds, backend.kinds) for backend in DEVICES.values()),
            ", ".join(f"{name} {size(config)}" for name, config in configs.items()),
            template(released),
        ]
        yield f"| {' | '.join(cells)} |"


def config_of(family: Family, values: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a config.json with these values."""
    return replace(family.read(ConfigReader(Path("config.json"), dict(values))), family=family.model_type)


def words(kind: SubBlockKind) -> str:
    """What the page calls a kind of sub-block."""
    if isinstance(kind, Attention):
        positions = "without positions" if kind.rotary is None else "with rotary positions"
        return f"{'gated ' * kind.is_gated}attention {positions}"
    if isinstance(kind, Mlp):
        return "shared expert" if kind.token_gate else "MLP" if kind.is_gated else "MLP of squared ReLU"
    return WORDS[kind.name]


def on_device(kinds: Iterable[SubBlockKind], fused: Mapping[str, KindOnDevice]) -> str:
    """Whether a device runs these kinds of sub-blocks, and which of them op by op."""
    slow = dict.fromkeys(words(kind) for kind in kinds if fused.get(kind.name, NOT_FUSED).make is None)
    return f"yes; op by op: {', '.join(slow)}" if slow else "yes"


def size(config: ModelConfig) -> str:
    """The MiB of a state, and the KiB that each token adds if there is attention."""
    layout = state_layout(config, DTYPE)
    state = layout.slot_bytes / 2**20
    shown = f"{state:.1f}" if state >= 1 else f"{state:.2f}"
    return shown + f" ({layout.token_bytes / 1024:.0f})" * layout.has_tokens


def template(released: Released) -> str:
    """How calls are read, and what else there is to say of the template."""
    if released.parser is None:
        return released.template
    assert released.parser in tool_parsers()
    return "; ".join(part for part in (f"`{released.parser}`", released.template) if part)


def document(page: str) -> str:
    """The page with the table of today's code."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n".join(lines()) + "\n" + END + after


if __name__ == "__main__":
    TARGET.write_text(document(TARGET.read_text(encoding="utf-8")), encoding="utf-8")
