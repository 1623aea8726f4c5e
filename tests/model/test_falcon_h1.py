"""Falcon-H1 against `transformers`, and what of its config.json is refused."""

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
CASES: dict[str, dict[str, Any]] = {
    "no norm": {},
    "norm first, limits of the step": {
        "mamba_rms_norm": True, "time_step_limit": (0.4, 1.1), "num_key_value_heads": 4, "head_dim": 8,
        "mamba_n_groups": 3,
    },
    "gate first, tied": {
        "mamba_rms_norm": True, "mamba_norm_before_gate": False, "tie_word_embeddings": True, "mamba_d_ssm": None,
        "mamba_n_heads": 4, "mamba_conv_bias": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1e11},
    },
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 1e4}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """(a checkpoint, the model that transformers makes of it in float64)"""
    folder = tmp_path_factory.mktemp("falcon")
    save_tiny(folder, "falcon_h1", 1, CASES[request.param])
    return folder, oracle_of(folder)


@pytest.mark.parametrize("length", LENGTHS)
def test_logits_equal_transformers(length: int, case: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches any departure from the architecture, a multiplier of another part among them."""
    assert_equals_oracle(*case, length, 1e-5, monkeypatch)


MULTIPLIERS = [
    "embedding_multiplier", "lm_head_multiplier", "key_multiplier", "attention_in_multiplier",
    "attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier", "mlp_multipliers", "ssm_multipliers",
]  # fmt: skip


@pytest.mark.parametrize("changes", [
    {"rope_parameters": REMOVED, "rope_theta": 1e4, "rope_scaling": None},
    {"mamba_d_head": "auto", "mamba_expand": 5, "architectures": REMOVED},
    {"mamba_use_mlp": True, "mlp_expansion_factor": 8, "attention_bias": False, "mamba_chunk_size": 16},
])  # fmt: skip
def test_what_means_the_same_is_the_same_model(
    changes: dict[str, object], tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Catches a key of an older file that is not read, and one that says nothing of the computation but changes it."""
    folder = tiny_checkpoint("falcon_h1")
    assert load_model_config(with_config(folder, tmp_path / "m", **changes)) == load_model_config(folder)


@pytest.mark.parametrize("key", MULTIPLIERS)
def test_every_multiplier_is_part_of_the_fingerprint(key: str, tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Catches snapshots that are restored under another multiplier."""
    folder = tiny_checkpoint("falcon_h1")
    value = json.loads((folder / "config.json").read_text())[key]
    changed = [*value[:-1], 0.5] if isinstance(value, list) else 0.5
    found = load_model_config(with_config(folder, tmp_path / "m", **{key: changed})).architecture()
    assert found != load_model_config(folder).architecture()


@pytest.mark.parametrize("changes, sentence", [
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected 'silu'"),
    ({"attention_bias": True}, "attention_bias is True; expected false"),
    ({"mamba_proj_bias": True}, "mamba_proj_bias is True; expected false"),
    ({"mlp_bias": True}, "mlp_bias is True; expected false"),
    ({"projectors_bias": True}, "projectors_bias is True; expected false"),
    ({"mamba_use_mlp": False}, "mamba_use_mlp is False; expected true"),
    ({"num_key_value_heads": 3}, "num_attention_heads is 4; expected a multiple of num_key_value_heads, 3"),
    ({"num_attention_heads": 8, "head_dim": None}, "hidden_size is 36; expected a multiple of num_attention_heads, 8"),
    ({"head_dim": 9}, "partial_rotary_factor is 1.0; expected a factor up to 1 that makes an even number of the 9"),
    ({"rope_parameters": {**ROPE, "partial_rotary_factor": 0.4}}, "partial_rotary_factor is 0.4; expected 1, the only"),
    ({"rope_parameters": {**ROPE, "rope_type": "yarn"}}, "rope_parameters.rope_type is 'yarn'; expected \"default\""),
    ({"mamba_n_groups": 4}, "mamba_n_heads is 6; expected a multiple of mamba_n_groups, 4"),
    ({"mamba_d_ssm": 61}, "mamba_n_heads is 6; expected a divisor of 61, the d_inner"),
    ({"mamba_d_head": 9}, "mamba_d_head is 9; expected 10, the only one supported"),
    ({"mamba_d_ssm": None, "mamba_expand": 0}, "mamba_expand is 0.0; expected a factor that takes hidden_size"),
    ({"mamba_rms_norm": None}, "mamba_rms_norm is None; expected true or false"),
    ({"mamba_norm_before_gate": 1}, "mamba_norm_before_gate is 1; expected true or false"),
    ({"ssm_multipliers": [1, 2, 3, 4]}, r"ssm_multipliers is \[1, 2, 3, 4\]; expected 5 numbers"),
    ({"ssm_multipliers": [1, 2, 3, 4, "5"]}, r"ssm_multipliers\[4\] is '5'; expected a number"),
    ({"mlp_multipliers": 1.0}, "mlp_multipliers is 1.0; expected 2 numbers"),
    ({"mlp_multipliers": [1.0, {"__float__": "NaN"}]}, r"mlp_multipliers\[1\] is nan; expected a number"),
    ({"key_multiplier": None}, "key_multiplier is None; expected a number"),
])  # fmt: skip
def test_what_is_not_implemented_is_refused_by_name(
    changes: dict[str, object], sentence: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Catches a switch or a size that is passed over in silence."""
    with pytest.raises(ModelError, match=f"config.json: .*{sentence}"):
        load_model_config(with_config(tiny_checkpoint("falcon_h1"), tmp_path / "m", **changes))


def test_a_file_that_says_nothing_is_the_family_itself(tmp_path: Path) -> None:
    """Fault: a default that is not the one of transformers, or a multiplier that is left out."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "falcon_h1"}))
    found, oracle = load_model_config(tmp_path).architecture(), AutoConfig.for_model("falcon_h1")
    names = {
        "d_inner": "mamba_d_ssm", "d_state": "mamba_d_state", "d_conv": "mamba_d_conv", "conv_bias": "mamba_conv_bias",
        "norm_eps": "rms_norm_eps", "mamba2_heads": "mamba_n_heads", "mamba2_head_dim": "mamba_d_head",
        "mamba2_groups": "mamba_n_groups",
    }  # fmt: skip
    same = (
        "vocab_size", "hidden_size", "intermediate_size", "tie_word_embeddings", "num_attention_heads",
        "num_key_value_heads", "mamba_rms_norm", "mamba_norm_before_gate", "time_step_limit",
    )  # fmt: skip
    assert {name: found[name] for name in (*names, *same)} == {
        name: getattr(oracle, names.get(name, name)) for name in (*names, *same)
    }
    assert found["head_dim"] == found["rotary_dim"] == oracle.hidden_size // oracle.num_attention_heads
    assert found["rope_theta"] == oracle.rope_parameters["rope_theta"]
    assert len(found["mixers"]) == oracle.num_hidden_layers
    multipliers = {name.removesuffix("_multiplier").removesuffix("_multipliers"): getattr(oracle, name)
                   for name in MULTIPLIERS}  # fmt: skip
    expected = {name.replace("lm_head", "logits"): value for name, value in multipliers.items()}
    expected |= {"ssm": tuple(expected["ssm"]), "mlp": tuple(expected["mlp"]), "residual": 1.0, "attention": None}
    assert found["multipliers"] == expected
    assert load_model_config(tmp_path).context_length == oracle.max_position_embeddings
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "falcon_h1", "num_key_value_heads": None}))
    assert load_model_config(tmp_path).num_key_value_heads == oracle.num_attention_heads
