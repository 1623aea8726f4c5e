"""LoRAs merged while loading, against peft's own merge and against the formula in NumPy, bit for bit."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from apcbatch import LLM, Engine
from apcbatch.cli.program import main
from apcbatch.config import Config
from apcbatch.engine.checkpoint_sizes import checkpoint_sizes, weights_in
from apcbatch.errors import ModelError
from apcbatch.model import adapter as module
from apcbatch.model.adapter import Adapter, about_weights, adapter_digest
from apcbatch.model.families import family_of, load_model_config
from apcbatch.model.locate import locate_model
from apcbatch.regular_files import digest_of
from tests.effort import table
from tests.model.adapters import ALPHA, FILES, RANK, lora_of, merged_by_numpy, save_adapter
from tests.model.folders import multimodal, weights_of, with_config, with_weights
from tests.model.parity import answers
from tests.model.quantized import quantised
from tests.tiny import FAMILIES, load_oracle

pytestmark = pytest.mark.usefixtures("one_thread")

Checkpoints = Callable[..., Path]
ALL = {"target_modules": "all-linear", "exclude_modules": r".*(mamba|mixer)\.out_proj|lm_head"}  # peft refuses these
CHOICES = (
    {**ALL, "fan_in_fan_out": True},
    {**ALL, "use_rslora": True, "rank_pattern": {"(q|o)_proj": 2, r".*layers\.0.*": 5}, "alpha_pattern": {"o_proj": 7}},
    {"layers_to_transform": [1], "target_modules": ["in_proj", "in_proj_z", "in_proj_qkvz", "down_proj", "q_proj"]},
    {"target_modules": r"\b.*?layers\.(?:0|1)\.\w+\.(in_proj\w*|[kq]_proj|w1)\b"},
)
ADAPTED = "model.layers.0.mamba.in_proj"


def taken(folder: Path, shapes: Mapping[str, torch.Tensor], adapter: Path) -> dict[str, torch.Tensor]:
    """All weights of a checkpoint as they are loaded. shapes: tensors of theirs, by the names of the family."""
    config = load_model_config(folder)
    lora = Adapter(adapter, config)
    with family_of(config).checkpoint(folder, torch.device("cpu"), adapter=lora) as checkpoint:
        lora.read()
        found = {name: checkpoint.take(name, tuple(one.shape)) for name, one in shapes.items()}
        checkpoint.finish()
    return found


def matrices(weights: Mapping[str, torch.Tensor], pattern: str = "") -> list[str]:
    """The names of projections that a pattern finds."""
    is_other = re.compile(r"embed|norm|A_log|experts\.\d|(gate|router|router\.layer)\.weight$")
    found = [name for name, one in weights.items() if one.dim() == 2 and not is_other.search(name)]
    return [name for name in found if re.search(pattern, name)]


def same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(one, expected[name]) for name, one in found.items())


@pytest.mark.drawn(4)
@pytest.mark.slow
@pytest.mark.parametrize("number, family", list(enumerate(FAMILIES)))
def test_weights_are_those_of_peft(number: int, family: str, tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Catches a tensor of another module, expert or row, a rank or a scale of another pattern, and one that peft has
    and that is left out. Parameters, such as packed experts, are adapted beside the modules."""
    from peft import LoraConfig, PeftModel, get_peft_model

    folder, choice = tiny_checkpoint(family), dict(CHOICES[number % len(CHOICES)])
    base, plain = load_oracle(folder), (torch.nn.Linear, torch.nn.Embedding, torch.nn.Conv1d)
    parameters = [
        f"{name}.{own}" for name, module in base.named_modules() if not isinstance(module, plain)
        for own, one in module.named_parameters(recurse=False) if one.dim() > 1 and own != "A_log"
    ]  # fmt: skip
    choice["fan_in_fan_out"] = choice.get("fan_in_fan_out", False) and not parameters  # which peft refuses
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, init_lora_weights=False, target_parameters=parameters, **choice)
    get_peft_model(base, config).save_pretrained(tmp_path / "a")
    PeftModel.from_pretrained(load_oracle(folder), tmp_path / "a").merge_and_unload().save_pretrained(tmp_path / "m")
    before, expected = weights_of(folder), weights_of(tmp_path / "m")
    found = taken(folder, before, tmp_path / "a")
    error = max(float((one - expected[name]).abs().max()) for name, one in found.items())
    changed = [name for name, one in found.items() if not torch.equal(one, before[name])]
    assert changed == [name for name in before if not torch.equal(before[name], expected[name])] != []
    assert error <= 1e-6, f"{error:.2e}"


