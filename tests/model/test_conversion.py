"""`apcbatch convert`: each weight against rounding to nearest in NumPy, equal bits; what else is in the folder; what
other readers make of it; what is refused, and how."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from apcbatch.cli.program import main
from apcbatch.errors import UsageError
from apcbatch.model import conversion
from apcbatch.model.conversion import SCHEMES
from apcbatch.model.encoded import Encoded
from apcbatch.model.encoded import weights_of as stored_weights
from apcbatch.model.families import load_model_config
from apcbatch.model.locate import DEMO_DIR
from apcbatch.model.quantization import read_quantization
from apcbatch.model.weight_files import WeightFiles
from apcbatch.model.weights import Checkpoint
from tests.effort import table, tries
from tests.model.folders import REMOVED, copy_of, multimodal, weight_map_of, weights_of, with_config, with_weights
from tests.model.parity import answers
from tests.model.quantized import FORMATS
from tests.model.test_experts import with_packed_experts
from tests.tiny import FAMILIES

pytestmark = pytest.mark.usefixtures("one_thread")

Wide = Callable[[str], Path]
# Sizes of tiny checkpoints whose projections have a multiple of 128 columns.
SIZES = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size",
                       "shared_intermediate_size", "moe_shared_expert_intermediate_size", "mamba_d_ssm",
                       "block_multiple_of"), 128)  # fmt: skip
SIZES |= {"num_heads": 8, "mamba_n_heads": 8, "num_attention_heads": 4, "mamba_num_heads": 4}
SIZES |= {"head_dim": 32, "mamba_head_dim": 32, "linear_value_head_dim": 32}
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
HEAD, EMBEDDING, IN_PROJ = "lm_head.weight", "backbone.embeddings.weight", "backbone.layers.0.mixer.in_proj.weight"
IGNORED = ("mtp.", "model.visual.")
STAY = ("embed", "norm", "conv1d", "conv.conv", "dt_proj", "in_proj_a", "in_proj_b", "gate.weight", "router", HEAD)


def convert(folder: Path, target: Path, to: str, head: str = "keep") -> list[str]:
    """Convert; the sentence, and the warnings."""
    warnings: list[str] = []
    return [conversion.convert(folder, target, to, head, warnings.append, lambda count: None), *warnings]


@pytest.fixture
def wide(tiny_checkpoint: Callable[..., Path]) -> Callable[[str], Path]:
    """The tiny checkpoint of a family, with these sizes."""
    return lambda name: tiny_checkpoint(name, **{key: n for key, n in SIZES.items() if key in FAMILIES[name][2]})


def nearest_e4m3(values: np.ndarray) -> np.ndarray:
    """The float of e4m3 that is nearest; of two, the one whose code is even."""
    size = np.minimum(np.abs(values.astype(np.float64)), 448)
    above = np.searchsorted(E4M3, size).clip(1)
    low, high = size - E4M3[above - 1], E4M3[above] - size
    chosen = np.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)
    return np.copysign(E4M3[chosen], values).astype(np.float32)


def rounded(weight: torch.Tensor, to: str) -> torch.Tensor:
    """A weight (.., out, in) rounded to nearest in a format, and decoded to bfloat16."""
    values = weight.float().numpy()
    groups = values.reshape(*values.shape[:-1], -1, values.shape[-1] if to == "fp8" else 128)
    most = {"fp8": 448, "int8": 127.5, "int4": 7.5}[to]
    scale = torch.from_numpy(np.abs(groups).max(-1, keepdims=True) / np.float32(most)).bfloat16().float().numpy()
    quotients = groups / np.where(scale > 0, scale, np.float32(1))
    codes = nearest_e4m3(quotients) if to == "fp8" else np.rint(quotients).clip(-most - 0.5, most - 0.5)
    return torch.from_numpy((codes * scale).astype(np.float32)).bfloat16().view(weight.shape)


def taken(folder: Path) -> tuple[dict[str, torch.Tensor], set[str]]:
    """The weights that the package loads, by their names in the files; names of the encoded ones."""
    with WeightFiles(folder) as files:
        stored = stored_weights(files, IGNORED)
    with Checkpoint(folder, torch.device("cpu"), ignored=IGNORED) as checkpoint:
        found = {name: checkpoint.take(name, one.shape).clone() for name, one in stored.items()}
    return found, {name for name, one in stored.items() if isinstance(one, Encoded)}


def decoded(folder: Path, target: Path) -> Path:
    """A folder decoded to bfloat16."""
    save_file(taken(folder)[0], with_config(folder, target, quantization_config=REMOVED) / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    return target


def assert_rounded(folder: Path, plain: dict[str, torch.Tensor], to: str) -> None:
    """The folder has the weights `plain`, rounded if they are encoded; and its `ignore` says which are not."""
    found, encoded = taken(folder)
    declared = read_quantization(folder / "config.json", json.loads((folder / "config.json").read_text()))
    assert found.keys() == plain.keys() and declared is not None
    matrices = {name for name, one in plain.items() if one.dim() > 1 and name.endswith(".weight")}
    fitting = {name for name in matrices if to == "fp8" or plain[name].shape[-1] % 128 == 0}
    assert encoded - {HEAD} == {name for name in fitting if not any(part in name for part in STAY)} != set()
    for name in matrices | {HEAD}:
        assert (declared.codec_of(name.removesuffix(".weight"))[0] is not None) == (name in encoded), name
    for name, weight in found.items():
        expected = rounded(plain[name], "int8" if name == HEAD else to) if name in encoded else plain[name]
        assert weight.dtype == expected.dtype and torch.equal(weight, expected), name


@table("to", SCHEMES)
def test_a_weight_is_rounded_to_nearest(to: str, wide: Wide, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a tie rounded away from even, a code beyond the largest, a wrong order of groups, of codes in an item or
    of rows in pieces, zeros, tiny and huge numbers that become NaN, and a dtype that is read as another."""
    plain = wide("mamba")
    torch.manual_seed(random.randrange(1 << 31))
    sizes, dtypes = [1.0, 0.0, 2.0**-130, 1e-40, 3e36], [torch.float32, torch.bfloat16, torch.float64]
    changes = weights_of(plain) | {name: one.half() for name, one in weights_of(plain).items() if "layers.1" in name}
    for i, name in enumerate(name for name in changes if "layers.0" in name and name.endswith("_proj.weight")):
        numbers, ties = torch.randn(changes[name].shape), torch.randint(-15, 16, changes[name].shape) / 2
        factors = torch.tensor(sizes)[torch.randint(0, 5, (len(ties), 1))]
        changes[name] = (numbers.where(torch.rand(len(ties), 1) < 0.5, ties) * factors).to(dtypes[i % 3])
    monkeypatch.setattr(conversion, "_PIECE_ITEMS", 1000)
    folder = with_weights(plain, tmp_path / "m", changes)
    convert(folder, tmp_path / "q", to)
    assert_rounded(tmp_path / "q", weights_of(folder), to)


