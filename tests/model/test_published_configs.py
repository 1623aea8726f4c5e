"""config.json of each family as it is published: the text of the file, with its own numbers and its own JSON."""

from __future__ import annotations

import json
from pathlib import Path

from apcbatch.data.end_tokens import read_end_tokens
from apcbatch.data.tokenization.tokenizer import read_vocab_size
from apcbatch.model.families import load_model_config
from apcbatch.model.quantization import read_quantization
from tests.effort import table

# transformers 4 writes a bare Infinity, which JSON lacks; transformers 5 writes {"__float__": "Infinity"}.
MAMBA2 = """"conv_kernel": 4, "expand": 2, "head_dim": 64, "hidden_act": "silu", "layer_norm_epsilon": 1e-05,
    "model_type": "mamba2", "num_hidden_layers": 64, "residual_in_fp32": true, "rms_norm": true, "state_size": 128,
    "time_step_floor": 0.0001, "time_step_limit": [0.0, Infinity], "time_step_max": 0.1, "time_step_min": 0.001,
    "use_bias": false, "use_conv_bias": true, "chunk_size": 256, "architectures": ["Mamba2ForCausalLM"]"""
MAMBA = """"conv_kernel": 4, "hidden_act": "silu", "layer_norm_epsilon": 1e-05, "residual_in_fp32": true,
    "state_size": 16, "time_step_floor": 0.0001, "time_step_init_scheme": "random", "time_step_max": 0.1,
    "time_step_min": 0.001, "time_step_scale": 1.0, "use_bias": false, "use_conv_bias": true"""
NEMOTRON = """"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "attention_bias": false,
    "conv_kernel": 4, "expand": 2, "layer_norm_epsilon": 1e-05, "mamba_hidden_act": "silu", "mamba_proj_bias": false,
    "mlp_bias": false, "mlp_hidden_act": "relu2", "num_hidden_layers": 52, "rescale_prenorm_residual": true,
    "residual_in_fp32": false, "sliding_window": null, "ssm_state_size": 128, "tie_word_embeddings": false,
    "time_step_limit": [0.0, Infinity], "use_bias": false, "use_conv_bias": true, "vocab_size": 131072, "n_groups": 8,
    "num_attention_heads": 32, "mamba_head_dim": 64"""
