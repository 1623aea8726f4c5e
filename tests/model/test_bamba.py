"""Bamba against `transformers`, and what of its config.json is read or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from apcbatch.errors import ModelError
from apcbatch.model.families import load_model_config
from tests.model.folders import REMOVED, with_config
from tests.model.parity import LENGTHS, assert_equals_oracle, oracle_of
from tests.tiny import save_tiny

pytestmark = pytest.mark.usefixtures("one_thread")

Checkpoints = Callable[..., Path]
ROPE = {"rope_type": "default", "rope_theta": 1e4}
CASES: dict[str, dict[str, Any]] = {
    "odd sizes": {},
    "limits of the step, tied": {
        "time_step_limit": (0.4, 1.1), "num_key_value_heads": 4, "head_dim": 20, "mamba_n_groups": 3,
        "tie_word_embeddings": True, "attn_layer_indices": [0, 3],
    },
    "other wavelengths and factor": {
        "rope_parameters": {**ROPE, "rope_theta": 1e6, "partial_rotary_factor": 0.25}, "head_dim": 24,
        "num_key_value_heads": 1, "mamba_expand": 3, "mamba_n_heads": 4, "mamba_conv_bias": False, "mamba_d_conv": 3,
    },
    "no attention": {"attn_layer_indices": None, "num_hidden_layers": 2},
}  # fmt: skip


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """(a checkpoint, the model that transformers makes of it in float64)"""
    folder = tmp_path_factory.mktemp("bamba")
    # Of the weights of seed 1, a token is ill-conditioned: transformers in float32 is off by 6e-6 there.
    save_tiny(folder, "bamba", 2, CASES[request.param])
    return folder, oracle_of(folder)


@pytest.mark.parametrize("length", LENGTHS)
def test_logits_equal_transformers(length: int, case: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches any departure from the architecture, another number of rotated columns among them."""
    assert_equals_oracle(*case, length, 1e-5, monkeypatch)


@pytest.mark.parametrize("changes", [
    {"rope_parameters": REMOVED, "rope_theta": 1e4, "rope_scaling": None},
    {"rope_parameters": REMOVED, "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    {"rope_parameters": ROPE, "partial_rotary_factor": 1.0},
    {"mamba_d_head": "auto", "architectures": REMOVED, "mamba_chunk_size": 16, "z_loss_coefficient": 0.1},
])  # fmt: skip
def test_what_means_the_same_is_the_same_model(
    changes: dict[str, object], tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Catches a key of an older file that is not read, and a factor beside the table, which transformers replaces."""
    folder = tiny_checkpoint("bamba")
    changed = with_config(folder, tmp_path / "m", **changes)
    assert load_model_config(changed) == load_model_config(folder)
    assert AutoConfig.from_pretrained(changed).rope_parameters["partial_rotary_factor"] == 0.5


@pytest.mark.parametrize("changes, sentence", [
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected 'silu'"),
    ({"attention_bias": True}, "attention_bias is True; expected false"),
    ({"mamba_proj_bias": True}, "mamba_proj_bias is True; expected false"),
    ({"mlp_bias": True}, "mlp_bias is True; expected false"),
    ({"attn_layer_indices": [4]}, r"attn_layer_indices is \[4\]; expected a list of numbers of the 4 layers"),
    ({"attn_layer_indices": 1}, "attn_layer_indices is 1; expected a list of numbers of the 4 layers"),
    ({"attn_layer_indices": [0, 1, 2, 3]}, "all of 4 layers are attention, .*; expected a Mamba-2 layer"),
    ({"num_key_value_heads": 3}, "num_attention_heads is 4; expected a multiple of num_key_value_heads, 3"),
    ({"num_attention_heads": 8, "head_dim": None}, "hidden_size is 36; expected a multiple of num_attention_heads, 8"),
    ({"head_dim": 10}, "partial_rotary_factor is 0.5; expected a factor up to 1 that makes an even number of the 10"),
    ({"rope_parameters": {**ROPE, "rope_type": "yarn"}}, "rope_type is 'yarn'; expected \"default\", .*YaRN"),
    ({"mamba_n_groups": 4}, "mamba_n_heads is 6; expected a multiple of mamba_n_groups, 4"),
    ({"mamba_expand": 1.7}, "mamba_n_heads is 6; expected a divisor of 61, the d_inner"),
    ({"mamba_d_head": 9}, "mamba_d_head is 9; expected 12, the only one supported"),
])  # fmt: skip
def test_what_is_not_implemented_is_refused_by_name(
    changes: dict[str, object], sentence: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Catches a switch or a size that is passed over in silence."""
    folder = tiny_checkpoint("bamba")
    changes = {"rope_parameters": ROPE, **changes}
    with pytest.raises(ModelError, match=f"config.json: .*{sentence}"):
        load_model_config(with_config(folder, tmp_path / "m", **changes))


def test_a_file_that_says_nothing_is_the_family_itself(tmp_path: Path) -> None:
    """Fault: a default that is not the one of transformers."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bamba"}))
    found, oracle = load_model_config(tmp_path).architecture(), AutoConfig.for_model("bamba")
    names = {
        "d_state": "mamba_d_state", "d_conv": "mamba_d_conv", "conv_bias": "mamba_conv_bias",
        "norm_eps": "rms_norm_eps", "mamba2_heads": "mamba_n_heads", "mamba2_head_dim": "mamba_d_head",
        "mamba2_groups": "mamba_n_groups",
    }  # fmt: skip
    same = (
        "vocab_size", "hidden_size", "intermediate_size", "tie_word_embeddings", "num_attention_heads",
        "num_key_value_heads", "time_step_limit",
    )  # fmt: skip
    assert {name: found[name] for name in (*names, *same)} == {
        name: getattr(oracle, names.get(name, name)) for name in (*names, *same)
    }
    assert found["head_dim"] == 2 * found["rotary_dim"] == oracle.hidden_size // oracle.num_attention_heads
    assert found["rope_theta"] == oracle.rope_parameters["rope_theta"]
    assert found["d_inner"] == oracle.mamba_expand * oracle.hidden_size
    assert found["mixers"] == ("mamba2",) * oracle.num_hidden_layers
    assert load_model_config(tmp_path).context_length == oracle.max_position_embeddings
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bamba", "num_key_value_heads": None}))
    assert load_model_config(tmp_path).num_key_value_heads == oracle.num_attention_heads
