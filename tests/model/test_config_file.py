"""config.json and generation_config.json: what is read, and a sentence for everything that cannot be used."""

from __future__ import annotations

import json
import math
import os
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from apcbatch import Engine
from apcbatch.data.end_tokens import read_end_tokens
from apcbatch.data.model_files import read_model_json
from apcbatch.errors import ModelError
from apcbatch.model.families import load_model_config
from apcbatch.model.locate import BUNDLED, locate_model, name_of
from apcbatch.model.weight_files import WeightFiles
from apcbatch.types import Request
from tests.effort import is_full, table, tries
from tests.model.folders import REMOVED, copy_of, refused, with_config
from tests.tiny import FAMILIES

Checkpoints = Callable[..., Path]

MAMBA_SIZES = ["vocab_size", "hidden_size", "num_hidden_layers", "state_size", "conv_kernel", "time_step_rank",
               "intermediate_size"]  # fmt: skip
JAMBA_SIZES = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
               "num_key_value_heads", "num_experts", "num_experts_per_tok", "attn_layer_period", "attn_layer_offset",
               "expert_layer_period", "expert_layer_offset", "mamba_d_state", "mamba_d_conv", "mamba_dt_rank",
               "max_position_embeddings"]  # fmt: skip
NO_SIZES = [0, -1, 1.0, "8", True, None, [], {}, float("nan"), float("inf"), 10**12, 10**400, 1e308]
NO_NUMBERS = ["1", True, None, [], {}, float("nan"), float("inf"), 10**400]
NO_FACTORS = [1e308, 10**300, 1e-9, 0, -2, *NO_NUMBERS]


def of_values(family: str, key: str, values: list[Any], expected: str, **more: object) -> list[tuple[Any, ...]]:
    """A row for each wrong value of a key of config.json."""
    return [(family, {key: value, **more}, f"config.json: {key} is .*; expected {expected}") for value in values]


