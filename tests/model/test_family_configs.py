"""The config.json of all families: the fields that it gives, which files are of one model, what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from apcbatch.errors import ModelError
from apcbatch.fingerprint import model_fingerprint
from apcbatch.model.families import load_model_config, state_layout
from apcbatch.model.hf_config import ModelConfig
from tests.effort import table
from tests.model.families import NAMES, ROWS, Changes
from tests.model.folders import REMOVED

OTHER: dict[type, Callable[[Any], Any]] = {  # another value of a key, by its type
    bool: lambda value: not value, int: lambda value: 2 * value, float: lambda value: 0.5,
    list: lambda value: [*value[:-1], 0.5],
}  # fmt: skip
ConfigOf = Callable[[str, Changes], ModelConfig]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder whose config.json each row of a table writes again."""
    return tmp_path


@pytest.fixture
def config_of(tiny_checkpoint: Callable[..., Path], folder: Path) -> ConfigOf:
    """config_of(family, changes): what we read of the tiny checkpoint's config.json with these changes, which is then
    in `folder`."""

    def read(family: str, changes: Changes) -> ModelConfig:
        written = json.loads((tiny_checkpoint(family) / "config.json").read_text()) | changes
        return config_of_values(folder, {key: value for key, value in written.items() if value is not REMOVED})

    return read


def config_of_values(folder: Path, values: Changes) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(values))
    return load_model_config(folder)


def entries(name: str) -> list[Any]:
    """(family, entry) of a table of all rows."""
    return [(family, entry) for family, row in ROWS.items() for entry in getattr(row, name)]


def assert_is_as_transformers_reads(family: str, config: ModelConfig, folder: Path) -> None:
    """Each field is that of transformers' config of the same file; one that it lacks is empty."""
    from transformers import AutoConfig

    oracle: Any = AutoConfig.from_pretrained(folder)
    types = (getattr(oracle, "layer_types", None) or getattr(oracle, "layers_block_type", None)
             or [ROWS[family].mixer] * oracle.num_hidden_layers)  # fmt: skip
    kinds = {"full_attention": "attention", "attention": "attention", "mlp": "none", "moe": "none"}
    theirs: Changes = {
        "family": family,
        "mixers": tuple(kinds.get(name, ROWS[family].mixer) for name in types),
        "feed_forwards": ("none",) * len(types),
    }
    found = config.architecture()
    for name in found:
        alias = next((one for one in NAMES.get(name, (name,)) if hasattr(oracle, one)), None)
        if alias is not None:
            value = getattr(oracle, alias)
            theirs[name] = tuple(value) if isinstance(value, list) else value
    if "head_dim" not in theirs and hasattr(oracle, "num_attention_heads"):
        theirs["head_dim"] = oracle.hidden_size // oracle.num_attention_heads
    if "rotary_dim" in found:
        theirs["rotary_dim"] = int(theirs["head_dim"] * oracle.rope_parameters.get("partial_rotary_factor", 1))
        theirs["rope_theta"] = oracle.rope_parameters["rope_theta"]
    theirs |= ROWS[family].fields(oracle)
    assert {name: found.get(name) for name in theirs} == theirs
    assert {name: value for name, value in found.items() if name not in theirs and value not in (0, None, "none")} == {}
    assert config.context_length == getattr(oracle, "max_position_embeddings", None)


@table("family", ROWS)
def test_a_file_that_says_nothing_is_the_family_itself(family: str, tmp_path: Path) -> None:
    """Fault: a default is not the one of transformers, or a multiplier is left out."""
    config = config_of_values(tmp_path, {"model_type": family, **ROWS[family].bare})
    assert_is_as_transformers_reads(family, config, tmp_path)


