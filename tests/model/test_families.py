"""Families of models: how they are found, what identifies their models, how another one is added."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from apcbatch import Engine, Request
from apcbatch.errors import ModelError
from apcbatch.fingerprint import model_fingerprint
from apcbatch.kernels.cpu.backend import CpuBackend
from apcbatch.kernels.cuda.backend import CudaBackend
from apcbatch.kernels.processor import numerics
from apcbatch.layout import TensorLayout
from apcbatch.model import families
from apcbatch.model.families import load_model_config, state_layout
from apcbatch.model.locate import locate_model
from tests.effort import table
from tests.model.families import ROWS
from tests.model.folders import weights_of, with_config
from tests.tiny import FAMILIES
from tools import models_table

ARCHITECTURES = [
    "MambaForCausalLM", "FalconMambaForCausalLM", "JambaForCausalLM", "Qwen3_5ForConditionalGeneration",
    "Qwen3_5ForCausalLM", "Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM",
    "Mamba2ForCausalLM", "GraniteMoeHybridForCausalLM", "NemotronHForCausalLM", "BambaForCausalLM",
    "FalconH1ForCausalLM", "Lfm2ForCausalLM", "Lfm2MoeForCausalLM",
]  # fmt: skip
PRETEND = '''
"""A second name for Mamba, with other tensor names."""

from dataclasses import replace

from apcbatch.model.families import mamba


def read(reader):
    config = mamba.read(reader)
    (block,) = config.blocks["mamba"]
    return replace(config, blocks={"mamba": (replace(block, norm="before", name="core"),)})


FAMILY = replace(
    mamba.FAMILY,
    model_type="pretend",
    architectures=("PretendForCausalLM",),
    read=read,
    embedding="net.words",
    layers="net.blocks",
    final_norm="net.after",
    head="net.head",
    rank=100,
)
'''
PRETEND_NAMES = {
    "backbone.embeddings": "net.words", "backbone.layers": "net.blocks", "backbone.norm_f": "net.after",
    ".norm.": ".before.", ".mixer.": ".core.", "lm_head": "net.head",
}  # fmt: skip


@table("name", ["mamba", "jamba"])
def test_a_models_fingerprint_covers_its_layout(name: str, tiny_checkpoint: Callable[..., Path]) -> None:
    """Catches a fact that is left out of the fingerprint: states of another layout would be restored."""
    folder = tiny_checkpoint(name)
    engine, config = Engine(folder, pool_size_bytes=1 << 20), load_model_config(folder)
    facts = state_layout(config, "float32").description, numerics(torch.float32)
    digest = bytes.fromhex(engine.weights_digest)
    assert engine.fingerprint == model_fingerprint(config.architecture(), digest, "float32", *facts).hex()
    engine.close()


def test_stored_tensors_stay(tmp_path: Path) -> None:
    """Catches snapshots under other names, shapes or dtypes: every store of these models would be refused."""
    values, _ = ROWS["jamba"].fingerprint
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "jamba", "vocab_size": 97, **values}))
    config = load_model_config(tmp_path)
    assert state_layout(config, "bfloat16").stored() == {
        "ssm": TensorLayout("F32", (3, 8, 80)),
        "conv": TensorLayout("BF16", (3, 3, 80)),
        "kv": TensorLayout("BF16", (1, 2, None, 2, 10)),
    }
    assert state_layout(config, "float32").stored()["kv"] == TensorLayout("F32", (1, 2, None, 2, 10))
    assert state_layout(load_model_config(locate_model("demo")), "bfloat16").stored() == {
        "ssm": TensorLayout("F32", (4, 16, 512)),
        "conv": TensorLayout("BF16", (4, 3, 512)),
    }


def test_the_page_has_the_table_of_the_code() -> None:
    """Fault: a family, a form of a device or the size of a state changes, and docs/models.md has the old one (run
    python -m tools.models_table)."""
    page = models_table.TARGET.read_text(encoding="utf-8")
    assert models_table.BEGIN in page and models_table.document(page) == page
    assert set(models_table.RELEASED) == {family.model_type for family in families.families()}


def test_the_table_says_what_a_device_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: the page says of each device that it runs each family, also without a kernel for it."""
    kinds = {kind: form for kind, form in CudaBackend.kinds.items() if kind != "delta"}
    monkeypatch.setattr(CudaBackend, "kinds", kinds)
    rows = [row for row in models_table.lines() if "gated delta nets" in row]
    assert len(rows) == 3 and all("| yes | yes; op by op: gated delta nets |" in row for row in rows)


def test_every_module_of_the_folder_is_a_family() -> None:
    """Catches a family that is not found, one under another's name, one that the tests leave out, and lists in another
    order."""
    names = [name for family in families.families() for name in family.architectures]
    assert names == ARCHITECTURES
    files = {path.stem for path in Path(families.__file__).parent.glob("*.py")} - {"__init__"}
    assert {family.model_type for family in families.families()} == files == set(ROWS) == set(FAMILIES)


@table("family", FAMILIES)
def test_every_device_has_every_kind(family: str, tiny_checkpoint: Callable[..., Path]) -> None:
    """Fault: a kind of sub-block that one device lacks, so that it runs op by op, or not at all."""
    config = load_model_config(tiny_checkpoint(family))
    kinds = {kind.name for kind in families.family_of(config).kinds(config)}
    assert kinds <= set(CpuBackend.kinds) and kinds <= set(CudaBackend.kinds)
    assert set(CpuBackend.kinds) == set(CudaBackend.kinds)


@pytest.fixture
def pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A family whose file lies in the folder, as far as the registry can see."""
    (tmp_path / "families").mkdir()
    (tmp_path / "families" / "pretend.py").write_text(PRETEND)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path / "families")])
    families.families.cache_clear()
    yield
    families.families.cache_clear()
    sys.modules.pop("apcbatch.model.families.pretend", None)


@pytest.mark.usefixtures("pretend")
@pytest.mark.parametrize("tied", [True, False])
def test_a_family_is_added_by_one_file(tied: bool, tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Catches a name or a kind of layer that is written anywhere but in the family's file, and a list of the supported
    architectures beside the families themselves."""
    mamba = tiny_checkpoint("mamba", tie_word_embeddings=tied)
    changes = {"model_type": "pretend", "architectures": ["PretendForCausalLM"]}
    folder = with_config(mamba, tmp_path / "model", **changes)
    tensors = {}
    for name, tensor in weights_of(mamba).items():
        for theirs, ours in PRETEND_NAMES.items():
            name = name.replace(theirs, ours)
        tensors[name] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    answers, prints = [], []
    for model in (mamba, folder):
        engine = Engine(model, pool_size_bytes=1 << 20, block_size=16)
        requests = [Request(str(i), [5, 6, 7] * 20, max_tokens=8, ignore_eos=True, logprobs=True) for i in range(2)]
        results = [result for request in requests for result in engine.run([request])]
        answers.append([(result.token_ids, result.logprobs, result.cached_tokens) for result in results])
        prints.append(engine.fingerprint)
        engine.close()
    assert answers[0] == answers[1] and answers[0][1][2] == 48
    assert prints[0] != prints[1], "another family shares no snapshot"
    unknown = with_config(mamba, tmp_path / "unknown", architectures=["Llama"])
    with pytest.raises(ModelError, match=f"one of {', '.join(ARCHITECTURES)}, PretendForCausalLM "):
        load_model_config(unknown)
