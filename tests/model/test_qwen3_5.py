"""Qwen3.5 against `transformers`, its multimodal folders, and what of its config.json is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from apcbatch import Engine, Request
from apcbatch.data.end_tokens import read_end_tokens
from apcbatch.errors import ModelError
from apcbatch.model.families import family_of, load_model_config
from apcbatch.model.weight_files import ignored_tensors
from tests.model.folders import REMOVED, sharded, weights_of, with_config, with_weights
from tests.model.parity import LENGTHS, assert_equals_oracle, oracle_of
from tests.tiny import save_tiny

pytestmark = pytest.mark.usefixtures("one_thread")

Checkpoints = Callable[..., Path]
# At the start of a prompt a head's output can be near zero; its norm enlarges the rounding errors there, of both sides,
# up to eps^-0.5 times. With the eps of real models neither is within 1e-5 of float64.
WIDE_EPS = {"rms_norm_eps": 1e-3}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "real eps": ("qwen3_5", {}),
    "odd sizes": ("qwen3_5", WIDE_EPS),
    "tied, one key head": ("qwen3_5", {
        **WIDE_EPS,
        "tie_word_embeddings": True, "linear_num_key_heads": 1, "linear_conv_kernel_dim": 3, "head_dim": 20,
        "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 1.0},
    }),
    "no attention": ("qwen3_5", {
        **WIDE_EPS, "layer_types": ["linear_attention"] * 2, "num_hidden_layers": 2, "linear_num_value_heads": 2,
    }),
    "experts": ("qwen3_5_moe", WIDE_EPS),
    "all experts": ("qwen3_5_moe", {
        **WIDE_EPS, "num_experts": 3, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 7,
        "tie_word_embeddings": True,
    }),
    "grouped projections": ("qwen3_next", WIDE_EPS),
    "grouped projections, weights as they are": ("qwen3_next", {
        **WIDE_EPS, "norm_topk_prob": False, "num_experts_per_tok": 3, "linear_num_key_heads": 3,
        "linear_num_value_heads": 6, "linear_conv_kernel_dim": 2,
    }),
}  # fmt: skip
SWITCHES = {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "full_attention_interval": 4}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, float]:
    """(a checkpoint, the model that transformers makes of it in float64, the tolerance)"""
    folder, (family, overrides) = tmp_path_factory.mktemp("qwen"), CASES[request.param]
    save_tiny(folder, family, 1, overrides)
    return folder, oracle_of(folder), 1e-5 if "rms_norm_eps" in overrides else 2e-4


@pytest.mark.parametrize("length", LENGTHS)
def test_logits_equal_transformers(length: int, case: tuple[Path, Any, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches any departure from the architecture."""
    assert_equals_oracle(case[0], case[1], length, case[2], monkeypatch)


