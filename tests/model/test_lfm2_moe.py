"""LFM2 with experts against `transformers`, and what of its config.json and of its experts is read or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from apcbatch import Engine, Request
from apcbatch.errors import ModelError
from apcbatch.model.families import load_model_config
from tests.model.folders import REMOVED, weights_of, with_config, with_weights
from tests.model.parity import LENGTHS, assert_equals_oracle, oracle_of
from tests.tiny import save_tiny

pytestmark = pytest.mark.usefixtures("one_thread")

Checkpoints = Callable[..., Path]
CASES: dict[str, dict[str, Any]] = {
    "odd sizes": {},
    "weights as they are, no bias, untied": {
        "norm_topk_prob": False, "use_expert_bias": False, "tie_word_embeddings": False, "num_experts_per_tok": 3,
        "conv_L_cache": 4,
    },
    "experts alone, one a token": {"num_dense_layers": 0, "num_experts_per_tok": 1, "num_key_value_heads": 6},
    "all experts": {"num_dense_layers": 3, "num_experts_per_tok": 5, "use_expert_bias": False},
}  # fmt: skip


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """(a checkpoint, the model that transformers makes of it in float64)"""
    folder = tmp_path_factory.mktemp("lfm2_moe")
    save_tiny(folder, "lfm2_moe", 1, CASES[request.param])
    return folder, oracle_of(folder)


@pytest.mark.parametrize("length", LENGTHS)
def test_logits_equal_transformers(length: int, case: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches any departure from the architecture, a bias that reaches the weights among them."""
    assert_equals_oracle(*case, length, 1e-5, monkeypatch)


def test_small_scores_are_divided_as_in_transformers(
    tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches another number than 1e-6 beside the sum of the scores: it halves the weight of a score of 1e-6."""
    plain = tiny_checkpoint("lfm2_moe", num_experts_per_tok=1)
    tensors = weights_of(plain)
    wide = {name: 12 * tensor for name, tensor in tensors.items() if name.endswith("feed_forward.gate.weight")}
    always_the_third = torch.tensor([0.0, 0.0, 9.0, 0.0, 0.0])
    biases = {name: always_the_third.clone() for name in tensors if name.endswith("expert_bias")}
    assert len(wide) == len(biases) == 3
    folder = with_weights(plain, tmp_path / "m", wide | biases)
    assert_equals_oracle(folder, oracle_of(folder), 65, 1e-5, monkeypatch)


def test_packed_experts_are_the_same_model(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Catches gate and up that are swapped, or experts of another layout that are refused."""
    plain = tiny_checkpoint("lfm2_moe")
    tensors, packed = weights_of(plain), {}
    for layer in (1, 2, 3):
        begin = f"model.layers.{layer}.feed_forward.experts."
        w1, w2, w3 = (torch.stack([tensors[f"{begin}{i}.w{n}.weight"] for i in range(5)]) for n in (1, 2, 3))
        packed |= {f"{begin}gate_up_proj": torch.cat([w1, w3], 1), f"{begin}down_proj": w2}
    removed = {name: REMOVED for name in tensors if ".experts." in name}
    assert len(removed) == 3 * 5 * 3
    found = [answer(folder) for folder in (plain, with_weights(plain, tmp_path / "m", removed | packed))]
    assert found[0] == found[1]


def answer(folder: Path) -> tuple[list[int], list[float]]:
    """The tokens of a prompt and their log-probabilities."""
    engine = Engine(folder, pool_size_bytes=16 << 20)
    (result,) = engine.run([Request("r", list(range(1, 60)), max_tokens=20, ignore_eos=True, logprobs=True)])
    engine.close()
    assert result.error is None and result.logprobs
    return result.token_ids, result.logprobs


@pytest.mark.parametrize("changes", [
    {"rope_parameters": REMOVED, "rope_theta": 1e4, "tie_embedding": True, "tie_word_embeddings": False},
    {"architectures": REMOVED, "output_router_logits": True},
    {"block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0},
])  # fmt: skip
def test_what_means_the_same_is_the_same_model(
    changes: dict[str, object], tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Catches a key of a file that is not read, and the rounding of the dense LFM2, which transformers leaves out."""
    folder = tiny_checkpoint("lfm2_moe")
    found = load_model_config(with_config(folder, tmp_path / "m", **changes))
    assert found == load_model_config(folder) and found.intermediate_size == 60


@pytest.mark.parametrize("changes, sentence", [
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected 'silu'"),
    ({"conv_bias": True}, "conv_bias is True; expected false, the only one supported"),
    ({"conv_L_cache": 1}, "conv_L_cache is 1; expected an integer from 2"),
    ({"num_experts_per_tok": 6}, "num_experts_per_tok is 6; expected at most 5 experts"),
    ({"num_dense_layers": -1}, "num_dense_layers is -1; expected an integer from 0"),
    ({"num_dense_layers": None}, "num_dense_layers is None; expected an integer from 0"),
    ({"moe_intermediate_size": 0}, "moe_intermediate_size is 0; expected an integer from 1"),
    ({"use_expert_bias": None}, "use_expert_bias is None; expected true or false"),
    ({"norm_topk_prob": 1}, "norm_topk_prob is 1; expected true or false"),
    ({"routed_scaling_factor": None}, "routed_scaling_factor is None; expected a number"),
    ({"layer_types": ["full_attention"] * 4}, "all of 4 layers are attention, .*; expected a conv layer"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type is 'yarn'; expected \"default\""),
])  # fmt: skip
def test_what_is_not_implemented_is_refused_by_name(
    changes: dict[str, object], sentence: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Catches a switch or a size that is passed over in silence."""
    with pytest.raises(ModelError, match=f"config.json: .*{sentence}"):
        load_model_config(with_config(tiny_checkpoint("lfm2_moe"), tmp_path / "m", **changes))


def test_a_file_that_names_its_layers_alone_is_the_family_itself(tmp_path: Path) -> None:
    """Fault: a default that is not the one of transformers."""
    values = {"model_type": "lfm2_moe", "layer_types": ["conv", "full_attention"] * 16}
    (tmp_path / "config.json").write_text(json.dumps(values))
    found, oracle = load_model_config(tmp_path).architecture(), AutoConfig.for_model("lfm2_moe")
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "tie_word_embeddings", "norm_eps",
        "num_attention_heads", "num_key_value_heads", "num_experts", "num_experts_per_tok", "use_expert_bias",
        "norm_topk_prob", "routed_scaling_factor",
    )  # fmt: skip
    assert {name: found[name] for name in names} == {name: getattr(oracle, name) for name in names}
    assert found["d_conv"] == oracle.conv_L_cache and found["rope_theta"] == oracle.rope_parameters["rope_theta"]
    assert found["head_dim"] == found["rotary_dim"] == oracle.hidden_size // oracle.num_attention_heads
    assert found["feed_forwards"] == ("mlp",) * oracle.num_dense_layers + ("moe",) * 30
    assert load_model_config(tmp_path).context_length == oracle.max_position_embeddings