@pytest.mark.slow
@table("family, case", [(family, case) for family, row in ROWS.items() for case in row.cases])
def test_the_fields_of_each_case_are_those_of_transformers(
    family: str, case: str, tiny_checkpoint: Callable[..., Path]
) -> None:
    """Fault: a value is read from another key, or a default stands in the place of what the file says."""
    folder = tiny_checkpoint(family, ROWS[family].seed, **ROWS[family].cases[case])
    assert_is_as_transformers_reads(family, load_model_config(folder), folder)


@table("family, changes", entries("said"))
def test_the_fields_are_those_of_transformers(family: str, changes: Changes, config_of: ConfigOf, folder: Path) -> None:
    """Fault: a key that transformers reads too is passed over, or a size is rounded otherwise."""
    assert_is_as_transformers_reads(family, config_of(family, changes), folder)


@table("family, changes", entries("same"))
def test_what_means_the_same_is_the_same_model(family: str, changes: Changes, config_of: ConfigOf) -> None:
    """Fault: a key or a name of an older file is not read, or a key that says nothing of the computation changes it."""
    assert config_of(family, changes) == config_of(family, {})


@table("family, entry", entries("reads"))
def test_what_a_file_gives(family: str, entry: tuple[Changes, Changes], config_of: ConfigOf) -> None:
    """Fault: an older key, an older name of a layer's type, null, "auto" or an open end is refused or passed over."""
    changes, expected = entry
    found = config_of(family, changes).architecture()
    assert {name: found[name] for name in expected} == expected


@table("family, entry", entries("refused"))
def test_what_is_not_implemented_is_refused_by_name(
    family: str, entry: tuple[Changes, str], config_of: ConfigOf, folder: Path
) -> None:
    """Fault: a switch or a size that is passed over in silence, or named otherwise than in the file: that of a
    multimodal checkpoint has the text model's keys below text_config."""
    changes, sentence = entry
    with pytest.raises(ModelError, match=f"config.json: .*{sentence}") as caught:
        config_of(family, changes)
    assert len(str(caught.value)) < 600
    if ROWS[family].is_nested:
        text = json.loads((folder / "config.json").read_text())
        with pytest.raises(ModelError) as nested:
            config_of_values(folder, {"model_type": family, "text_config": text})
        said_of = "" if sentence.startswith("all of") else "text_config."
        assert str(nested.value) == str(caught.value).replace("config.json: ", f"config.json: {said_of}")


@pytest.mark.slow
@table("family", ROWS)
def test_what_changes_the_model_changes_the_fingerprint(family: str, config_of: ConfigOf, folder: Path) -> None:
    """Fault: snapshots are restored under another size or switch of a sub-block, or under another multiplier."""
    found = set()
    for case in ({}, *ROWS[family].cases.values()):
        with suppress(ModelError):  # of a case whose lists save_tiny would cut
            plain = config_of(family, case)
            written = json.loads((folder / "config.json").read_text())
        for key, value in written.items():
            with suppress(ModelError):  # of a size that does not fit the others
                other = config_of(family, case | {key: OTHER.get(type(value), lambda same: same)(value)})
                if other != replace(plain, context_length=other.context_length):
                    found.add(key)
                    assert other.architecture() != plain.architecture(), key
    endings = ("_multiplier", "_multipliers", "_scaling", "_scaling_factor")
    assert found >= {key for key, value in written.items() if key.endswith(endings) and value is not None}
    assert len(found) > 3


@table("family", ROWS)
def test_fingerprints_stay(family: str, tmp_path: Path) -> None:
    """Fault: a field, a name or a layout changes the fingerprint of models whose snapshots are on disks."""
    values, digest = ROWS[family].fingerprint
    config = config_of_values(tmp_path, {"model_type": family, "vocab_size": 97, **values})
    layout = state_layout(config, "bfloat16").description
    made = model_fingerprint(config.architecture(), bytes(range(16)), "bfloat16", layout, "numerics")
    assert made.hex() == digest
    assert model_fingerprint(config.architecture(), bytes(range(16)), "bfloat16", "", "numerics") != made
