"""Tiny random checkpoints of the supported families, made by `transformers`, with odd sizes."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    FalconMambaConfig,
    FalconMambaForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

VOCAB = 97

_MAMBA = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "num_hidden_layers": 2,
    "state_size": 8,
    "conv_kernel": 4,
    "time_step_rank": 3,
    "eos_token_id": 0,
}
_JAMBA = {
    "vocab_size": VOCAB,
    "hidden_size": 40,
    "intermediate_size": 44,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "mamba_d_state": 8,
    "mamba_dt_rank": 3,
    "eos_token_id": 0,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
_QWEN = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "intermediate_size": 44,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "full_attention_interval": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    "eos_token_id": 0,
}
_QWEN_MOE = {
    **{key: value for key, value in _QWEN.items() if key != "intermediate_size"},
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
    "num_experts": 5,
    "num_experts_per_tok": 2,
}
_MAMBA2 = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "num_hidden_layers": 2,
    "num_heads": 6,
    "head_dim": 12,
    "n_groups": 2,
    "state_size": 8,
    "conv_kernel": 4,
    "eos_token_id": 0,
}
_GRANITE = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "intermediate_size": 28,
    "shared_intermediate_size": 44,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
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
    "eos_token_id": 0,
}
_NEMOTRON = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "intermediate_size": 44,
    "num_hidden_layers": 5,
    "layer_types": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
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
    "eos_token_id": 0,
}
_FALCON_H1 = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
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
    "eos_token_id": 0,
}
_BAMBA = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "intermediate_size": 44,
    "num_hidden_layers": 4,
    "attn_layer_indices": [1],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "eos_token_id": 0,
}
_LFM2 = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "intermediate_size": 60,
    "block_multiple_of": 11,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "eos_token_id": 0,
}
_LFM2_MOE = {
    **{key: value for key, value in _LFM2.items() if key != "block_multiple_of"},
    "num_dense_layers": 1,
    "moe_intermediate_size": 20,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
}
FAMILIES = {
    "mamba": (MambaConfig, MambaForCausalLM, _MAMBA),
    "falcon_mamba": (FalconMambaConfig, FalconMambaForCausalLM, {**_MAMBA, "tie_word_embeddings": False}),
    "jamba": (JambaConfig, JambaForCausalLM, _JAMBA),
    "mamba2": (Mamba2Config, Mamba2ForCausalLM, _MAMBA2),
    "granitemoehybrid": (GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM, _GRANITE),
    "bamba": (BambaConfig, BambaForCausalLM, _BAMBA),
    "falcon_h1": (FalconH1Config, FalconH1ForCausalLM, _FALCON_H1),
    "nemotron_h": (NemotronHConfig, NemotronHForCausalLM, _NEMOTRON),
    "qwen3_5": (Qwen3_5TextConfig, Qwen3_5ForCausalLM, _QWEN),
    "qwen3_5_moe": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, _QWEN_MOE),
    "lfm2": (Lfm2Config, Lfm2ForCausalLM, _LFM2),
    "lfm2_moe": (Lfm2MoeConfig, Lfm2MoeForCausalLM, _LFM2_MOE),
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM, _QWEN_MOE),
}


def make_tiny(name: str, seed: int, overrides: dict):
    """A model whose every weight is random: also the norms, A_log, D and the biases, which init to constants."""
    config_class, model_class, defaults = FAMILIES[name]
    torch.manual_seed(seed)
    values = {**defaults, **overrides}
    if "layer_types" in values:
        values["layer_types"] = values["layer_types"][: values["num_hidden_layers"]]
    model = model_class(config_class(**values)).float().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "A_log" in key:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif "norm" in key and _is_offset(name, key):
                parameter.copy_(torch.randn_like(parameter) * 0.2)
            elif "norm" in key or key.endswith("D"):
                parameter.copy_(1 + torch.randn_like(parameter) * 0.2)
            elif "bias" in key:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.copy_(torch.randn_like(parameter) * (0.7 if "embed" in key else parameter.shape[-1] ** -0.5))
        for key, buffer in model.named_buffers():
            if key.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(torch.randn_like(buffer) * 0.3)
    if getattr(model.config, "tie_word_embeddings", False):
        model.tie_weights()
    return model


def _is_offset(name: str, key: str) -> bool:
    """Whether a norm multiplies by 1 + its weights."""
    return name.startswith("qwen3") and "linear_attn" not in key


def save_tiny(folder: Path, name: str, seed: int, overrides: dict) -> None:
    """Write the checkpoint folder (without a tokenizer)."""
    make_tiny(name, seed, overrides).save_pretrained(folder)
