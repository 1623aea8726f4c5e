"""Nemotron-H against `transformers`, and what of its config.json is refused."""

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
from apcbatch.model.families import family_of, load_model_config
from apcbatch.model.weight_files import ignored_tensors
from tests.model.folders import REMOVED, with_config, with_weights
from tests.model.parity import LENGTHS, assert_equals_oracle, oracle_of
from tests.tiny import save_tiny

pytestmark = pytest.mark.usefixtures("one_thread")

Checkpoints = Callable[..., Path]
CASES: dict[str, dict[str, Any]] = {
    "experts in groups": {},
    "latent experts, weights not normalised": {
        "moe_latent_size": 16, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "num_experts_per_tok": 5,
        "n_groups": 3,
    },
    "limits of the step": {
        "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "mlp"], "n_groups": 1,
        "time_step_limit": (0.4, 1.1), "time_step_min": 0.1, "num_key_value_heads": 1, "use_conv_bias": False,
    },
}  # fmt: skip
PATTERN = {"layers_block_type": REMOVED, "hybrid_override_pattern": "M-"}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """(a checkpoint, the model that transformers makes of it in float64), its steps limited by time_step_limit instead
    of time_step_min."""
    folder = tmp_path_factory.mktemp("nemotron")
    save_tiny(folder, "nemotron_h", 1, CASES[request.param])
    oracle = oracle_of(folder)
    for layer in oracle.model.layers:
        layer.mixer.time_step_limit = tuple(oracle.config.time_step_limit)
    return folder, oracle


