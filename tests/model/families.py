"""The data of the tests of all families: a row of ROWS for each. A new family is a new row, without test code."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.model.folders import REMOVED

Changes = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A family of models. `Changes` are keys of config.json over those of its tiny checkpoint (tests/tiny.py).

    mixer: kind of each layer that is not attention. fields(oracle): fields of our config, from that of transformers,
    whose value transformers has under another name than NAMES says, or derives. cases: name -> overrides of the tiny
    checkpoint, compared with transformers within 1e-5, or the tolerance of that name. seed: of their weights. bare: the
    keys of a file that says nothing else; model_type is the family's by default. said: files that transformers reads
    as we do, besides the tiny checkpoint's. same: files of the same model as the tiny checkpoint. reads: (file, fields
    of our config that it gives). refused: (file, pattern of the sentence after "config.json: "). is_nested: whether
    multimodal checkpoints have the keys below text_config. fingerprint: a file, and its model's fingerprint in the
    first version with the family, for weights of the digest 00 01 .. 0f in bfloat16 and the arithmetic "numerics".
    """

    mixer: str
    fields: Callable[[Any], Changes]
    cases: Mapping[str, Changes]
    fingerprint: tuple[Changes, str]
    bare: Changes = field(default_factory=dict)
    said: Sequence[Changes] = ()
    same: Sequence[Changes] = ()
    reads: Sequence[tuple[Changes, Changes]] = ()
    refused: Sequence[tuple[Changes, str]] = ()
    tolerances: Mapping[str, float] = field(default_factory=dict)
    seed: int = 1
    is_nested: bool = False


# Field of our config -> its names in those of transformers; the first name that is there holds.
NAMES = {
    "d_state": ("mamba_d_state", "ssm_state_size", "state_size"),
    "d_conv": ("mamba_d_conv", "conv_kernel", "conv_L_cache"),
    "conv_bias": ("mamba_conv_bias", "use_conv_bias"),
    "norm_eps": ("rms_norm_eps", "layer_norm_epsilon", "norm_eps"),
    "mamba2_heads": ("mamba_n_heads", "mamba_num_heads", "num_heads"),
    "mamba2_head_dim": ("mamba_d_head", "mamba_head_dim", "head_dim"),
    "mamba2_groups": ("mamba_n_groups", "n_groups"),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "shared_intermediate_size": ("shared_intermediate_size", "shared_expert_intermediate_size"),
}
INFINITY = {"__float__": "Infinity"}
NAN = {"__float__": "NaN"}


def no(key: str, value: object, expected: str, **others: object) -> tuple[Changes, str]:
    """A refusal that names the changed key and its value. others: keys that are changed besides."""
    return {key: value, **others}, f"{key} is {re.escape(reprlib.repr(value))}; expected {expected}"


def no_biases(*keys: str) -> list[tuple[Changes, str]]:
    return [no(key, True, "false, the only one supported") for key in keys]


def no_multiple(key: str, divisor: str, value: int, of: int, **others: object) -> tuple[Changes, str]:
    """The refusal of a value of `divisor` that does not divide `of`, the tiny checkpoint's value of `key`."""
    return {divisor: value, **others}, f"{key} is {of}; expected a multiple of {divisor}, {value}"


ROPE = {"rope_type": "default", "rope_theta": 1e4}
OLD_ROPE = {"rope_parameters": REMOVED, "rope_theta": 1e4, "rope_scaling": None}
NO_YARN = ({"rope_parameters": {**ROPE, "rope_type": "yarn"}},
           "rope_parameters.rope_type is 'yarn'; expected \"default\", .*YaRN")  # fmt: skip
INTEGER = "an integer from 1"


def mamba(o: Any) -> Changes:
    return {
        "d_inner": o.intermediate_size, "intermediate_size": 0, "proj_bias": o.use_bias, "dt_rank": o.time_step_rank,
        "mixer_norm": "weightless" if hasattr(o, "mixer_rms_eps") else "none",
        "mixer_norm_eps": getattr(o, "mixer_rms_eps", 1e-6),
    }  # fmt: skip


def jamba(o: Any) -> Changes:
    return {
        "d_inner": o.mamba_expand * o.hidden_size, "dt_rank": o.mamba_dt_rank, "proj_bias": o.mamba_proj_bias,
        "mixer_norm": "weighted", "mixer_norm_eps": o.rms_norm_eps,
        "feed_forwards": tuple("moe" if count > 1 else "mlp" for count in o.layers_num_experts),
    }  # fmt: skip