@pytest.mark.drawn(4)
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_is_converted_and_runs(family: str, wide: Wide, tmp_path: Path) -> None:
    """Catches a projection that is left out, a gate or an embedding that is encoded, an `ignore` that says otherwise, a
    head that stays tied to an embedding that it no longer equals, and answers that the decoded folder does not give."""
    tied, head = load_model_config(wide(family)).tie_word_embeddings, random.choice(["keep", "int8"])
    folder = with_config(wide(family), tmp_path / "m", tie_embedding=tied)  # which LFM2 reads
    plain = weights_of(folder)
    if head == "int8":
        plain.setdefault(HEAD, next(plain[name] for name in plain if "embed" in name))
    for to in SCHEMES:
        assert len(convert(folder, tmp_path / to, to, head)) == 1
        assert_rounded(tmp_path / to, plain, to)
    to = random.choice([*SCHEMES])
    folders = tmp_path / to, decoded(tmp_path / to, tmp_path / "decoded")
    found, expected = (answers(one, dtype="bfloat16", weights="encoded") for one in folders)
    assert found[1] == expected[1], to


@pytest.mark.slow
def test_packed_experts_are_written_one_by_one(wide: Wide, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches the gate and the up of an expert swapped, an expert's rows taken from another, a vision tower that is
    encoded or lost, and a tensor that the index puts into another file."""
    packed = with_packed_experts(wide("qwen3_5_moe"), tmp_path / "packed", "gate_proj", "up_proj", "down_proj")
    plain, packed = (multimodal(folder, tmp_path / name, "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration")
                     for folder, name in ((wide("qwen3_5_moe"), "plain"), (packed, "whole")))  # fmt: skip
    monkeypatch.setattr(conversion, "_MOST_SHARD_BYTES", 100_000)
    convert(packed, tmp_path / "q", "int4")
    kept = {name: one for name, one in weights_of(plain).items() if name.startswith(IGNORED)}
    assert_rounded(tmp_path / "q", {name: one for name, one in weights_of(plain).items() if name not in kept}, "int4")
    with WeightFiles(tmp_path / "q") as files:
        assert all(files.tensors[name].shape == one.shape for name, one in kept.items())
        assert weight_map_of(tmp_path / "q") == {name: one.path.name for name, one in files.tensors.items()}
        assert len({one.path for one in files.tensors.values()}) > 3


def test_what_no_group_divides_stays(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Catches columns that are cut or padded, and a warning where all is encoded."""
    folder = tiny_checkpoint("jamba", hidden_size=128, intermediate_size=96)
    _, said = convert(folder, tmp_path / "q", "int8")
    assert said.startswith("10 projections stay, as their columns are no multiple of 128, such as model.layers.0.feed")
    assert_rounded(tmp_path / "q", weights_of(folder), "int8")
    assert len(convert(folder, tmp_path / "f", "fp8")) == 1


@pytest.mark.slow
def test_transformers_loads_what_is_written(wide: Wide, tmp_path: Path) -> None:
    """Catches a name, a shape or a key that transformers does not know, an `ignore` that it reads otherwise, and a head
    in the format of the other weights."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    rows = [(family, to, "keep") for family in FAMILIES if family != "granitemoehybrid" for to in SCHEMES]
    for i, (family, to, head) in enumerate([*random.sample(rows, tries(36)), ("lfm2", "fp8", "int8")]):
        convert(wide(family), folder := tmp_path / f"{i}", to, head)
        options = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if head == "keep" else {}
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)
        if head == "int8":
            model(torch.arange(1, 9)[None])  # decodes
        oracle = AutoModelForCausalLM.from_pretrained(decoded(folder, tmp_path / f"d{i}"), dtype=torch.bfloat16)
        found, expected = model.state_dict(), oracle.state_dict()
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == [], (family, to)


def test_the_command_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Catches a file that is not copied, and a count or a size that is not what was written."""
    folder, target = copy_of(DEMO_DIR, tmp_path / "m"), tmp_path / "q"
    for name in ("LICENSE", "training_args.bin", "additional_chat_templates/a.jinja"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("text")
    target.mkdir()
    assert main(["convert", str(folder), str(target), "--to", "int8"]) == 0
    assert "q: 12 weights in int8, groups of 128 (compressed-tensors); 5.3 MiB of tensors" in capsys.readouterr().out
    found, expected = ({path.relative_to(one): path for path in one.rglob("*.*")} for one in (target, folder))
    assert found.keys() == expected.keys() - {Path("training_args.bin")} and (target / "LICENSE").read_text() == "text"
    assert found[Path("tokenizer.json")].read_bytes() == expected[Path("tokenizer.json")].read_bytes()
    assert main(["doctor", "--device", "cpu", "--model", str(target)]) == 0
    assert "int8, groups of 128" in capsys.readouterr().out


@pytest.mark.slow
def test_a_killed_conversion_leaves_nothing_that_loads(tmp_path: Path) -> None:
    """Catches half of a folder that looks whole."""
    target = tmp_path / "q"
    program = "import os, sys; from pathlib import Path; from apcbatch.model.conversion import convert; "
    program += "convert(*map(Path, sys.argv[1:]), 'int8', 'keep', print, lambda count: os.kill(os.getpid(), 9))"
    assert subprocess.run([sys.executable, "-c", program, DEMO_DIR, target], check=False).returncode == -9
    assert list(target.rglob("model.safetensors")) and not any(path.is_file() for path in target.iterdir())
    with pytest.raises(UsageError, match=r"has \.unfinished-\w+ of a conversion that did not end; remove it"):
        convert(DEMO_DIR, target, "int8", "keep")


def test_what_cannot_be_converted_is_a_sentence(
    wide: Wide, tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a model that would not run, one that is encoded twice, NaN that becomes a code, a DIR that is overwritten
    or too small, and files of an attempt that failed."""
    plain = wide("mamba")
    folder, target = copy_of(plain, tmp_path / "m"), tmp_path / "q"
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(folder)
    quantised = with_config(plain, tmp_path / "f", quantization_config=FORMATS["float channel"].config)
    unknown = with_config(plain, tmp_path / "l", architectures=["LlamaForCausalLM"])
    for model, path, head, said in [
        (quantised, target, "keep", "quantised already, FP8"), (unknown, target, "keep", "'LlamaFor.*; expected"),
        (folder, tmp_path / "file", "keep", "DIR .*file is no folder"), (folder, folder, "keep", "m is MODEL or lies"),
        (folder, tmp_path / "link" / "q", "keep", "q is MODEL or lies in"), (folder, unknown, "keep", "l is not empty"),
        (folder, tmp_path / "none" / "q", "keep", "cannot be made, as .*none is no folder"),
        (tiny_checkpoint("mamba"), target, "keep", "in_proj has 36 columns; expected a multiple of 128 for integers"),
        (with_config(plain, tmp_path / "u", tie_word_embeddings=False), target, "int8", f"{HEAD} is missing"),
        *((with_weights(plain, tmp_path / f"bad {i}", {name: tensor}), target, "keep", f"s: tensor {name} {said}")
          for i, (name, tensor, said) in enumerate([
              (IN_PROJ, torch.full((512, 128), float("nan")).tril(-1), "has NaN, an infinite n.*; download"),
              (EMBEDDING, torch.full((97, 128), -float("inf")), "has NaN or an infinite number"),
              (IN_PROJ, torch.ones((512, 128), dtype=torch.int16), "has dtype I16; expected one of F64")])),
        (folder, target, "keep", "DIR .*q takes [0-9.]+ KiB, and its disk has 1000 B free; free some"),
    ]:  # fmt: skip
        if "free" in said:
            monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
        with pytest.raises(UsageError, match=said):
            convert(model, path, "int8", head)
        assert not target.exists() or not list(target.iterdir())