@pytest.mark.parametrize("length", LENGTHS)
def test_logits_equal_transformers(length: int, case: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches any departure from the architecture, limits of the step that hold in prefill alone among them."""
    assert_equals_oracle(*case, length, 1e-5, monkeypatch)


def answer(folder: Path, **options: Any) -> tuple[str, list[int], Any]:
    engine = Engine(folder, pool_size_bytes=1 << 20, block_size=4, **options)
    (result,) = engine.run([Request("r", list(range(1, 30)), max_tokens=6, logprobs=True)])
    engine.close()
    return engine.fingerprint, result.token_ids, result.logprobs


@pytest.mark.parametrize("changes", [
    {"layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba"]},
    {"layers_block_type": REMOVED, "hybrid_override_pattern": "ME*-M"},
    {"layers_block_type": None, "hybrid_override_pattern": "ME*-M", "num_hidden_layers": 5},
    {"hybrid_override_pattern": "M", "num_hidden_layers": 5},
    {"time_step_min": 0.5, "expand": 7, "mtp_hybrid_override_pattern": "*E", "residual_in_fp32": True},
    {"architectures": REMOVED},
])  # fmt: skip
def test_what_means_the_same_is_the_same_model(
    changes: dict[str, object], tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Catches an older name that is not read, and a key that says nothing of the computation but changes it."""
    folder = tiny_checkpoint("nemotron_h")
    assert load_model_config(with_config(folder, tmp_path / "m", **changes)) == load_model_config(folder)


def test_heads_that_predict_further_tokens_are_ignored(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Catches a checkpoint that is refused for, or changed by, tensors that are not run."""
    folder = tiny_checkpoint("nemotron_h")
    more = with_weights(folder, tmp_path / "m", {"mtp.layers.0.norm.weight": torch.ones(3)})
    assert answer(more) == answer(folder)
    assert (
        ignored_tensors(more, family_of(load_model_config(more)).ignored)
        == f"{more}: 1 tensors are ignored, of parts that are not run (1 of mtp.*)"
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bias_of_the_choice_is_not_rounded(dtype: str, tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Catches a bias, in the checkpoint float32 for every dtype, that is rounded to the dtype of the run: other experts
    are chosen where scores are close."""
    name = "backbone.layers.1.mixer.gate.e_score_correction_bias"
    same = torch.full((6,), 1.0)
    last = same.index_fill(0, torch.tensor([4, 5]), 1.0 + 2**-20)
    flat = {"backbone.layers.1.mixer.gate.weight": torch.zeros(6, 36)}
    folder = tiny_checkpoint("nemotron_h", num_experts_per_tok=2, topk_group=1)
    answers = [answer(with_weights(folder, tmp_path / str(i), {**flat, name: bias}), dtype=dtype)[2]
               for i, bias in enumerate((same, last))]  # fmt: skip
    assert answers[0] != answers[1]


@pytest.mark.parametrize("changes, sentence", [
    ({"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu'; expected \"relu2\", the only one supported"),
    ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act is 'gelu'; expected \"silu\""),
    ({"sliding_window": 128}, "sliding_window is 128; expected null, the only one supported"),
    ({"attention_bias": True}, "attention_bias is True; expected false"),
    ({"mamba_proj_bias": True}, "mamba_proj_bias is True; expected false"),
    ({"mlp_bias": True}, "mlp_bias is True; expected false"),
    ({"use_bias": True}, "use_bias is True; expected false"),
    ({"num_key_value_heads": 3}, "num_attention_heads is 4; expected a multiple of num_key_value_heads, 3"),
    ({"n_groups": 4}, "mamba_num_heads is 6; expected a multiple of n_groups, 4"),
    ({"layers_block_type": ["mamba2"]}, r"layers_block_type\[0\] is 'mamba2'; expected linear_attention"),
    ({"layers_block_type": "M"}, "layers_block_type is 'M'; expected the type of each layer"),
    ({"layers_block_type": None}, "hybrid_override_pattern is None; expected the type of each layer"),
    ({"num_hidden_layers": 4}, "layers_block_type is .*; expected a list with the type of each of the 4"),
    ({"layers_block_type": ["attention", "mlp"]}, "expected a Mamba-2 layer .linear_attention, M., whose"),
    ({**PATTERN, "hybrid_override_pattern": "MX"}, "is 'MX'; expected 2 letters, each of them M, .*, -, E"),
    ({**PATTERN, "num_hidden_layers": 3}, "hybrid_override_pattern is 'M-'; expected 3 letters"),
    ({**PATTERN, "hybrid_override_pattern": "E*-"}, "is 'E.*'; expected a Mamba-2 layer"),
    ({**PATTERN, "hybrid_override_pattern": ""}, "num_hidden_layers is 0; expected an integer from 1"),
    ({"n_shared_experts": 2}, "n_shared_experts is 2; expected 1, the only one supported"),
    ({"n_group": 4}, "n_group is 4; expected a divisor of the 6 experts that leaves 2 at least"),
    ({"n_group": 6}, "n_group is 6; expected a divisor of the 6 experts that leaves 2 at least"),
    ({"topk_group": 4}, "topk_group is 4; expected at most 3 groups"),
    ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5; expected at most 4 experts, those of topk"),
    ({"moe_latent_size": 0}, "moe_latent_size is 0; expected an integer from 1"),
    ({"norm_topk_prob": 1}, "norm_topk_prob is 1; expected true or false"),
])  # fmt: skip
def test_what_is_not_implemented_is_refused_by_name(
    changes: dict[str, object], sentence: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Catches a switch or a size that is passed over in silence."""
    with pytest.raises(ModelError, match=f"config.json: .*{sentence}"):
        load_model_config(with_config(tiny_checkpoint("nemotron_h"), tmp_path / "m", **changes))


def test_a_file_that_says_little_is_that_of_transformers(tmp_path: Path) -> None:
    """Fault: a default that is not the one of transformers, and a size of experts or MLPs in a model without them."""
    path, kinds = tmp_path / "config.json", {"linear_attention": "mamba2", "full_attention": "attention"}
    values = {"model_type": "nemotron_h", "hybrid_override_pattern": "ME*-"}
    path.write_text(json.dumps(values))
    found, oracle = load_model_config(tmp_path).architecture(), AutoConfig.for_model("nemotron_h")
    assert found["mixers"] == ("mamba2", "none", "attention", "none")
    assert found["feed_forwards"] == ("none", "moe", "none", "mlp")
    assert [kinds.get(name, name) for name in oracle.layers_block_type] == ["mamba2", "moe", "attention", "mlp"]
    names = {
        "d_state": "ssm_state_size", "d_conv": "conv_kernel", "conv_bias": "use_conv_bias",
        "norm_eps": "layer_norm_epsilon", "num_experts": "n_routed_experts", "mamba2_heads": "mamba_num_heads",
        "mamba2_head_dim": "mamba_head_dim", "mamba2_groups": "n_groups",
    }  # fmt: skip
    same = (
        "vocab_size", "hidden_size", "tie_word_embeddings", "intermediate_size", "num_attention_heads",
        "num_key_value_heads", "head_dim", "num_experts_per_tok", "time_step_limit", "moe_intermediate_size",
        "moe_shared_expert_intermediate_size", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor",
    )  # fmt: skip
    assert {name: found[name] for name in (*names, *same)} == {
        name: getattr(oracle, names.get(name, name)) for name in (*names, *same)
    }
    assert (found["d_inner"], found["moe_latent_size"]) == (128 * 64, 0) and oracle.moe_latent_size is None
    assert load_model_config(tmp_path).context_length == oracle.max_position_embeddings
    path.write_text(json.dumps({**values, "hybrid_override_pattern": "M*", "attention_head_dim": 96}))
    dense = load_model_config(tmp_path).architecture()
    without = ("intermediate_size", "num_experts", "moe_intermediate_size", "topk_group", "routed_scaling_factor")
    assert [dense[name] for name in without] == [0] * 5 and dense["head_dim"] == 96
