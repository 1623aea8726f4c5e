"""Tiny random checkpoints of the supported families, with odd sizes.

A checkpoint has the tensors that the package's loader takes, so that `transformers` is imported only where it is the
oracle. tests/model/test_family_parity.py compares a checkpoint of each family with the one that `transformers` writes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from apcbatch.kernels.cpu.backend import CpuBackend
from apcbatch.model.arena import StateArena
from apcbatch.model.causal_lm import CausalLM
from apcbatch.model.families import load_model_config, state_layout

VOCAB = 97

_BASE = {"vocab_size": VOCAB, "hidden_size": 36, "eos_token_id": 0}
_WITH_ATTENTION = {**_BASE, "num_attention_heads": 4, "num_key_value_heads": 2}
_MAMBA = {
    **_BASE,
    "num_hidden_layers": 2,
    "state_size": 8,
    "conv_kernel": 4,
    "time_step_rank": 3,
}
_JAMBA = {
    **_WITH_ATTENTION,
    "hidden_size": 40,
    "intermediate_size": 44,
    "num_hidden_layers": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "mamba_d_state": 8,
    "mamba_dt_rank": 3,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
_QWEN = {
    **_WITH_ATTENTION,
    "intermediate_size": 44,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "full_attention_interval": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}
_QWEN_MOE = {
    **{key: value for key, value in _QWEN.items() if key != "intermediate_size"},
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
    "num_experts": 5,
    "num_experts_per_tok": 2,
}
_MAMBA2 = {
    **_BASE,
    "num_hidden_layers": 2,
    "num_heads": 6,
    "head_dim": 12,
    "n_groups": 2,
    "state_size": 8,
    "conv_kernel": 4,
}
_GRANITE = {
    **_WITH_ATTENTION,
    "intermediate_size": 28,
    "shared_intermediate_size": 44,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "tie_word_embeddings": True,
    "embedding_multiplier": 12,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 3,
}
_NEMOTRON = {
    **_WITH_ATTENTION,
    "intermediate_size": 44,
    "num_hidden_layers": 5,
    "layer_types": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
    "head_dim": 10,
    "mamba_num_heads": 6,
    "mamba_head_dim": 10,  # 60 columns of heads, not the 72 of expand
    "n_groups": 2,
    "ssm_state_size": 8,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 28,
    "time_step_min": 1e-30,  # transformers limits steps to this in prefill, instead of to time_step_limit
}
_FALCON_H1 = {
    **_WITH_ATTENTION,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "head_dim": 10,
    "mamba_d_ssm": 60,
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "embedding_multiplier": 5.66,
    "lm_head_multiplier": 0.35,
    "mlp_multipliers": [0.88, 0.55],
    "key_multiplier": 0.39,
    "attention_in_multiplier": 1.1,
    "attention_out_multiplier": 0.94,
    "ssm_multipliers": [0.35, 1.2, 0.31, 0.88, 0.42],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
_BAMBA = {
    **_WITH_ATTENTION,
    "intermediate_size": 44,
    "num_hidden_layers": 4,
    "attn_layer_indices": [1],
    "head_dim": 12,
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
_LFM2 = {
    **_BASE,
    "intermediate_size": 60,
    "block_multiple_of": 11,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
_LFM2_MOE = {
    **{key: value for key, value in _LFM2.items() if key != "block_multiple_of"},
    "num_dense_layers": 1,
    "moe_intermediate_size": 20,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
}
# (model_type, architecture, sizes), as config.json has them
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mamba": ("mamba", "MambaForCausalLM", _MAMBA),
    "falcon_mamba": ("falcon_mamba", "FalconMambaForCausalLM", {**_MAMBA, "tie_word_embeddings": False}),
    "jamba": ("jamba", "JambaForCausalLM", _JAMBA),
    "mamba2": ("mamba2", "Mamba2ForCausalLM", _MAMBA2),
    "granitemoehybrid": ("granitemoehybrid", "GraniteMoeHybridForCausalLM", _GRANITE),
    "bamba": ("bamba", "BambaForCausalLM", _BAMBA),
    "falcon_h1": ("falcon_h1", "FalconH1ForCausalLM", _FALCON_H1),
    "nemotron_h": ("nemotron_h", "NemotronHForCausalLM", _NEMOTRON),
    "qwen3_5": ("qwen3_5_text", "Qwen3_5ForCausalLM", _QWEN),
    "qwen3_5_moe": ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", _QWEN_MOE),
    "lfm2": ("lfm2", "Lfm2ForCausalLM", _LFM2),
    "lfm2_moe": ("lfm2_moe", "Lfm2MoeForCausalLM", _LFM2_MOE),
    "qwen3_next": ("qwen3_next", "Qwen3NextForCausalLM", _QWEN_MOE),
}


class _Drawn(dict[str, torch.Tensor]):
    """In place of a Checkpoint: draws each tensor that a loader takes, and has it by name. No value is a constant: the
    norms, A_log, D and the biases are random too."""

    def __init__(self, name: str, seed: int) -> None:
        super().__init__()
        self._is_qwen = name.startswith("qwen3")
        self._generator = torch.Generator().manual_seed(seed)

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a new tensor (shape) float32."""
        noise = torch.randn(shape, generator=self._generator)
        if name.endswith("A_log"):
            a = torch.rand(shape, generator=self._generator) * 16 if self._is_qwen else torch.arange(1, shape[-1] + 1)
            tensor = a.log() + noise * 0.3
        elif "norm" in name and self._is_qwen and "linear_attn" not in name:  # multiplies by 1 + its weights
            tensor = noise * 0.2
        elif "norm" in name or name.endswith("D"):
            tensor = 1 + noise * 0.2
        elif "bias" in name:
            tensor = noise * 0.3
        else:
            tensor = noise * (0.7 if "embed" in name else shape[-1] ** -0.5)
        self[name] = tensor
        return tensor


def save_tiny(folder: Path, name: str, seed: int, overrides: dict[str, Any]) -> None:
    """Write the checkpoint folder (without a tokenizer). overrides: other values in its config.json."""
    model_type, architecture, sizes = FAMILIES[name]
    values = {"architectures": [architecture], "model_type": model_type, "dtype": "float32", **sizes, **overrides}
    if "layer_types" in values:
        values["layer_types"] = values["layer_types"][: values["num_hidden_layers"]]
    if name == "nemotron_h":  # as transformers writes it
        values["layers_block_type"] = values.pop("layer_types")
        del values["num_hidden_layers"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": values["eos_token_id"]}))
    config = load_model_config(folder)
    drawn, arena = _Drawn(name, seed), StateArena(state_layout(config, "float32"), 1, 1, torch.device("cpu"))
    CausalLM(drawn, config, torch.float32, arena, CpuBackend(), range(config.num_layers))  # type: ignore[arg-type]
    save_file(drawn, folder / "model.safetensors", metadata={"format": "pt"})


def load_oracle(folder: Path) -> Any:
    """Return the model that `transformers` makes of a checkpoint folder, in float32."""
    from transformers import AutoModelForCausalLM  # 1 s of imports, and one module more for each family

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