def granite(o: Any) -> Changes:
    without = {} if o.num_local_experts else {"intermediate_size": 0, "num_experts_per_tok": 0}
    return {
        **without,
        "d_inner": o.mamba_expand * o.hidden_size,
        "feed_forwards": ("moe" if o.num_local_experts else "mlp",) * o.num_hidden_layers,
        "multipliers": {
            "embedding": o.embedding_multiplier, "residual": o.residual_multiplier,
            "attention": o.attention_multiplier, "logits": 1 / o.logits_scaling,
        },
    }  # fmt: skip


def bamba(o: Any) -> Changes:
    return {"d_inner": o.mamba_expand * o.hidden_size, "feed_forwards": ("mlp",) * o.num_hidden_layers}


def falcon_h1(o: Any) -> Changes:
    return {
        "d_inner": o.mamba_d_ssm or o.mamba_expand * o.hidden_size, "feed_forwards": ("mlp",) * o.num_hidden_layers,
        "multipliers": {
            "embedding": o.embedding_multiplier, "residual": 1.0, "attention": None, "logits": o.lm_head_multiplier,
            "ssm": tuple(o.ssm_multipliers or [1.0] * 5), "mlp": tuple(o.mlp_multipliers or [1.0] * 2),
            "ssm_in": o.ssm_in_multiplier, "ssm_out": o.ssm_out_multiplier, "key": o.key_multiplier,
            "attention_in": o.attention_in_multiplier, "attention_out": o.attention_out_multiplier,
        },
    }  # fmt: skip


def nemotron_h(o: Any) -> Changes:
    experts = ["num_experts", "num_experts_per_tok", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor",
               "moe_intermediate_size", "moe_shared_expert_intermediate_size"]  # fmt: skip
    return {
        **({} if "moe" in o.layers_block_type else dict.fromkeys(experts, 0)),
        "d_inner": o.mamba_num_heads * o.mamba_head_dim, "moe_latent_size": o.moe_latent_size or 0,
        "feed_forwards": tuple(kind if kind in ("mlp", "moe") else "none" for kind in o.layers_block_type),
    }  # fmt: skip


def lfm2(o: Any) -> Changes:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        columns = AutoModelForCausalLM.from_config(o).model.layers[0].feed_forward.w1.out_features
    return {"intermediate_size": columns, "feed_forwards": ("mlp",) * o.num_hidden_layers}


def lfm2_moe(o: Any) -> Changes:
    dense = o.num_dense_layers
    return {"feed_forwards": ("mlp",) * dense + ("moe",) * (o.num_hidden_layers - dense)}


def qwen_moe(o: Any) -> Changes:
    return {
        "intermediate_size": o.moe_intermediate_size, "feed_forwards": ("moe",) * o.num_hidden_layers,
        "norm_topk_prob": getattr(o, "norm_topk_prob", True),
    }  # fmt: skip


PATTERN = {"layers_block_type": REMOVED, "hybrid_override_pattern": "M-"}
BAMBA_SAME = [
    OLD_ROPE,
    {**OLD_ROPE, "partial_rotary_factor": 0.25},
    {"rope_parameters": ROPE, "partial_rotary_factor": 1.0},
    {"mamba_d_head": "auto", "architectures": REMOVED, "mamba_chunk_size": 16, "z_loss_coefficient": 0.1},
]  # fmt: skip
QWEN_ROPE = {**ROPE, "partial_rotary_factor": 0.25}
QWEN_OLD_ROPE = {"rope_parameters": REMOVED, "rope_theta": 1e4, "partial_rotary_factor": 0.25}
SWITCHES = {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "full_attention_interval": 4}
# At the start of a prompt a head's output can be near zero; its norm enlarges the rounding errors there, of both sides,
# up to eps^-0.5 times. With the eps of real models neither is within 1e-5 of float64.
WIDE_EPS = {"rms_norm_eps": 1e-3}
MAMBA_TINY = {"hidden_size": 36, "num_hidden_layers": 2, "state_size": 8, "time_step_rank": 3}
LFM2_TINY = {"hidden_size": 36, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
             "full_attn_idxs": [1]}  # fmt: skip
QWEN_MOE_TINY = {"hidden_size": 36, "num_hidden_layers": 4, "num_attention_heads": 4, "num_experts": 5,
                 "num_experts_per_tok": 2}  # fmt: skip