@pytest.mark.slow
@pytest.mark.drawn(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_the_merged_folder(
    family: str, tiny_checkpoint: Checkpoints, stages: Callable[[int], None], tmp_path: Path
) -> None:
    """Catches sums in another order, a weight that is rounded twice, and a snapshot that two adapters share: the folder
    that NumPy has merged in float32 answers the same, in both dtypes and stages, and no fingerprint is another's."""
    folder = tiny_checkpoint(family)
    weights, fingerprints = weights_of(folder), []
    dtypes = torch.float32, torch.bfloat16, torch.float16
    tensors = {name: one.to(random.choice(dtypes)) for name, one in lora_of(weights, matrices(weights)).items()}
    adapter = save_adapter(tmp_path / "a", tensors)
    merged = with_weights(folder, tmp_path / "m", merged_by_numpy(weights, tensors))
    for dtype in ("float32", "bfloat16"):
        (own, found), (_, expected) = answers(folder, dtype=dtype, adapter=adapter), answers(merged, dtype=dtype)
        plain, without = answers(folder, dtype=dtype)
        assert found == expected != without
        other, _ = answers(folder, dtype=dtype, adapter=save_adapter(tmp_path / "b", tensors, lora_alpha=ALPHA + 1))
        fingerprints += [own, plain, other]
        stages(2)
        assert answers(folder, dtype=dtype, adapter=adapter) == (own, found)
        stages(1)
    assert len(set(fingerprints)) == 6


@pytest.mark.slow
@pytest.mark.parametrize("form", ["fp8 blocks", "pack int4"])
def test_it_is_added_to_the_decoded_weight(form: str, tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Catches an adapter that is added to codes, or left out, or whose sum is rounded to bfloat16 before its use."""
    encoded, decoded = quantised(tiny_checkpoint("jamba"), tmp_path / "q", form)
    weights = weights_of(decoded)
    adapter = save_adapter(tmp_path / "a", lora_of(weights, matrices(weights, "proj")))
    for dtype in ("float32", "bfloat16"):
        assert answers(encoded, dtype=dtype, adapter=adapter)[1] == answers(decoded, dtype=dtype, adapter=adapter)[1]


ROOTS = ("model.", "model.language_model.", "language_model.model.", "")


@table("family, root", [*(("qwen3_5", root) for root in ROOTS), ("nemotron_h", "model."), ("mamba", "")])
def test_names_of_all_versions_fit(family: str, root: str, tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Fault: an adapter of the multimodal model, or of another version of transformers, is refused or left out."""
    folder = tiny_checkpoint(family)
    weights, own = weights_of(folder), family_of(load_model_config(folder)).layers.removesuffix("layers")
    tensors = lora_of(weights, matrices(weights))
    named = {name.replace(f"e_model.model.{own}", f"e_model.model.{root}"): one for name, one in tensors.items()}
    head = "language_model." * root.startswith("language_model.")
    named = {name.replace("lm_head", f"{head}lm_head"): one for name, one in named.items()}
    adapter = save_adapter(tmp_path / "a", named)
    for one in (folder, *([multimodal(folder, tmp_path / "v")] if family == "qwen3_5" else [])):
        assert same(taken(one, weights, adapter), merged_by_numpy(weights, tensors))


@pytest.mark.slow
@table("family", ["jamba", "lfm2_moe", "qwen3_5_moe"])
def test_experts_may_be_packed_or_not(family: str, tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Fault: an adapter of single experts does not fit packed ones or the other way round, or other rows or experts."""
    folder = tiny_checkpoint(family)
    weights = weights_of(folder)
    gate, up, down = ("w1", "w3", "w2") if family == "lfm2_moe" else ("gate_proj", "up_proj", "down_proj")
    ours = [name for name in weights if re.search(r"experts\.\d+\.", name)]
    single = lora_of(weights, ours)
    for name in single:
        if f".{up}.lora_A" in name:  # one A for gate and up, so that the packed LoRA has the same rank
            single[name] = single[name.replace(f".{up}.", f".{gate}.")]
    whole: dict[str, torch.Tensor] = {}
    packed = {name: one for name, one in weights.items() if name not in ours}
    expected = merged_by_numpy(weights, single)
    merged = {name: one for name, one in expected.items() if name not in ours}
    for prefix in dict.fromkeys(name[: name.index(".experts.") + 8] for name in ours):
        count = sum(name.startswith(f"{prefix}.") for name in ours) // 3

        def stacked(end: str, names: Any, source: Any, prefix: str = prefix, count: int = count) -> torch.Tensor:
            each = (torch.cat([source[f"{prefix}.{e}.{name}.{end}"] for name in names]) for e in range(count))
            return torch.stack(list(each))  # (experts, rows, ..)

        loras = {name.removeprefix("base_model.model."): one for name, one in single.items()}
        for parameter, names in {"gate_up_proj": (gate, up), "down_proj": (down,)}.items():
            packed[f"{prefix}.{parameter}"] = stacked("weight", names, weights)
            merged[f"{prefix}.{parameter}"] = stacked("weight", names, expected)
            stem = f"base_model.model.{prefix}" + ".base_layer" * (parameter == "gate_up_proj")
            whole[f"{stem}.lora_A.weight"] = stacked("lora_A.weight", names[:1], loras).flatten(0, 1)
            whole[f"{stem}.lora_B.weight"] = stacked("lora_B.weight", names, loras).permute(1, 2, 0).flatten(1)
    targets: Any = {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    adapters = save_adapter(tmp_path / "s", single), save_adapter(tmp_path / "w", whole, **targets)
    other = with_config(folder, tmp_path / "p")
    save_file({name: one.contiguous() for name, one in packed.items()}, other / "model.safetensors")
    for adapter in adapters:
        assert same(taken(folder, weights, adapter), expected) and same(taken(other, packed, adapter), merged)
    for old in ("0.18.1", None):
        with pytest.raises(ModelError, match="is of packed experts; expected peft_version 0.19 on"):
            taken(folder, weights, save_adapter(tmp_path / "d", whole, **targets, peft_version=old))


A, B = (f"base_model.model.{ADAPTED}.lora_{end}.weight" for end in "AB")
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    *(({key: value}, {}, f"{key} is {re.escape(repr(value))}; expected a LoRA without it; merge it into its base")
      for key, value in (("use_dora", True), ("modules_to_save", ["lm_head"]), ("lora_bias", True),
                         ("layer_replication", [[0, 4]]), ("trainable_token_indices", [3]), ("key_of_2031", "x"))),
    *(({key: value}, {}, f"{key} is {re.escape(repr(value))}; expected {expected}") for key, value, expected in (
        ("peft_type", "LOHA", '"LORA", the only'), ("peft_type", None, '"LORA"'), ("bias", "all", '"none"'),
        ("init_lora_weights", "pissa", "true"), ("r", 0, "an integer from 1"), ("r", 1 << 20, "an integer from 1"),
        ("lora_alpha", "8", "a number"), ("use_rslora", 1, "true or false"), ("target_modules", [3], "a list of names"),
        ("layers_to_transform", ["1"], "numbers of layers"), ("layers_pattern", "blocks", '"layers", the only'),
        ("rank_pattern", [1], "an object"), ("target_modules", {"a": 1}, "a list of names"),
    )),
    ({"rank_pattern": {"x": 0}}, {}, "rank_pattern.x is 0; expected an integer from 1"),
    ({"alpha_pattern": {"(": 1}}, {}, "alpha_pattern: the pattern .* is no regular expression"),
    ({"target_modules": r"(a+)+\1"}, {}, "target_modules: the pattern .* references or others that are not read"),
    ({"target_modules": "x" * 600}, {}, "target_modules: the pattern .* the most is 512"),
    ({"rank_pattern": {"in_proj": 2}}, {}, rf"{A} has shape \[3, 40\]; expected \[2, 40\] for .* of rank 2"),
    *((one, {}, f"{A} is not among what adapter_config.json targets; they must agree") for one in (
        {"target_modules": ["out_proj"]}, {"layers_to_transform": 3, "target_modules": ["in_proj"]},
        {"exclude_modules": ["in_proj"]}, {"target_modules": None, "target_parameters": ["out_proj.weight"]},
    )),
    ({"target_modules": ["in_proj"]}, {}, "has no tensors for model.layers.2.mamba.in_proj, which"),
    ({}, {A: torch.ones(RANK, 41)}, rf"{A} has shape \[3, 41\]; expected \[3, 40\] for '{ADAPTED}' of rank 3"),
    ({}, {B: torch.ones(160, RANK + 1)}, rf"{B} has shape \[160, 4\]; expected \[160, 3\]"),
    ({}, {B: torch.full((160, RANK), float("nan"))}, f"{B} has NaN or an infinite number"),
    ({}, {A: torch.ones(RANK, 40, dtype=torch.int8)}, f"{A} has dtype I8; expected one of F32, BF16, F16"),
    ({}, {B: None}, f"{A} lacks {B}; download the adapter again"),
    ({}, {A: None, B: None}, "has no tensors; expected lora_A and lora_B"),
    *(({}, {f"base_model.model.{name}": torch.ones(2, 2)}, f"{name} is no lora_A.weight or lora_B.weight; DoRA, embedd")
      for name in ("model.embed_tokens.lora_embedding_A", f"{ADAPTED}.lora_magnitude_vector", "lm_head.weight",
                   f"{ADAPTED}.lora_A.default.weight", f"{ADAPTED}.lora_B.bias", "lm_head.base_layer.weight")),
    *(({}, {f"base_model.model.{name}.lora_{end}.weight": torch.ones(RANK, RANK) for end in "AB"},
       f"{name}.lora_A.weight {what}") for name, what in (
        ("model.visual.blocks.0.attn.qkv", "is of no projection of the model; expected .* model, 'org/base', as"),
        ("mtp.layers.0.mamba.in_proj", "is of no projection"), ("model.layers.99.mamba.in_proj", "is of no projection"),
        ("model.layers.0.mamba.conv1d", "is of no projection"), ("model.layers.0.mamba", "is of no projection"),
        ("model.layers.1.feed_forward.experts.9.up_proj", "is of no projection"),
        ("model.layers.1.feed_forward.experts.0.w9", "is of no projection"), ("model.norm", "is of no projection"),
        ("model.embed_tokens", "adapts the embeddings, or a head"), ("lm_head", "adapts the embeddings, or a head"),
    )),
    ({}, {A.replace(".model.layers", ".language_model.model.layers"): torch.ones(RANK, 40),
          B.replace(".model.layers", ".language_model.model.layers"): torch.ones(160, RANK)},
     rf"lora_A.weight adapts {ADAPTED}.weight again, after base_model"),
]  # fmt: skip


@table("changed, tensors, sentence", REFUSED)
def test_what_is_refused_by_name(
    changed: dict[str, Any], tensors: dict[str, Any], sentence: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Fault: a variant of LoRA is merged as if it were plain, a tensor is left out in silence, or a traceback."""
    folder = tiny_checkpoint("jamba", tie_word_embeddings=True)
    own = {**lora_of(weights_of(folder), [f"{ADAPTED}.weight"]), **tensors}
    adapter = save_adapter(tmp_path / "a", {name: one for name, one in own.items() if one is not None}, **changed)
    with pytest.raises(ModelError, match=sentence) as caught:
        Engine(folder, adapter=adapter, pool_size_bytes=1 << 20)
    assert len(str(caught.value)) < 700 and str(caught.value).isprintable()


def test_files_that_are_missing_or_change_are_refused(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Fault: pickles are opened, one of several adapters is chosen, or tensors are read that nothing has checked."""
    folder = tiny_checkpoint("mamba")
    weights = weights_of(folder)
    tensors = lora_of(weights, matrices(weights))
    for name in FILES:
        adapter = save_adapter(tmp_path / name / "default", tensors)
        (adapter / name).rename(adapter / "adapter_model.bin")
        for one in (adapter, adapter.parent):
            with pytest.raises(ModelError, match="cannot be read: .* expected the folder of one adapter.*no pickles"):
                Engine(folder, adapter=one)
    read = Adapter(save_adapter(tmp_path / "a", tensors), load_model_config(folder))
    read.bind({name: tuple(one.shape) for name, one in weights.items()})
    save_adapter(tmp_path / "a", lora_of(weights, matrices(weights), seed=1))
    with pytest.raises(ModelError, match="changed while it was read"):
        read.read()


def test_files_are_digested_once_and_counted(
    tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a run reads gigabytes four times before it begins, or its plan of memory leaves them out."""
    folder, digested = tiny_checkpoint("mamba"), list[bool]()
    monkeypatch.setattr(module, "digest_of", lambda paths: digested.append(True) or digest_of(paths))
    tensors = lora_of(weights_of(folder), matrices(weights_of(folder)))
    adapter = save_adapter(tmp_path / "a", tensors)
    assert len(list(about_weights(folder, Config(adapter=str(adapter))))) == 1
    Engine(folder, adapter=adapter, pool_size_bytes=1 << 20).close()
    assert len(adapter_digest(adapter)) == 32 and len(digested) == 1
    config = load_model_config(folder)
    sizes = checkpoint_sizes(folder, config, "auto", "cpu", "bfloat16", weights_in(folder, config), adapter)
    assert sizes is not None and sizes.adapter_bytes == sum(tensor.nbytes for tensor in tensors.values()) > 0


@pytest.mark.slow
def test_commands_name_it_and_runs_are_kept_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: --resume or a store mixes answers with an adapter and without, or a command says nothing of it."""
    monkeypatch.chdir(tmp_path)
    weights = load_file(locate_model("demo") / "model.safetensors")
    adapter = str(save_adapter(tmp_path / "a", lora_of(weights, matrices(weights, "in_proj"))))
    line = {"messages": [{"role": "user", "content": "a tide?"}]}
    Path("in.jsonl").write_text("".join(json.dumps({"id": str(i), **line}) + "\n" for i in range(2)))
    said = f"the adapter {adapter} (LoRA, r 3, digest "
    for command in ("plan in.jsonl", "show in.jsonl", "doctor --device cpu"):
        assert main([*command.split(), "--adapter", adapter]) == 0
        assert said in re.sub(r"\s+", " ", capsys.readouterr().out), command
    run = ["run", "in.jsonl", "-o", "out.jsonl", "--store", "s", "--max-tokens", "3", "--device", "cpu"]
    assert main([*run, "--limit", "1", "--adapter", adapter]) == 0 and said in capsys.readouterr().err
    run_file = json.loads(Path("out.jsonl.run.json").read_text())
    assert run_file["config"]["adapter"] == adapter and re.fullmatch("[0-9a-f]{32}", run_file["adapter"])
    save_adapter(tmp_path / "a", lora_of(weights, matrices(weights, "in_proj"), seed=1))
    assert main([*run, "--resume"]) == 2
    assert re.search(rf"adapter +then '{run_file['adapter']}', now", capsys.readouterr().err)
    save_adapter(tmp_path / "a", lora_of(weights, matrices(weights, "in_proj")))
    assert main([*run, "--resume"]) == 0, "the run file names it"
    records = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    with LLM("demo", adapter=adapter, max_tokens=3) as llm, LLM("demo", max_tokens=3, store="s") as plain:
        own = [one.token_ids for one in llm.run("in.jsonl")]
        assert [one["apcbatch"]["completion_token_ids"] for one in records] == own
        first = next(iter(plain.run("in.jsonl")))
        assert first.cached_tokens == 0 and first.token_ids != own[0]