@pytest.mark.slow
@table("family, changes, sentence", [
    # A negative, fractional or absurd size, a text, null or NaN continues into products and loops; zero is divided by.
    *(row for family, keys in (("mamba", MAMBA_SIZES), ("falcon_mamba", MAMBA_SIZES[:1]), ("jamba", JAMBA_SIZES))
      for key in keys
      for row in of_values(family, key, NO_SIZES[key.endswith("offset"):], "an integer from [012] to [0-9]+$")),
    # 10^9 layers took the machine's memory; a number within the bounds is held against the weights first.
    *((family, {"num_hidden_layers": layers}, sentence) for family in ("mamba", "jamba") for layers, sentence in (
        *((many, "num_hidden_layers is") for many in (10**9, 10**12, (1 << 14) + 1)),
        (1 << 14, r"layers\.16383\.\w*norm\w*\.weight is missing"),
    )),
    # 1e308 was an OverflowError, 0 and negative ones a state of no size.
    *of_values("mamba", "expand", NO_FACTORS, "a (number|factor)", intermediate_size=REMOVED),
    *of_values("jamba", "mamba_expand", NO_FACTORS, "a (number|factor)", intermediate_size=44),
    *of_values("mamba", "layer_norm_epsilon", NO_NUMBERS, "a number"),
    *of_values("falcon_mamba", "mixer_rms_eps", NO_NUMBERS, "a number"),
    *of_values("jamba", "rms_norm_eps", NO_NUMBERS, "a number"),
    # "false" was taken for true.
    *(row for family, key in (
        ("mamba", "use_conv_bias"), ("mamba", "use_bias"), ("mamba", "tie_word_embeddings"),
        ("jamba", "mamba_conv_bias"), ("jamba", "mamba_proj_bias"), ("jamba", "tie_word_embeddings"),
    ) for row in of_values(family, key, ["false", 0, 1, None, []], "true or false")),
    ("mamba", {"architectures": ["LlamaForCausalLM"]}, "names the architecture 'LlamaForCausalLM', .*docs/models.md"),
    ("mamba", {"architectures": ["Qwen3VLMoeForConditionalGeneration"]}, "'Qwen3VLMoeForConditionalGeneration', which"),
    ("mamba", {"architectures": [["x" * 10_000]]}, "a list, which is not supported; expected one of Mamba"),
    ("mamba", {"architectures": None, "model_type": None}, "config.json names no architecture; expected one of Mamba"),
    ("mamba", {"architectures": None, "model_type": None, "ssm_cfg": {}}, r"of the mamba_ssm package .* \(-hf\)"),
    ("mamba", {"architectures": "MambaForCausalLM", "model_type": 3}, "the architecture 3, which is not supported"),
    # Where a file names several, transformers takes the first.
    ("jamba", {"architectures": ["JambaModel", "JambaForCausalLM"]}, "architecture 'JambaModel', which is not supp"),
    ("jamba", {"architectures": ["JambaForCausalLM", "JambaModel"], "num_experts_per_tok": 5},
     "num_experts_per_tok is 5; expected at most 4 experts"),
    ("mamba", {"eos_token_id": "</s>"}, "eos_token_id in .*config.json is '</s>'; expected a token id or a list of"),
    ("mamba", {"eos_token_id": [1, True]}, "eos_token_id in .*; expected a token id or a list"),
    ("mamba", {"eos_token_id": [1, 2.0]}, "eos_token_id in .*; expected a token id or a list"),
    ("mamba", {"hidden_size": "x" * 10**6}, "hidden_size is 'x.*; expected an integer"),
])  # fmt: skip
def test_a_value_that_cannot_be_used_is_refused(
    family: str, changes: dict[str, Any], sentence: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Fault: another model's config, or one that contradicts itself, continues to the weights, loops and allocations.
    What each family refuses is in tests/model/families.py."""
    folder = with_config(tiny_checkpoint(family), tmp_path / "m", **changes)
    tracemalloc.start()
    refused(folder, sentence)
    assert tracemalloc.get_traced_memory()[1] < 200 << 20
    tracemalloc.stop()


HOSTILE = [0, -1, 0.5, 1e-320, -1e-320, 1e-30, 1e18, 3e38, 1e39, -1e39, 1e308, 2**31, 2**63, 10**400, float("nan"),
           float("inf"), float("-inf"), True, None, "1", [], {}, [0] * 4, [1e39] * 5, [0, 1e39]]  # fmt: skip
OLDER = ["rope_theta", "partial_rotary_factor", "time_step_limit", "attn_layer_indices", "full_attn_idxs"]


@pytest.mark.drawn(4)
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_any_number_is_a_sentence_or_harmless(family: str, tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Fault: `internal error`, or a traceback, for a number beyond float32 or a rope_theta below 1: 23 of 120 cases."""
    from transformers import AutoConfig

    folder = with_config(tiny_checkpoint(family), tmp_path / "m")
    written = json.loads((folder / "config.json").read_text())
    every = {**json.loads(AutoConfig.from_pretrained(folder).to_json_string(use_diff=False)), **written}
    places = [(key, None) for key in OLDER]
    for key, value in every.items():
        inner = value.items() if isinstance(value, dict) else [(None, value)]
        places += [(key, name) for name, one in inner if not isinstance(one, (str, bool, dict))]
    drawn = [(place, value) for place in places for value in HOSTILE]
    for (key, name), value in random.sample(drawn, min(len(drawn), tries(250))):
        print(f"{key} {name} {value}")
        changed = value if name is None else {**every[key], name: value}
        (folder / "config.json").write_text(json.dumps({**written, key: changed}))
        try:
            engine = Engine(folder, pool_size_bytes=1 << 20)
        except ModelError as error:
            assert len(str(error)) < 600
        else:
            [result] = engine.run([Request("r", [1, 2, 3], max_tokens=2)])
            assert result.error is None or result.error.code == "non_finite"
            engine.close()


@pytest.mark.drawn(2)
@pytest.mark.slow
@pytest.mark.parametrize("family, key", [
    ("bamba", "attn_layer_indices"), ("lfm2", "full_attn_idxs"), ("lfm2", "layer_types"), ("qwen3_5", "layer_types"),
    ("granitemoehybrid", "layer_types"), ("nemotron_h", "layers_block_type"), ("nemotron_h", "hybrid_override_pattern"),
    ("falcon_h1", "ssm_multipliers"), ("mamba2", "time_step_limit"), ("mamba", "eos_token_id"),
])  # fmt: skip
def test_a_list_of_millions_is_read_once(family: str, key: str, tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Fault: 4,000,000 places were searched again for each layer, up to 16,384 times."""
    types = {"layer_types": REMOVED, "layers_block_type": REMOVED, "num_hidden_layers": 1 << 14}
    count = 4_000_000 if is_full() else 1_000_000
    listed = "M" * count if key == "hybrid_override_pattern" else [0] * count
    folder = with_config(tiny_checkpoint(family), tmp_path / "m", **{**types, key: listed})
    with pytest.raises(ModelError, match=f"{key} (in .* )?is .*; expected") as caught:
        read_end_tokens(folder, load_model_config(folder).vocab_size)
    assert len(str(caught.value)) < 600


# The files themselves


@table("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@table("content, sentence", [
    (b'{"a":' * 128 + b"[]" + b"}" * 128, "is nested too deeply; expected at most 128 levels"),
    (b"[" * 100_000 + b"]" * 100_000, "is nested too deeply; expected at most 128 levels"),
    (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "is nested too deeply; expected at most 128 levels"),
    (b"", "is not valid JSON"),
    (b'{"hidden_size": ', "is not valid JSON"),
    (b'\xff\xfe{"a": 1}', "is not valid JSON"),
    (b"[1, 2]", "holds a list; expected a JSON object"),
    (b"3", "holds a int; expected a JSON object"),
    (b'{"vocab_size": 1' + b"0" * 5000 + b"}", "is not valid JSON"),
    (b" " * (17 << 20), "holds more than 16,777,216 bytes"),
])  # fmt: skip
def test_a_file_that_is_no_json_object_is_refused(
    name: str, content: bytes, sentence: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Fault: a RecursionError for deep nesting, a ValueError for long digits, a file of any size read whole."""
    folder = copy_of(tiny_checkpoint("mamba"), tmp_path / "m")
    (folder / name).write_bytes(content)
    refused(folder, f"{name} .*{sentence}" if "holds more" in sentence else f"{name} {sentence}")


@table("name", [
    "config.json", "generation_config.json", "model.safetensors.index.json", "model.safetensors",
])  # fmt: skip
@table("kind", ["pipe", "folder", "device", "loop"])
def test_only_regular_files_are_read(name: str, kind: str, tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Fault: a named pipe in the place of a file hangs the run for ever; a device never ends."""
    folder = copy_of(tiny_checkpoint("mamba"), tmp_path / "m")
    path = folder / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "device" else path)
    if kind == "loop" and name == "model.safetensors.index.json":
        load_model_config(folder)  # a link to nothing: the file is not there
    else:
        refused(folder, f"{name} cannot be read")


@table("text, value", [
    ("Infinity", math.inf), ("-Infinity", -math.inf), ('{"__float__": "-Infinity"}', -math.inf),
    ('[0.0, {"__float__": "Infinity"}]', [0.0, math.inf]), ('{"__float__": "inf"}', {"__float__": "inf"}),
    ('{"__float__": "Infinity", "a": 1}', {"__float__": "Infinity", "a": 1}), ("NaN", "nan"),
    ('{"__float__": "NaN"}', "nan"),
])  # fmt: skip
def test_numbers_that_json_lacks_are_floats(text: str, value: object, tmp_path: Path) -> None:
    """Fault: one of the two forms in which transformers writes them is refused, or stays text."""
    (tmp_path / "config.json").write_text(f'{{"a": {text}}}')
    found = read_model_json(tmp_path / "config.json")["a"]
    assert math.isnan(found) if value == "nan" else found == value
    assert read_model_json(tmp_path / "absent.json", is_optional=True) == {}


def test_a_config_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    """Fault: a traceback for an empty folder."""
    refused(tmp_path, "config.json is missing; expected a Hugging Face model folder")


def test_a_folder_without_access_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: an OSError, so that `run --model` of it ended with 1 and a command that continues."""
    monkeypatch.setattr(Path, "exists", Mock(side_effect=PermissionError(13, "no")))
    with pytest.raises(ModelError), WeightFiles(tmp_path):
        pass


@table("model", ["a\0b", "~nobody-of-this-name/x", "x" * 5000, "a/b/c", "/no/such/folder", ""])
def test_a_model_that_is_no_folder_is_a_sentence(model: str) -> None:
    """Fault: a ValueError, OSError or RuntimeError for a name that no file system takes."""
    with pytest.raises(ModelError, match="is not a folder; expected 'demo', 'demo-jamba', a model folder or a hub id"):
        Engine(model)


def test_links_of_a_hub_cache_are_followed(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Fault: a checkpoint in the hub's cache, where every file is a link, is refused."""
    for path in tiny_checkpoint("mamba").iterdir():
        (tmp_path / path.name).symlink_to(path)
    Engine(tmp_path, pool_size_bytes=1 << 20).close()
    assert json.loads((tmp_path / "config.json").read_text())


@table("name, short, what", [
    ("org/name", "org/name", "neither a folder nor in the Hugging Face cache"), ("org/there", "there", None),
    ("./org/name", "name", "is not a folder"), ("/org/name", "name", "is not a folder"),
    ("~/name", "name", "is not a folder"), ("a/b/c/", "c", "is not a folder"), ("org/name/x", "x", "is not a folder"),
    ("name", "name", "is not a folder"), ("notes", "notes", "model 'notes' is a file; expected a model folder$"),
    ("..", "PARENT", None), ("demo", "demo", None),
])  # fmt: skip
def test_a_name_is_that_of_a_folder_or_of_a_hub(
    name: str, short: str, what: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a slip in a path is looked for in the hub's cache, or a store has a model under its whole path."""
    (tmp_path / "here" / "org" / "there").mkdir(parents=True)
    (tmp_path / "here" / "notes").write_text("x")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "nowhere"))
    assert name_of(name) == short.replace("PARENT", tmp_path.name)
    if what is None:
        assert locate_model(name) == BUNDLED.get(name, Path(name))
        return
    with pytest.raises(ModelError, match=what):
        locate_model(name)


def test_the_hub_may_not_know_or_not_allow_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a name that the hub's own library refuses, or a cache that cannot be read, ends in a traceback."""
    for error in (HFValidationError("odd"), LocalEntryNotFoundError("none"), PermissionError(13, "no")):
        monkeypatch.setattr("huggingface_hub.snapshot_download", Mock(side_effect=error))
        with pytest.raises(ModelError, match="hf download org/name"):
            locate_model("org/name")
    asked = Mock(return_value="/x")
    monkeypatch.setattr("huggingface_hub.snapshot_download", asked)
    assert locate_model("org/name") == Path("/x")
    asked.assert_called_once_with("org/name", local_files_only=True)