ROWS = {
    "mamba": Row(
        mixer="mamba", fields=mamba,
        cases={
            "odd sizes": {},
            "one layer": {"num_hidden_layers": 1, "time_step_rank": 1, "conv_kernel": 2},
            "biases": {"use_bias": True, "use_conv_bias": False, "state_size": 24, "conv_kernel": 3},
            "untied": {"tie_word_embeddings": False, "state_size": 16, "hidden_size": 50, "expand": 3},
        },
        fingerprint=(MAMBA_TINY, "86bcd3b22e726b972b914093366634978c6d81e952d4c679edc5f9e0f65e985b"),
        said=[{
            **dict.fromkeys(["expand", "intermediate_size", "state_size", "conv_kernel", "layer_norm_epsilon",
                             "use_bias"], REMOVED), "time_step_rank": "auto",
        }],
        reads=[({"time_step_rank": "auto", "hidden_size": 50}, {"dt_rank": 4})],
        refused=[no("hidden_act", "gelu", "'silu'"), no("hidden_act", ["silu"], "'silu'")],
    ),
    "falcon_mamba": Row(
        mixer="mamba", fields=mamba,
        cases={"odd sizes": {}, "biases": {"use_bias": True, "mixer_rms_eps": 1e-5, "state_size": 16}},
        fingerprint=({**MAMBA_TINY, "tie_word_embeddings": False},
                     "cc97c58fc5728c3add5b9427f50b399d637f80a517b9097c0f6bbb9ae88b0e81"),
    ),
    "jamba": Row(
        mixer="mamba", fields=jamba,
        cases={
            "experts": {},
            "dense": {"num_experts": 1, "num_experts_per_tok": 1},
            "tied": {"tie_word_embeddings": True, "num_key_value_heads": 1, "mamba_d_conv": 2},
            "periods": {
                "attn_layer_period": 2, "attn_layer_offset": 0, "expert_layer_period": 1, "expert_layer_offset": 0,
                "num_experts_per_tok": 3, "mamba_d_state": 24, "mamba_proj_bias": True, "mamba_conv_bias": False,
                "num_key_value_heads": 4,
            },
        },
        fingerprint=(
            {"hidden_size": 40, "intermediate_size": 44, "num_hidden_layers": 4, "num_attention_heads": 4,
             "num_key_value_heads": 2, "num_experts": 4, "attn_layer_period": 3, "attn_layer_offset": 1,
             "mamba_d_state": 8, "mamba_dt_rank": 3},
            "2de937b8abae44793ffa6565255970a875e681f7e024143f3b92afd94b3cd17b",
        ),
        refused=[
            ({"num_attention_heads": 3, "num_key_value_heads": 3}, "hidden_size 40, num_attention_heads 3,"),
            ({"num_key_value_heads": 3}, "num_key_value_heads 3; expected each to be a multiple of the next"),
            no("num_experts_per_tok", 5, "at most 4 experts"),
            no("attn_layer_offset", 3, "less than the period, 3"),
            no("expert_layer_offset", 2, "less than the period, 2"),
            ({"attn_layer_period": 1, "attn_layer_offset": 0}, "make all of 4 layers attention; expected a Mamba"),
        ],
    ),
    "mamba2": Row(
        mixer="mamba2", fields=lambda o: {"d_inner": o.num_heads * o.head_dim, "head_dim": 0},
        cases={
            "odd sizes": {},
            "one group, tied": {"n_groups": 1, "tie_word_embeddings": True, "conv_kernel": 3},
            "wide": {"n_groups": 6, "head_dim": 24, "expand": 4, "state_size": 13, "use_conv_bias": False},
        },
        fingerprint=({"hidden_size": 36, "num_hidden_layers": 2, "num_heads": 6, "head_dim": 12, "n_groups": 2},
                     "e7555d04f028b369404575ba08c63788d7132c27e07bf363aad01c9ec41d8ae2"),
        reads=[({"time_step_limit": written}, {"time_step_limit": limits}) for written, limits in (
            (None, (0.0, float("inf"))), ([0.25, INFINITY], (0.25, float("inf"))),
            ([0, 10**400], (0.0, float("inf"))), ([0.001, 0.5], (0.001, 0.5)), ([1, 1], (1.0, 1.0)),
        )],
        refused=[
            *no_biases("use_bias"), no_multiple("num_heads", "n_groups", 4, of=6),
            *(no("num_heads", heads, "a number that times head_dim 12 is 72, the d_inner") for heads in (5, 8)),
            no("conv_kernel", 1, "an integer from 2"),
            *(no("time_step_limit", limit, "two numbers") for limit in (3, [0, 1, 2], [0, True])),
            *(no("time_step_limit", limit, "two ascending numbers from 0 on") for limit in ([-1, 2], [2, 1])),
            ({"time_step_limit": [INFINITY, INFINITY]}, r"\[inf, inf\]; .*of which only the second may be infinite"),
        ],
    ),
    "granitemoehybrid": Row(
        mixer="mamba2", fields=granite,
        cases={
            "odd sizes": {},
            "experts": {"num_experts_per_tok": 5, "num_local_experts": 7},
            "dense": {
                "num_local_experts": 0, "tie_word_embeddings": False, "num_hidden_layers": 2,
                "layer_types": ["full_attention", "linear_attention"], "num_key_value_heads": 4, "mamba_n_groups": 1,
                "mamba_n_heads": 3, "mamba_expand": 3, "mamba_conv_bias": False, "logits_scaling": 0.7,
                "embedding_multiplier": 0.3,
            },
        },
        fingerprint=(
            {"hidden_size": 36, "num_hidden_layers": 2, "layer_types": ["mamba", "attention"],
             "num_attention_heads": 4, "num_key_value_heads": 2, "mamba_n_heads": 6, "embedding_multiplier": 12,
             "residual_multiplier": 0.22, "attention_multiplier": 0.0625, "logits_scaling": 8},
            "a3953dfd812b1bfc67a0bc04749aff4652446b8d1df42499467c45b0b13af571",
        ),
        reads=[
            ({"layer_types": REMOVED, "layers_block_type": ["mamba", "attention", "attention", "mamba"]},
             {"mixers": ("mamba2", "attention", "attention", "mamba2")}),  # the names before transformers 5
            ({"layer_types": None}, {"mixers": ("mamba2",) * 4}),
            ({"head_dim": 16, "num_key_value_heads": None}, {"head_dim": 16, "num_key_value_heads": 4}),
        ],
        refused=[
            *no_biases("attention_bias", "mamba_proj_bias"),
            no("num_experts_per_tok", 6, "at most 5 experts"), no("num_local_experts", -1, "an integer from 0"),
            no("position_embedding_type", "rope", '"nope"'),
            no("layer_types", ["mamba"], "a list with the type of each"),
            ({"layer_types": ["mamba2"] * 4}, r"layer_types\[0\] is 'mamba2'; expected linear_attention"),
            ({"layer_types": ["attention"] * 4, "position_embedding_type": "rope"},
             "all of 4 layers are attention, so that the model has no recurrent state to cache; expected a mamba lay"),
            no("layers_block_type", 3, "a list", layer_types=None),
            no_multiple("num_attention_heads", "num_key_value_heads", 3, of=4),
            no("num_attention_heads", 5, "a multiple of num_key_value_heads, 2"),
            no_multiple("hidden_size", "num_attention_heads", 8, of=36),
            no_multiple("mamba_n_heads", "mamba_n_groups", 4, of=6),
            no("mamba_n_heads", 10, "a divisor of 72, the d_inner"), no("mamba_d_head", 8, "12, the only one support"),
            *(no("logits_scaling", value, "a number from 1e-18 to") for value in (0, 5e-324)),
        ],
    ),
    "bamba": Row(
        mixer="mamba2", fields=bamba,
        seed=2,  # of the weights of seed 1, a token is ill-conditioned: transformers in float32 is off by 6e-6 there
        cases={
            "odd sizes": {},
            "limits of the step, tied": {
                "time_step_limit": (0.4, 1.1), "num_key_value_heads": 4, "head_dim": 20, "mamba_n_groups": 3,
                "tie_word_embeddings": True, "attn_layer_indices": [0, 3],
            },
            "other wavelengths and factor": {
                "rope_parameters": {**ROPE, "rope_theta": 1e6, "partial_rotary_factor": 0.25}, "head_dim": 24,
                "num_key_value_heads": 1, "mamba_expand": 3, "mamba_n_heads": 4, "mamba_conv_bias": False,
                "mamba_d_conv": 3,
            },
            "no attention": {"attn_layer_indices": None, "num_hidden_layers": 2},
        },
        fingerprint=(
            {"hidden_size": 36, "num_hidden_layers": 2, "attn_layer_indices": [1], "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 12, "mamba_n_heads": 6},
            "966463296419f2082e50619824973393dd09fef175c60bae24398df50879ecb0",
        ),
        said=BAMBA_SAME, same=BAMBA_SAME,  # a factor beside the table is one that transformers replaces
        reads=[({"num_key_value_heads": None}, {"num_key_value_heads": 4})],
        refused=[
            *no_biases("attention_bias", "mamba_proj_bias", "mlp_bias"), no("hidden_act", "gelu", "'silu'"),
            *(no("attn_layer_indices", places, "a list of numbers of the 4 layers") for places in ([4], 1)),
            ({"attn_layer_indices": [0, 1, 2, 3]}, "all of 4 layers are attention, .*; expected a Mamba-2 layer"),
            no_multiple("num_attention_heads", "num_key_value_heads", 3, of=4),
            no_multiple("hidden_size", "num_attention_heads", 8, of=36, head_dim=None),
            ({"head_dim": 10, "rope_parameters": ROPE},
             "partial_rotary_factor is 0.5; expected a factor up to 1 that makes an even number of the 10"),
            NO_YARN, no_multiple("mamba_n_heads", "mamba_n_groups", 4, of=6),
            ({"mamba_expand": 1.7}, "mamba_n_heads is 6; expected a divisor of 61, the d_inner"),
            no("mamba_d_head", 9, "12, the only one supported"),
        ],
    ),
    "falcon_h1": Row(
        mixer="hybrid", fields=falcon_h1,
        cases={
            "no norm": {},
            "norm first": {"mamba_rms_norm": True, "num_key_value_heads": 4, "head_dim": 8},
            "norm first, limits of the step": {
                "mamba_rms_norm": True, "time_step_limit": (0.4, 1.1), "num_key_value_heads": 4, "head_dim": 8,
                "mamba_n_groups": 3,
            },
            "gate first, tied": {
                "mamba_rms_norm": True, "mamba_norm_before_gate": False, "tie_word_embeddings": True,
                "mamba_d_ssm": None, "mamba_n_heads": 4, "mamba_conv_bias": False,
                "rope_parameters": {**ROPE, "rope_theta": 1e11},
            },
            "gate first, no lists of multipliers": {
                "mamba_rms_norm": True, "mamba_norm_before_gate": False, "tie_word_embeddings": True,
                "mamba_d_ssm": None, "mamba_n_heads": 4, "mamba_conv_bias": False, "mlp_multipliers": None,
                "ssm_multipliers": None,
            },
        },
        fingerprint=(
            {"hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
             "head_dim": 10, "mamba_d_ssm": 60, "mamba_n_heads": 6, "mlp_multipliers": [0.5, 2],
             "ssm_in_multiplier": 1.25},
            "4862d4cdeaebed1d9285db2849b2dcb7f7fdbac9f6c4f33f6592484c053dbb09",
        ),
        same=[
            OLD_ROPE, {"mamba_d_head": "auto", "mamba_expand": 5, "architectures": REMOVED},
            {"mamba_use_mlp": True, "mlp_expansion_factor": 8, "attention_bias": False, "mamba_chunk_size": 16},
        ],
        reads=[({"num_key_value_heads": None}, {"num_key_value_heads": 4})],
        refused=[
            *no_biases("attention_bias", "mamba_proj_bias", "mlp_bias", "projectors_bias"),
            no("hidden_act", "gelu", "'silu'"), no("mamba_use_mlp", False, "true"),
            no_multiple("num_attention_heads", "num_key_value_heads", 3, of=4),
            no_multiple("hidden_size", "num_attention_heads", 8, of=36, head_dim=None),
            ({"head_dim": 9}, "partial_rotary_factor is 1.0; expected a factor up to 1 that makes an even number of t"),
            ({"rope_parameters": {**ROPE, "partial_rotary_factor": 0.4}},
             "partial_rotary_factor is 0.4; expected 1, the only"),
            NO_YARN, no_multiple("mamba_n_heads", "mamba_n_groups", 4, of=6),
            ({"mamba_d_ssm": 61}, "mamba_n_heads is 6; expected a divisor of 61, the d_inner"),
            no("mamba_d_head", 9, "10, the only one supported"),
            no("mamba_expand", 0.0, "a factor that takes hidden_size", mamba_d_ssm=None),
            no("mamba_rms_norm", None, "true or false"), no("mamba_norm_before_gate", 1, "true or false"),
            no("ssm_multipliers", [1, 2, 3, 4], "5 numbers"), no("mlp_multipliers", 1.0, "2 numbers"),
            ({"ssm_multipliers": [1, 2, 3, 4, "5"]}, r"ssm_multipliers\[4\] is '5'; expected a number"),
            ({"mlp_multipliers": [1.0, NAN]}, r"mlp_multipliers\[1\] is nan; expected a number"),
            no("key_multiplier", None, "a number"),
        ],
    ),
    "nemotron_h": Row(
        mixer="mamba2", fields=nemotron_h, bare={"hybrid_override_pattern": "ME*-"},
        cases={
            "experts in groups": {},
            "latent experts, weights not normalised": {
                "moe_latent_size": 16, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "num_experts_per_tok": 5,
                "n_groups": 3,
            },
            "one latent expert a token": {
                "moe_latent_size": 16, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "num_experts_per_tok": 1,
            },
            "limits of the step": {
                "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "mlp"], "n_groups": 1,
                "time_step_limit": (0.4, 1.1), "time_step_min": 0.1, "num_key_value_heads": 1, "use_conv_bias": False,
            },
            "MLP first": {
                "num_hidden_layers": 3, "layer_types": ["mlp", "linear_attention", "full_attention"], "n_groups": 1,
                "head_dim": 24, "num_key_value_heads": 4, "conv_kernel": 3, "use_conv_bias": False,
            },
        },
        fingerprint=({"hidden_size": 36, "hybrid_override_pattern": "ME*-", "num_hidden_layers": 4,
                      "time_step_min": 0.01}, "b4c35ceb9a37bcd89fa442fdb565e466c93374b270fb5388e4154f47b2fbcf21"),
        same=[
            {"layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba"]},
            {"layers_block_type": REMOVED, "hybrid_override_pattern": "ME*-M"},
            {"layers_block_type": None, "hybrid_override_pattern": "ME*-M", "num_hidden_layers": 5},
            {"hybrid_override_pattern": "M", "num_hidden_layers": 5},
            {"time_step_min": 0.5, "expand": 7, "mtp_hybrid_override_pattern": "*E", "residual_in_fp32": True},
            {"architectures": REMOVED},
        ],
        reads=[(
            {**PATTERN, "hybrid_override_pattern": "M*", "head_dim": REMOVED, "attention_head_dim": 96},
            {"head_dim": 96, **dict.fromkeys(["intermediate_size", "num_experts", "moe_intermediate_size",
                                              "topk_group", "routed_scaling_factor"], 0)},
        )],
        refused=[
            *no_biases("attention_bias", "mamba_proj_bias", "mlp_bias", "use_bias"),
            no("mlp_hidden_act", "silu", '"relu2", the only one supported'), no("mamba_hidden_act", "gelu", '"silu"'),
            no("sliding_window", 128, "null, the only one supported"),
            no_multiple("num_attention_heads", "num_key_value_heads", 3, of=4),
            no_multiple("mamba_num_heads", "n_groups", 4, of=6),
            ({"layers_block_type": ["mamba2"]}, r"layers_block_type\[0\] is 'mamba2'; expected linear_attention"),
            no("layers_block_type", "M", "the type of each layer"),
            ({"layers_block_type": None}, "hybrid_override_pattern is None; expected the type of each layer"),
            ({"num_hidden_layers": 4}, "layers_block_type is .*; expected a list with the type of each of the 4"),
            no("layers_block_type", ["attention", "mlp"], "a Mamba-2 layer .linear_attention, M., whose"),
            ({**PATTERN, "hybrid_override_pattern": "MX"}, "is 'MX'; expected 2 letters, each of them M, .*, -, E"),
            ({**PATTERN, "num_hidden_layers": 3}, "hybrid_override_pattern is 'M-'; expected 3 letters"),
            ({**PATTERN, "hybrid_override_pattern": "E*-"}, "is 'E.*'; expected a Mamba-2 layer"),
            ({**PATTERN, "hybrid_override_pattern": ""}, f"num_hidden_layers is 0; expected {INTEGER}"),
            no("n_shared_experts", 2, "1, the only one supported"),
            *(no("n_group", n, "a divisor of the 6 experts that leaves 2 at least") for n in (4, 6)),
            no("topk_group", 4, "at most 3 groups"), no("num_experts_per_tok", 5, "at most 4 experts, those of topk"),
            no("moe_latent_size", 0, INTEGER), no("norm_topk_prob", 1, "true or false"),
        ],
    ),
    "qwen3_5": Row(
        mixer="delta", fields=lambda o: {"feed_forwards": ("mlp",) * o.num_hidden_layers},
        bare={"model_type": "qwen3_5_text"}, is_nested=True,
        cases={
            "real eps": {},
            "odd sizes": WIDE_EPS,
            "tied, one key head": {
                **WIDE_EPS, "tie_word_embeddings": True, "linear_num_key_heads": 1, "linear_conv_kernel_dim": 3,
                "head_dim": 20, "num_key_value_heads": 4,
                "rope_parameters": {**ROPE, "rope_theta": 1e7, "partial_rotary_factor": 1.0},
            },
            "no attention": {**WIDE_EPS, "layer_types": ["linear_attention"] * 2, "num_hidden_layers": 2,
                             "linear_num_value_heads": 2},
        },
        tolerances={"real eps": 2e-4},
        fingerprint=({"hidden_size": 36, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
                     "ebf2e17bc39517c4baaea9d90855c2d04e81cd7f7da2f7776753da5d58ace5ec"),
        same=[
            {"layer_types": [*["linear_attention"] * 3, "attention"]},
            QWEN_OLD_ROPE, {**QWEN_OLD_ROPE, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 0]}},
            {"rope_parameters": {**QWEN_ROPE, "mrope_interleaved": True, "mrope_section": [1, 1, 0]}},
            {"rope_parameters": {"rope_theta": 1e4}},
            {"model_type": "qwen3_5", "architectures": REMOVED}, {"architectures": REMOVED},
            {**SWITCHES, "attention_bias": False, "mlp_only_layers": []},
        ],
        said=[{"layer_types": REMOVED, "full_attention_interval": 2}],
        reads=[
            ({"layer_types": REMOVED}, {"mixers": ("delta", "delta", "delta", "attention")}),
            ({"layer_types": REMOVED, "full_attention_interval": 2}, {"mixers": ("delta", "attention") * 2}),
        ],
        refused=[
            *no_biases("attention_bias"), no("attn_output_gate", False, "true, the only one supported"),
            no("mamba_ssm_dtype", "bfloat16", '"float32", the only one supported'),
            no("mlp_only_layers", [1], r"\[\], the only one supported"), no("hidden_act", "gelu", "'silu'"),
            ({"layer_types": ["sliding_attention"] * 4}, r"layer_types\[0\] is 'sliding_attention'; expected linear_"),
            ({"layer_types": ["full_attention"] * 4},
             "all of 4 layers are attention, .*; expected a linear_attention layer"),
            no("layer_types", ["full_attention"], "a list with the type of each of t"),
            ({"layer_types": [3] * 4}, r"layer_types\[0\] is 3; expected linear_attention or full_attention"),
            no("full_attention_interval", 0, INTEGER, layer_types=None),
            ({"rope_parameters": {**QWEN_ROPE, "rope_type": "yarn", "factor": 4.0}}, NO_YARN[1]),
            ({"rope_parameters": {**QWEN_ROPE, "factor": 4.0}}, "rope_parameters.factor is 4.0; expected no key besi"),
            ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "rope_scaling.type is 'linear'; expected"),
            ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling.type is 'yarn'; expected .*YaRN"),
            no("rope_parameters", "yarn", "an object"),
            *(({"rope_parameters": {**ROPE, "partial_rotary_factor": factor}},
               f"rope_parameters.partial_rotary_factor is {factor}; expected a factor up") for factor in (0.2, 2.0)),
            *(({"rope_parameters": {**QWEN_ROPE, "rope_theta": theta}},
               f"rope_parameters.rope_theta is {text}; expected a number from 1 to")
              for theta, text in ((0, "0"), (INFINITY, "inf"))),
            ({"rms_norm_eps": INFINITY}, "rms_norm_eps is inf; expected a number"),
            no("rms_norm_eps", {"__float__": "big"}, "a number"),
            no_multiple("num_attention_heads", "num_key_value_heads", 3, of=4),
            no_multiple("linear_num_value_heads", "linear_num_key_heads", 3, of=4),
            no("linear_key_head_dim", 0, INTEGER), no("linear_conv_kernel_dim", 1, "an integer from 2"),
            ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config says that the weights are qu"),
        ],
    ),
    "qwen3_5_moe": Row(
        mixer="delta", fields=qwen_moe, bare={"model_type": "qwen3_5_moe_text"}, is_nested=True,
        cases={
            "experts": WIDE_EPS,
            "all experts": {**WIDE_EPS, "num_experts": 3, "num_experts_per_tok": 3,
                            "shared_expert_intermediate_size": 7, "tie_word_embeddings": True},
        },
        fingerprint=(QWEN_MOE_TINY, "d38b7336ccb1948ba4d856c8e9263dff2e89bc7000becca8685925e1546374b7"),
        refused=[
            no("num_experts_per_tok", 6, "at most 5 experts"), no("norm_topk_prob", 1, "true or false"),
            *(no(key, 0, INTEGER) for key in ("num_experts", "moe_intermediate_size",
                                              "shared_expert_intermediate_size")),
            no("attn_output_gate", False, "true"),
        ],
    ),
    "qwen3_next": Row(
        mixer="delta", fields=qwen_moe,
        cases={
            "grouped projections": WIDE_EPS,
            "grouped projections, weights as they are": {
                **WIDE_EPS, "norm_topk_prob": False, "num_experts_per_tok": 3, "linear_num_key_heads": 3,
                "linear_num_value_heads": 6, "linear_conv_kernel_dim": 2,
            },
        },
        fingerprint=(QWEN_MOE_TINY, "b185206c7dc153ac5c9b2fee8e8200127e4801a9b4403d5d646862519112529c"),
        refused=[
            *no_biases("attention_bias"), no("decoder_sparse_step", 2, "1, the only one supported"),
            no("mlp_only_layers", [0], r"\[\], the only one supported"),
            no("num_experts_per_tok", 6, "at most 5 experts"),
        ],
    ),
    "lfm2": Row(
        mixer="short_conv", fields=lfm2, bare={"full_attn_idxs": [2, 5]},
        cases={
            "odd sizes": {},
            "wide kernel, untied": {"conv_L_cache": 5, "tie_word_embeddings": False, "norm_eps": 1e-3},
            "two taps, all heads": {
                "conv_L_cache": 2, "num_key_value_heads": 6, "block_auto_adjust_ff_dim": False, "num_hidden_layers": 2,
                "rope_parameters": {**ROPE, "rope_theta": 1e6},
            },
            "no attention": {"layer_types": ["conv"] * 3, "num_hidden_layers": 3, "block_ffn_dim_multiplier": 1.7},
        },
        fingerprint=(LFM2_TINY, "004fda04537b2fed97c85720bcdd9181cb96bde9fd129023a542147fb1403763"),
        said=[  # two thirds, a factor and a multiple, as transformers rounds them
            {"block_auto_adjust_ff_dim": False}, {"block_ffn_dim_multiplier": 1.3}, {"block_multiple_of": 1},
            {"intermediate_size": 2}, {"intermediate_size": 12288, "block_multiple_of": 256},
        ],
        same=[
            {"layer_types": REMOVED, "full_attn_idxs": [1], "rope_parameters": REMOVED, "rope_theta": 1e4,
             "block_ff_dim": 60, "intermediate_size": 7, "tie_embedding": True, "tie_word_embeddings": False,
             "conv_dim": 36, "conv_dim_out": 36, "block_use_swiglu": True, "use_pos_enc": True},
            {"architectures": REMOVED}, {"head_dim": 6},
        ],
        refused=[
            *no_biases("conv_bias"), no("conv_L_cache", 1, "an integer from 2"),
            *(no(key, 40, "36, the only one supported") for key in ("conv_dim", "conv_dim_out")),
            *(no(key, False, "true") for key in ("block_use_swiglu", "use_pos_enc")),
            ({"layer_types": ["full_attention"] * 4}, "all of 4 layers are attention, .*; expected a conv layer"),
            ({"layer_types": ["sliding_attention"] * 4},
             r"layer_types\[0\] is 'sliding_attention'; expected conv or full_att"),
            *(no("full_attn_idxs", places, "a list of numbers of the 4 layers", layer_types=None)
              for places in (None, [4], [True])),
            no_multiple("num_attention_heads", "num_key_value_heads", 4, of=6),
            no_multiple("hidden_size", "num_attention_heads", 8, of=36), NO_YARN,
            ({"partial_rotary_factor": 0.34}, "partial_rotary_factor is 0.33.*; expected 1, the only one supported"),
            no("block_ffn_dim_multiplier", 0.0, "a factor that takes 40 to 1 or more columns"),
            no("block_ffn_dim_multiplier", 1e300, "a number from"), no("block_multiple_of", 0, INTEGER),
            ({"intermediate_size": 1}, "block_ffn_dim_multiplier is 1.0; expected a factor that takes 0 to 1 or more"),
            no("tie_embedding", 1, "true or false"),
        ],
    ),
    "lfm2_moe": Row(
        mixer="short_conv", fields=lfm2_moe, bare={"layer_types": ["conv", "full_attention"] * 16},
        cases={
            "odd sizes": {},
            "weights as they are, no bias, untied": {
                "norm_topk_prob": False, "use_expert_bias": False, "tie_word_embeddings": False,
                "num_experts_per_tok": 3, "conv_L_cache": 4,
            },
            "experts alone, one a token": {"num_dense_layers": 0, "num_experts_per_tok": 1, "num_key_value_heads": 6},
            "all experts": {"num_dense_layers": 3, "num_experts_per_tok": 5, "use_expert_bias": False},
        },
        fingerprint=({**LFM2_TINY, "num_dense_layers": 1, "num_experts": 5, "num_experts_per_tok": 2},
                     "bcf1e7c7cb297a4acb020795433e457b072b42b02a1dc0a9afd2397a1b8a4b4c"),
        same=[
            {"rope_parameters": REMOVED, "rope_theta": 1e4, "tie_embedding": True, "tie_word_embeddings": False},
            {"architectures": REMOVED, "output_router_logits": True},
            {"block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0},  # the rounding of the dense LFM2
        ],
        refused=[
            *no_biases("conv_bias"), no("hidden_act", "gelu", "'silu'"), no("conv_L_cache", 1, "an integer from 2"),
            no("num_experts_per_tok", 6, "at most 5 experts"), NO_YARN,
            *(no("num_dense_layers", value, "an integer from 0") for value in (-1, None)),
            no("moe_intermediate_size", 0, INTEGER), no("use_expert_bias", None, "true or false"),
            no("norm_topk_prob", 1, "true or false"), no("routed_scaling_factor", None, "a number"),
            ({"layer_types": ["full_attention"] * 4}, "all of 4 layers are attention, .*; expected a conv layer"),
        ],
    ),
}  # fmt: skip