def multimodal(
    folder: Path,
    target: Path,
    model_type: str = "qwen3_5",
    architecture: str = "Qwen3_5ForConditionalGeneration",
    **top: object,
) -> Path:
    """The same text model as a multimodal checkpoint: nested, under another prefix, with a vision tower and heads that
    predict further tokens."""
    text = json.loads((folder / "config.json").read_text())
    text["tie_word_embeddings"], tied = REMOVED, text.get("tie_word_embeddings", False)
    nested = {key: value for key, value in text.items() if value is not REMOVED and key != "architectures"}
    nested |= {**SWITCHES, "mtp_num_hidden_layers": 1}
    values = {"architectures": [architecture], "model_type": model_type, "text_config": nested,
              "vision_config": {"depth": 2}, "image_token_id": 90, "tie_word_embeddings": tied, **top}  # fmt: skip
    target.mkdir(parents=True)
    (target / "config.json").write_text(json.dumps(values))
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor for name, tensor in weights_of(folder).items()
    }
    tensors |= {
        "model.visual.patch_embed.proj.weight": torch.ones(2, 2, dtype=torch.int32),
        "mtp.fc.weight": torch.ones(3),
    }
    tensors["mtp.norm.weight"] = torch.ones(1)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def answers(folder: Path, **options: Any) -> tuple[str, list[Any]]:
    engine = Engine(folder, pool_size_bytes=1 << 20, block_size=4, **options)
    prompt = list(range(1, 30))
    results = [one for _ in range(2) for one in engine.run([Request("r", prompt, max_tokens=6, logprobs=True)])]
    engine.close()
    return engine.fingerprint, [(one.token_ids, one.logprobs, one.cached_tokens) for one in results]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_text_of_a_multimodal_checkpoint_is_read(
    dtype: str, tied: bool, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Catches a nested value, a prefix or a part beside the text model that changes the answers: the checkpoint has the
    name and the bits of its text model alone, in one file or in several."""
    text = tiny_checkpoint("qwen3_5", tie_word_embeddings=tied)
    tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in weights_of(text).items()}
    text = with_weights(text, tmp_path / "text", tensors)
    folder = multimodal(text, tmp_path / "whole")
    expected = answers(text, dtype=dtype)
    assert answers(folder, dtype=dtype) == expected and expected[1][1][2] > 0
    assert answers(sharded(folder, tmp_path / "sharded"), dtype=dtype) == expected
    assert ignored_tensors(text, family_of(load_model_config(text)).ignored) is None
    said = ignored_tensors(folder, family_of(load_model_config(folder)).ignored)
    assert said == f"{folder}: 3 tensors are ignored, of parts that are not run (2 of mtp.*, 1 of model.visual.*)"


def with_packed_experts(folder: Path, target: Path) -> Path:
    """The same model with the experts of a layer in two tensors, as released checkpoints have them."""
    tensors, packed = weights_of(folder), {}
    for begin in sorted({name.split("experts.")[0] for name in tensors if ".experts." in name}):
        count = sum(name.startswith(f"{begin}experts.") and "down_proj" in name for name in tensors)
        gate, up, down = (
            torch.stack([tensors[f"{begin}experts.{i}.{part}_proj.weight"] for i in range(count)])
            for part in ("gate", "up", "down")
        )
        packed |= {f"{begin}experts.gate_up_proj": torch.cat([gate, up], 1), f"{begin}experts.down_proj": down}
    return with_weights(folder, target, {name: REMOVED for name in tensors if ".experts." in name} | packed)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_are_found_under_either_name(dtype: str, tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Catches a released checkpoint, nested and with packed experts, that is refused, or whose gate and up are swapped,
    where `save_pretrained` writes each expert by itself."""
    folder = tiny_checkpoint("qwen3_5_moe")
    packed = with_packed_experts(folder, tmp_path / "packed")
    whole = multimodal(packed, tmp_path / "whole", "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration")
    expected = answers(folder, dtype=dtype)[1]
    assert answers(packed, dtype=dtype)[1] == answers(whole, dtype=dtype)[1] == expected
    name = "model.language_model.layers.0.mlp.experts.down_proj"
    with pytest.raises(ModelError, match=f"tensor {name} is missing; expected one of shape .5, 36, 20."):
        answers(with_weights(whole, tmp_path / "missing", {name: REMOVED}))


def test_errors_name_tensors_as_the_files_do(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Catches a sentence about a tensor under a name that no file has."""
    folder = multimodal(tiny_checkpoint("qwen3_5"), tmp_path / "m")
    name = "model.language_model.layers.0.linear_attn.in_proj_z.weight"
    for number, (tensor, expected) in enumerate([(REMOVED, "is missing; expected one of shape"),
                                                 (torch.zeros(3, 3), r"has shape \[3, 3\]; expected")]):  # fmt: skip
        with pytest.raises(ModelError, match=f"tensor {name} {expected}"):
            answers(with_weights(folder, tmp_path / str(number), {name: tensor}))
    surplus = with_weights(folder, tmp_path / "surplus", {"model.language_model.extra": torch.zeros(3)})
    with pytest.raises(ModelError, match=r"tensor 'model\.language_model\.extra' is not part of this architecture"):
        answers(surplus)


ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
OLD_ROPE = {"rope_parameters": REMOVED, "rope_theta": 1e4, "partial_rotary_factor": 0.25}


@pytest.mark.parametrize("changes", [
    {"layer_types": [*["linear_attention"] * 3, "attention"]},
    OLD_ROPE,
    {**OLD_ROPE, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 0]}},
    {"rope_parameters": {**ROPE, "mrope_interleaved": True, "mrope_section": [1, 1, 0]}},
    {"rope_parameters": {"rope_theta": 1e4}},
    {"model_type": "qwen3_5", "architectures": REMOVED},
    {"architectures": REMOVED},
    {**SWITCHES, "attention_bias": False, "mlp_only_layers": []},
])  # fmt: skip
def test_what_means_the_same_is_the_same_model(
    changes: dict[str, object], tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Catches a key of an older file, or a name before transformers 5, that is not read."""
    folder = tiny_checkpoint("qwen3_5")
    assert load_model_config(with_config(folder, tmp_path / "m", **changes)) == load_model_config(folder)


def test_the_interval_of_attention_layers_is_read(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Catches a file without layer_types whose attention layers are others than those of transformers."""

    def mixers(number: int, **changes: object) -> tuple[str, ...]:
        path = tmp_path / str(number)
        return load_model_config(with_config(folder, path, layer_types=REMOVED, **changes)).mixers

    folder = tiny_checkpoint("qwen3_5")
    assert mixers(0) == ("delta", "delta", "delta", "attention")
    assert mixers(1, full_attention_interval=2) == ("delta", "attention") * 2


@pytest.mark.parametrize("changes, sentence", [
    ({"attention_bias": True}, "text_config.attention_bias is True; expected false, the only one supported"),
    ({"attn_output_gate": False}, "text_config.attn_output_gate is False; expected true, the only one supported"),
    ({"mamba_ssm_dtype": "bfloat16"}, "text_config.mamba_ssm_dtype is 'bfloat16'; expected \"float32\", the only one"),
    ({"mlp_only_layers": [1]}, r"text_config.mlp_only_layers is \[1\]; expected \[\], the only one supported"),
    ({"hidden_act": "gelu"}, "text_config.hidden_act is 'gelu'; expected 'silu'"),
    ({"layer_types": ["sliding_attention"] * 4}, r"text_config.layer_types\[0\] is 'sliding_attention'; expected lin"),
    ({"layer_types": ["full_attention"] * 4}, "all of 4 layers are attention, .*; expected a linear_attention layer"),
    ({"layer_types": ["full_attention"]}, "text_config.layer_types is .*; expected a list with the type of each of t"),
    ({"layer_types": [3] * 4}, r"text_config.layer_types\[0\] is 3; expected linear_attention or full_attention"),
    ({"full_attention_interval": 0, "layer_types": None}, "text_config.full_attention_interval is 0; expected an int"),
    ({"rope_parameters": {**ROPE, "rope_type": "yarn", "factor": 4.0}}, "rope_parameters.rope_type is 'yarn'; expecte"),
    ({"rope_parameters": {**ROPE, "factor": 4.0}}, "text_config.rope_parameters.factor is 4.0; expected no key besid"),
    ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "text_config.rope_scaling.type is 'linear'; exp"),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "text_config.rope_scaling.type is 'yarn'; exp.*YaRN"),
    ({"rope_parameters": "yarn"}, "text_config.rope_parameters is 'yarn'; expected an object"),
    ({"rope_parameters": {**ROPE, "partial_rotary_factor": 0.2}}, "partial_rotary_factor is 0.2; expected a factor up"),
    ({"rope_parameters": {**ROPE, "partial_rotary_factor": 2}}, "partial_rotary_factor is 2.0; expected a factor up"),
    ({"rope_parameters": {**ROPE, "rope_theta": 0}}, "rope_parameters.rope_theta is 0; expected a number from 1 to"),
    ({"rope_parameters": {**ROPE, "rope_theta": {"__float__": "Infinity"}}}, "rope_theta is inf; expected a number"),
    ({"rms_norm_eps": {"__float__": "Infinity"}}, "text_config.rms_norm_eps is inf; expected a number"),
    ({"rms_norm_eps": {"__float__": "big"}}, "text_config.rms_norm_eps is .*; expected a number"),
    ({"num_key_value_heads": 3}, "text_config.num_attention_heads is 4; expected a multiple of num_key_value_heads, 3"),
    ({"linear_num_key_heads": 3}, "text_config.linear_num_value_heads is 4; expected a multiple of linear_num_key_he"),
    ({"linear_key_head_dim": 0}, "text_config.linear_key_head_dim is 0; expected an integer from 1"),
    ({"linear_conv_kernel_dim": 1}, "text_config.linear_conv_kernel_dim is 1; expected an integer from 2"),
    ({"quantization_config": {"quant_method": "fp8"}}, "text_config.quantization_config says that the weights are qu"),
])  # fmt: skip
def test_what_is_not_implemented_is_refused_by_name(
    changes: dict[str, object], sentence: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Catches a switch, a rope type or a size that is passed over in silence, and a name without `text_config.`."""
    whole = multimodal(tiny_checkpoint("qwen3_5"), tmp_path / "m")
    text = json.loads((whole / "config.json").read_text())["text_config"]
    with_config(whole, tmp_path / "changed", text_config={**text, **changes})
    with pytest.raises(ModelError, match=f"config.json: .*{sentence}"):
        load_model_config(tmp_path / "changed")


@pytest.mark.parametrize("text", [3, [], "x"])
def test_a_nested_text_config_is_an_object(text: object, tmp_path: Path) -> None:
    """Catches a traceback, and the defaults in the place of what is written."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": text}))
    with pytest.raises(ModelError, match="text_config is .*; expected an object"):
        load_model_config(tmp_path)


def test_stop_tokens_and_tying_are_found_on_either_level(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Catches an answer that never ends, and a head that is missing, because a value is on the other level, or both."""
    whole = multimodal(tiny_checkpoint("qwen3_5"), tmp_path / "m")
    text = json.loads((whole / "config.json").read_text())["text_config"]
    (whole / "generation_config.json").unlink(missing_ok=True)
    text["eos_token_id"] = [5, 6]
    nested = with_config(whole, tmp_path / "nested", tie_word_embeddings=REMOVED,
                         text_config={**text, "tie_word_embeddings": True}, eos_token_id=7)  # fmt: skip
    found = load_model_config(nested)
    assert found.tie_word_embeddings and list(read_end_tokens(nested, found.vocab_size).files) == [7, 5, 6]
    del text["eos_token_id"]
    top = load_model_config(with_config(whole, tmp_path / "top", eos_token_id=7,
                                        text_config={**text, "tie_word_embeddings": True}))  # fmt: skip
    assert not top.tie_word_embeddings and list(read_end_tokens(tmp_path / "top", top.vocab_size).files) == [7]


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"])
def test_a_file_that_says_nothing_is_the_family_itself(model_type: str, tmp_path: Path) -> None:
    """Fault: a default, of a key that checkpoints seldom leave out, is not the one of transformers."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    config: Any = load_model_config(tmp_path)
    oracle = AutoConfig.for_model(model_type)
    same = (
        "vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
        "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
        "linear_conv_kernel_dim", "tie_word_embeddings",
    )  # fmt: skip
    assert {name: getattr(config, name) for name in same} == {name: getattr(oracle, name) for name in same}
    assert (config.norm_eps, config.context_length) == (oracle.rms_norm_eps, oracle.max_position_embeddings)
    kinds = {"delta": "linear_attention", "attention": "full_attention"}
    assert [kinds[kind] for kind in config.mixers] == oracle.layer_types
    has_experts = model_type != "qwen3_5_text"
    assert config.feed_forwards == ("moe" if has_experts else "mlp",) * oracle.num_hidden_layers
    if has_experts:
        found = (config.num_experts, config.num_experts_per_tok, config.intermediate_size)
        assert found == (oracle.num_experts, oracle.num_experts_per_tok, oracle.moe_intermediate_size)
        assert config.shared_intermediate_size == oracle.shared_expert_intermediate_size
    else:
        assert config.intermediate_size == oracle.intermediate_size and not config.num_experts
    rotary = oracle.rope_parameters
    assert (config.rotary_dim, config.rope_theta) == (256 * rotary["partial_rotary_factor"], rotary["rope_theta"])
    without = (config.d_inner, config.d_state, config.d_conv, config.dt_rank)
    assert not any(without) and not (config.conv_bias or config.proj_bias)
    assert (config.mixer_norm, config.mixer_norm_eps) == ("none", 0.0)