GRANITE_LAYERS = str((["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4).replace("'", '"')
GRANITE = f""""architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid",
    "attention_bias": false, "attention_multiplier": 0.0078125, "embedding_multiplier": 12, "hidden_act": "silu",
    "layer_types": {GRANITE_LAYERS}, "mamba_chunk_size": 256, "mamba_conv_bias": true, "mamba_d_conv": 4,
    "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_proj_bias": false,
    "max_position_embeddings": 131072, "normalization_function": "rmsnorm", "num_hidden_layers": 40,
    "position_embedding_type": "nope", "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": null,
    "rope_theta": 10000, "tie_word_embeddings": true, "vocab_size": 100352, "bos_token_id": 100257,
    "eos_token_id": 100257, "pad_token_id": 100256, "time_step_limit": [0.0, {{"__float__": "Infinity"}}]"""
QWEN_LINEAR = """"head_dim": 256, "hidden_act": "silu", "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16, "attention_bias": false,
    "max_position_embeddings": 262144, "rms_norm_eps": 1e-06"""

# name -> (config.json, (vocab_size, hidden_size, layers, layers whose mixer is attention, heads, key and value heads,
# head_dim, context_length), eos token ids)
PUBLISHED = {
    "mamba-130m-hf": (f"""{{"architectures": ["MambaForCausalLM"], "model_type": "mamba", {MAMBA}, "bos_token_id": 0,
        "d_inner": 1536, "d_model": 768, "eos_token_id": 0, "expand": 2, "fused_add_norm": true, "hidden_size": 768,
        "intermediate_size": 1536, "n_layer": 24, "num_hidden_layers": 24, "pad_vocab_size_multiple": 8,
        "rms_norm": true, "ssm_cfg": {{}}, "time_step_rank": 48, "vocab_size": 50280}}""",
        (50280, 768, 24, 0, 0, 0, 0, None), (0,)),
    "falcon-mamba-7b": (f"""{{"architectures": ["FalconMambaForCausalLM"], "model_type": "falcon_mamba", {MAMBA},
        "bos_token_id": 0, "eos_token_id": 11, "expand": 16, "hidden_size": 4096, "intermediate_size": 8192,
        "num_hidden_layers": 64, "pad_token_id": 11, "rescale_prenorm_residual": false, "tie_word_embeddings": false,
        "time_step_rank": 256, "vocab_size": 65024}}""",
        (65024, 4096, 64, 0, 0, 0, 0, None), (11,)),
    "mamba2-2.7b-hf": (f"""{{{MAMBA2}, "bos_token_id": 0, "eos_token_id": 0, "hidden_size": 2560, "n_groups": 1,
        "num_heads": 80, "tie_word_embeddings": true, "time_step_rank": 160, "vocab_size": 50288}}""",
        (50288, 2560, 64, 0, 0, 0, 0, None), (0,)),
    "Mamba-Codestral-7B-v0.1": (f"""{{{MAMBA2}, "bos_token_id": 0, "eos_token_id": 2, "hidden_size": 4096,
        "n_groups": 8, "num_heads": 128, "norm_before_gate": true, "tie_word_embeddings": false,
        "time_step_rank": 256, "vocab_size": 32768}}""",
        (32768, 4096, 64, 0, 0, 0, 0, None), (2,)),
    "AI21-Jamba-1.5-Mini": ("""{"architectures": ["JambaForCausalLM"], "attention_dropout": 0.0,
        "attn_layer_offset": 4, "attn_layer_period": 8, "bos_token_id": 1, "eos_token_id": [2, 518],
        "expert_layer_offset": 1, "expert_layer_period": 2, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "mamba_conv_bias": true, "mamba_d_conv": 4, "mamba_d_state": 16,
        "mamba_dt_rank": 256, "mamba_expand": 2, "mamba_proj_bias": false, "max_position_embeddings": 262144,
        "model_type": "jamba", "num_attention_heads": 32, "num_experts": 16, "num_experts_per_tok": 2,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "num_logits_to_keep": 1, "rms_norm_eps": 1e-06,
        "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "transformers_version": "4.40.2", "use_mamba_kernels": true, "vocab_size": 65536}""",
        (65536, 4096, 32, 4, 32, 8, 128, 262144), (2, 518)),
    "Nemotron-H-8B-Base-8K": (f"""{{{NEMOTRON}, "attention_head_dim": 128, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_size": 4096, "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        "intermediate_size": 21504, "mamba_num_heads": 128, "max_position_embeddings": 8192,
        "num_key_value_heads": 8, "num_query_groups": 8}}""",
        (131072, 4096, 52, 4, 32, 8, 128, 8192), (2,)),
    "NVIDIA-Nemotron-3-Nano-30B-A3B": (f"""{{{NEMOTRON}, "bos_token_id": 1, "eos_token_id": 11, "head_dim": 128,
        "hidden_size": 2688, "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "intermediate_size": 1856, "mamba_num_heads": 64, "max_position_embeddings": 262144, "n_group": 1,
        "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_routed_experts": 128,
        "n_shared_experts": 1, "norm_topk_prob": true, "num_experts_per_tok": 6, "num_key_value_heads": 2,
        "routed_scaling_factor": 2.5, "topk_group": 1}}""",
        (131072, 2688, 52, 6, 32, 2, 128, 262144), (11,)),
    "granite-4.0-h-tiny": (f"""{{{GRANITE}, "hidden_size": 1536, "intermediate_size": 512, "logits_scaling": 6,
        "mamba_n_heads": 48, "num_attention_heads": 12, "num_experts_per_tok": 6, "num_key_value_heads": 4,
        "num_local_experts": 64, "shared_intermediate_size": 1024}}""",
        (100352, 1536, 40, 4, 12, 4, 128, 131072), (100257,)),
    "granite-4.0-h-small": (f"""{{{GRANITE}, "hidden_size": 4096, "intermediate_size": 768, "logits_scaling": 16,
        "mamba_n_heads": 128, "num_attention_heads": 32, "num_experts_per_tok": 10, "num_key_value_heads": 8,
        "num_local_experts": 72, "shared_intermediate_size": 1536}}""",
        (100352, 4096, 40, 4, 32, 8, 128, 131072), (100257,)),
    "Bamba-9B": ("""{"architectures": ["BambaForCausalLM"], "attention_bias": false, "attn_layer_indices": [9, 18, 27],
        "attn_rotary_emb": 64, "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 14336, "mamba_chunk_size": 256, "mamba_conv_bias": true,
        "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1,
        "mamba_n_heads": 128, "mamba_proj_bias": false, "max_position_embeddings": 262144, "mlp_bias": false,
        "model_type": "bamba", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 10000.0, "tie_word_embeddings": false,
        "time_step_limit": [0.0, Infinity], "vocab_size": 128256}""",
        (128256, 4096, 32, 3, 32, 8, 128, 262144), (128001,)),
    "Falcon-H1-7B-Instruct": ("""{"architectures": ["FalconH1ForCausalLM"], "attention_bias": false,
        "attention_in_multiplier": 1.0, "attention_out_multiplier": 0.234375, "attn_layer_indices": null,
        "bos_token_id": 1, "embedding_multiplier": 5.656854249492381, "eos_token_id": 11, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 12288, "key_multiplier": 0.28125,
        "lm_head_multiplier": 0.013020833333333334, "mamba_chunk_size": 256, "mamba_conv_bias": true,
        "mamba_d_conv": 4, "mamba_d_head": 128, "mamba_d_ssm": 3072, "mamba_d_state": 256, "mamba_expand": 2,
        "mamba_n_groups": 1, "mamba_n_heads": 24, "mamba_norm_before_gate": false, "mamba_proj_bias": false,
        "mamba_rms_norm": false, "mamba_use_mlp": true, "max_position_embeddings": 262144, "mlp_bias": false,
        "mlp_expansion_factor": 8, "mlp_multipliers": [0.8838834764831844, 0.1875], "model_type": "falcon_h1",
        "num_attention_heads": 12, "num_hidden_layers": 44, "num_key_value_heads": 2, "pad_token_id": 0,
        "projectors_bias": false, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 100000000000.0,
        "ssm_in_multiplier": 1.0, "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5,
        0.3535533905932738], "ssm_out_multiplier": 0.11785113019775793, "tie_word_embeddings": false,
        "vocab_size": 130049}""",
        (130049, 3072, 44, 0, 12, 2, 128, 262144), (11,)),
    "LFM2-1.2B": ("""{"architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": true, "block_dim": 2048,
        "block_ff_dim": 12288, "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 256,
        "block_norm_eps": 1e-05, "block_out_init_scale": 1.0, "block_use_swiglu": true, "bos_token_id": 1,
        "conv_L_cache": 3, "conv_bias": false, "conv_dim": 2048, "conv_dim_out": 2048, "eos_token_id": 7,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048, "max_position_embeddings": 128000,
        "model_type": "lfm2", "norm_eps": 1e-05, "num_attention_heads": 32, "num_heads": 32, "num_hidden_layers": 16,
        "num_key_value_heads": 8, "pad_token_id": 0, "rope_theta": 1000000.0, "tie_embedding": true,
        "use_pos_enc": true, "vocab_size": 65536}""",
        (65536, 2048, 16, 6, 32, 8, 64, 128000), (7,)),
    "LFM2-8B-A1B": ("""{"architectures": ["Lfm2MoeForCausalLM"], "bos_token_id": 1, "conv_L_cache": 3,
        "conv_bias": false, "eos_token_id": 7, "hidden_size": 2048, "intermediate_size": 7168,
        "layer_types": ["conv", "conv", "full_attention", "conv", "conv", "conv", "full_attention", "conv", "conv",
        "conv", "full_attention", "conv", "conv", "conv", "full_attention", "conv", "conv", "conv", "full_attention",
        "conv", "conv", "full_attention", "conv", "conv"], "max_position_embeddings": 128000,
        "model_type": "lfm2_moe", "moe_intermediate_size": 1792, "norm_eps": 1e-05, "norm_topk_prob": true,
        "num_attention_heads": 32, "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4,
        "num_hidden_layers": 24, "num_key_value_heads": 8, "pad_token_id": 0, "rope_theta": 1000000.0,
        "routed_scaling_factor": 1.0, "use_expert_bias": true, "vocab_size": 65536}""",
        (65536, 2048, 24, 6, 32, 8, 64, 128000), (7,)),
    "Qwen3-Next-80B-A3B-Instruct": (f"""{{"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next",
        {QWEN_LINEAR}, "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "hidden_size": 2048,
        "intermediate_size": 5120, "linear_num_value_heads": 32, "mlp_only_layers": [], "moe_intermediate_size": 512,
        "norm_topk_prob": true, "num_attention_heads": 16, "num_experts": 512, "num_experts_per_tok": 10,
        "num_hidden_layers": 48, "num_key_value_heads": 2, "partial_rotary_factor": 0.25, "rope_scaling": null,
        "rope_theta": 10000000, "shared_expert_intermediate_size": 512, "tie_word_embeddings": false,
        "use_sliding_window": false, "vocab_size": 151936}}""",
        (151936, 2048, 48, 12, 16, 2, 256, 262144), (151645,)),
    "Qwen3.5-27B": (f"""{{"architectures": ["Qwen3_5ForConditionalGeneration"], "image_token_id": 248056,
        "model_type": "qwen3_5", "text_config": {{"model_type": "qwen3_5_text", {QWEN_LINEAR},
        "attn_output_gate": true, "eos_token_id": 248044, "hidden_size": 5120, "intermediate_size": 17408,
        "linear_num_value_heads": 48, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1,
        "num_attention_heads": 24, "num_hidden_layers": 64, "num_key_value_heads": 4, "rope_parameters":
        {{"mrope_interleaved": true, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
        "rope_theta": 10000000, "rope_type": "default"}}, "tie_word_embeddings": false, "vocab_size": 248320}},
        "tie_word_embeddings": false, "video_token_id": 248057, "vision_config": {{"depth": 27}}}}""",
        (248320, 5120, 64, 16, 24, 4, 256, 262144), (248044,)),
}  # fmt: skip


@table("text, sizes, eos", PUBLISHED.values())
def test_published_configs_are_read(
    text: str, sizes: tuple[int | None, ...], eos: tuple[int, ...], tmp_path: Path
) -> None:
    """Fault: a published file is refused, by the reader of the model or by that of the tokenizer, or read otherwise."""
    (tmp_path / "config.json").write_text(text)
    config = load_model_config(tmp_path)
    attention, found = config.mixers.count("attention"), config.architecture()
    assert (config.vocab_size, config.hidden_size, config.num_layers, attention, found["num_attention_heads"],
            found["num_key_value_heads"], found["head_dim"], config.context_length) == sizes  # fmt: skip
    assert read_vocab_size(tmp_path) == sizes[0]
    assert tuple(read_end_tokens(tmp_path, config.vocab_size).files) == eos


def compressed(layout: str, weights: str, ignore: str) -> str:
    """quantization_config as llm-compressor writes it, with activations in 8 bits."""
    return f"""{{"config_groups": {{"group_0": {{"format": "{layout}", "input_activations": {{"actorder": null,
        "block_structure": null, "dynamic": true, "group_size": null, "num_bits": 8, "observer": null,
        "observer_kwargs": {{}}, "strategy": "token", "symmetric": true, "type": "float"}}, "output_activations": null,
        "targets": ["Linear"], "weights": {{"dynamic": false, "observer": "minmax", "observer_kwargs": {{}},
        "symmetric": true, "zp_dtype": null, {weights}}}}}}}, "format": "{layout}", "global_compression_ratio": null,
        "ignore": {ignore}, "kv_cache_scheme": null, "quant_method": "compressed-tensors",
        "quantization_status": "compressed", "sparsity_config": {{}}, "transform_config": {{}}, "version": "0.12.2"}}"""


MODELOPT = """"quant_algo": "%s", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head",
    "backbone.layers.4.mixer.in_proj", "backbone.layers.0.mixer.conv1d", "backbone.layers.1.mixer.gate"]"""
FP8_NEXT = """{"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.embed_tokens", "model.layers.0.linear_attn.conv1d",
    "model.layers.0.linear_attn.in_proj_ba", "model.layers.0.mlp.gate", "model.layers.0.mlp.shared_expert_gate",
    "mtp.fc"]}"""
GPTQ_QWEN = """{"bits": 4, "checkpoint_format": "gptq", "desc_act": false, "dynamic": {"lm_head": {},
    "model.language_model.embed_tokens": {}, "-:.*attn.*": {}, "-:.*shared_expert.*": {}, "-:.*mtp.*": {},
    "-:.*visual.*": {}}, "group_size": 128, "lm_head": false, "meta": {"damp_percent": 0.05, "quantizer":
    ["gptqmodel:5.7.0"], "static_groups": false, "true_sequential": true}, "pack_dtype": "int32",
    "quant_method": "gptq", "sym": true}"""
# name -> (a config of PUBLISHED, quantization_config or None, hf_quant_config.json or None, the format in words, a
# module that is quantised, one that is not)
QUANTISED = {
    "Qwen3-Next-80B-A3B-Instruct-FP8": (
        "Qwen3-Next-80B-A3B-Instruct", FP8_NEXT, None, "FP8, blocks of 128 x 128 (fp8)",
        "model.layers.0.mlp.experts.7.gate_proj", "model.layers.0.mlp.gate"),
    "Qwen3.5-27B-FP8": (
        "Qwen3.5-27B", FP8_NEXT, None, "FP8, blocks of 128 x 128 (fp8)",
        "model.language_model.layers.0.mlp.gate_proj", "lm_head"),
    "Qwen3.5-27B-GPTQ-Int4": (
        "Qwen3.5-27B", GPTQ_QWEN, None, "GPTQ int4, groups of 128, with zeros (gptq)",
        "model.language_model.layers.0.mlp.up_proj", "model.language_model.layers.0.linear_attn.in_proj_qkv"),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-FP8": (
        "NVIDIA-Nemotron-3-Nano-30B-A3B", """{"config_groups": {"group_0": {"input_activations": {"dynamic": false,
        "num_bits": 8, "type": "float"}, "weights": {"dynamic": false, "num_bits": 8, "type": "float"}, "targets":
        ["Linear"]}}, "ignore": ["backbone.layers.4.mixer.in_proj", "lm_head", "backbone.layers.0.mixer.conv1d",
        "backbone.layers.1.mixer.gate"], "kv_cache_scheme": {"dynamic": false, "num_bits": 8, "type": "float"},
        "producer": {"name": "modelopt", "version": "0.29.0"}, "quant_algo": "FP8", "quant_method": "modelopt"}""",
        f"""{{"producer": {{"name": "modelopt", "version": "0.29.0"}}, "quantization": {{{MODELOPT % "FP8"}}}}}""",
        "FP8 (modelopt)", "backbone.layers.1.mixer.experts.3.up_proj", "backbone.layers.4.mixer.in_proj"),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4": (
        "NVIDIA-Nemotron-3-Nano-30B-A3B", None, f"""{{"producer": {{"name": "modelopt", "version": "0.29.0"}},
        "quantization": {{{MODELOPT % "NVFP4"}, "group_size": 16}}}}""", "NVFP4, groups of 16 (modelopt)",
        "backbone.layers.1.mixer.experts.3.up_proj", "backbone.layers.0.mixer.conv1d"),
    "Nemotron-3 in NVFP4 and FP8": (
        "NVIDIA-Nemotron-3-Nano-30B-A3B", """{"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
        "ignore": ["mtp*"], "quantized_layers": {"backbone.layers.1.mixer.experts": {"quant_algo": "NVFP4",
        "group_size": 16}, "backbone.layers.0.mixer.in_proj": {"quant_algo": "FP8"}}}""", None,
        "NVFP4, groups of 16; FP8 (modelopt)", "backbone.layers.1.mixer.experts.5.down_proj",
        "backbone.layers.5.mixer.q_proj"),
    "granite-4.0-h-small-FP8": (
        "granite-4.0-h-small", compressed("float-quantized", """"group_size": null, "num_bits": 8, "strategy":
        "channel", "type": "float" """, '["lm_head", "re:.*block_sparse_moe.router"]'), None,
        "FP8 (compressed-tensors)", "model.layers.0.mamba.in_proj", "model.layers.0.block_sparse_moe.router.layer"),
    "Qwen3.5-27B-W4A16": (
        "Qwen3.5-27B", compressed("pack-quantized", """"actorder": "static", "group_size": 128, "num_bits": 4,
        "strategy": "group", "type": "int" """, '["lm_head", "re:.*visual.*", "re:.*linear_attn.*"]'), None,
        "int4, groups of 128 (compressed-tensors)", "model.language_model.layers.3.self_attn.q_proj",
        "model.language_model.layers.0.linear_attn.out_proj"),
    "Qwen3-Next-80B-A3B-Instruct-NVFP4": (
        "Qwen3-Next-80B-A3B-Instruct", compressed("nvfp4-pack-quantized", """"group_size": 16, "num_bits": 4,
        "strategy": "tensor_group", "type": "float" """, '["re:.*lm_head", "re:.*mlp.gate$", "re:.*linear_attn.*"]'),
        None, "NVFP4, groups of 16 (compressed-tensors)", "model.layers.0.mlp.experts.0.down_proj",
        "model.layers.0.mlp.gate"),
}  # fmt: skip


@table("name", list(QUANTISED))
def test_a_published_quantised_folder_is_read(name: str, tmp_path: Path) -> None:
    """Fault: a key of a tool is refused or misread, and the whole folder with it; a module has another format than the
    tool gave it; the quantised folder is another model than the plain one."""
    of, declared, beside, described, encoded, plain = QUANTISED[name]
    path = tmp_path / "config.json"
    values = json.loads(PUBLISHED[of][0])
    path.write_text(json.dumps(values))
    expected = load_model_config(tmp_path)
    path.write_text(json.dumps(values | ({"quantization_config": json.loads(declared)} if declared else {})))
    if beside is not None:
        (tmp_path / "hf_quant_config.json").write_text(beside)
    assert load_model_config(tmp_path) == expected
    found = read_quantization(path, json.loads(path.read_text()))
    assert found is not None and found.described == described
    assert found.codec_of(encoded)[0] is not None and found.codec_of(plain)[0] is None
