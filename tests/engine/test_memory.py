"""The memory of an engine, planned before anything is allocated."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from apcbatch import Engine
from apcbatch.cli.program import main
from apcbatch.config import Config
from apcbatch.engine.checkpoint_sizes import CheckpointSizes, checkpoint_sizes, weights_in
from apcbatch.engine.memory import MemoryPlan, Use
from apcbatch.errors import UsageError
from apcbatch.layout import KV, SSM, StateLayout
from apcbatch.model import devices
from apcbatch.model.families import load_model_config
from apcbatch.model.hf_config import ModelConfig
from apcbatch.model.weight_files import WeightFiles
from tests.effort import table
from tests.engine.opened import OpenedEngine
from tests.model.quantized import quantised
from tests.tiny import FAMILIES

MiB, GiB = 1 << 20, 1 << 30
LAYOUT = StateLayout.of([SSM.part(0, (1, 10 * MiB // 4), "float32"), KV.part(1, (2, None, 1, 512), "float32")])
SIZES = CheckpointSizes(
    num_weights=GiB, num_kept=0, kept_bytes=0, num_decoded=0, num_in_block=MiB, num_in_embedding=2 * MiB, width=4096,
    tokenizer_bytes=MiB, adapter_bytes=0,
)  # fmt: skip
PLAN = MemoryPlan(
    layout=LAYOUT, dtype="float32", sizes=SIZES, vocab_size=1 << 15, hidden_size=1024, gpus=1, max_running=32,
    max_batch_tokens=1 << 12, pool_bytes=4 * GiB, keeps=True, has_store=True, drafts=True, draft_bytes=64 * MiB,
    on_host=True,
)  # fmt: skip
# 4 x (4,096 tokens + 96 rows) x (4,096 + 3 x 1,024) columns, and 4 x 7 x 96 rows x 32,768 logits: less than the 16th
# part of the weights and twice the largest sub-block, which loading takes
LOADING = 4 * (2 * MiB + GiB // 16)


def sizes_in(folder: Path, config: ModelConfig) -> CheckpointSizes | None:
    return checkpoint_sizes(folder, config, "auto", "cpu", "float32", weights_in(folder, config))


def test_the_parts_are_those_of_the_layout() -> None:
    """Fault: running states, the KV that is held besides the pool's or that waits for the store, what loading or a pass
    takes are not counted, or are in a run that has none."""
    assert PLAN.parts == {
        "weights": 4 * GiB, "32 running states": 320 * MiB, "snapshots": 4 * GiB, "KV of running requests": 4 * GiB,
        "KV waiting for the store": 320 * MiB, "drafts": 66 * MiB, "working memory": LOADING,
        "Python, torch and the tokenizer": 328 * MiB,
    }  # fmt: skip
    one_pass = 4 * ((1 << 16) + 96) * (4096 + 3 * 1024) + 4 * 96 * (1 << 15)
    assert replace(PLAN, max_batch_tokens=1 << 16).parts["working memory"] == one_pass > LOADING
    assert "KV waiting for the store" not in replace(PLAN, has_store=False).parts
    none = replace(PLAN, keeps=False).parts
    assert "snapshots" not in none and "KV waiting for the store" not in none and "KV of running requests" in none
    recurrent = replace(PLAN, layout=LAYOUT.among(range(1)), pool_bytes=25 * MiB).parts
    assert recurrent["snapshots"] == 20 * MiB and not [name for name in recurrent if name.startswith("KV")]
    assert "drafts" not in replace(PLAN, drafts=False).parts
    beside = replace(PLAN, dtype="bfloat16", sizes=replace(SIZES, adapter_bytes=9 * MiB))  # bfloat16 only once packed
    read = 4 * (MiB + GiB // 16)
    assert beside.parts["working memory"] == read + 2 * MiB + 9 * MiB
    assert replace(beside, on_host=False).parts["working memory"] == read + 2 * MiB
    absent = replace(PLAN, sizes=None).parts
    assert "weights" not in absent and absent["Python, torch and the tokenizer"] == 300 * MiB


def test_a_device_holds_its_arena_from_the_beginning() -> None:
    """Fault: the plan counts twice the pool's size where slots and pages take three times; drafted states, passes or
    graphs are not counted, or counted once for several devices."""
    device = replace(PLAN, on_host=False, pool_bytes=400 * MiB)
    assert device.parts == {
        "weights": 4 * GiB, "32 running states": 320 * MiB, "states of drafts": 640 * MiB, "snapshots": 400 * MiB,
        "KV of snapshots and running requests": 2 * 400 * MiB + LAYOUT.page_bytes, "working memory": LOADING,
        "kernels and graphs": 256 * MiB,
    }  # fmt: skip
    assert device.used(Use(1, 0, 0, 1, 1, 1)) == device.parts
    two = replace(device, gpus=2, vocab_size=1 << 14).parts
    assert two["64 running states"] == 640 * MiB and two["kernels and graphs"] == 512 * MiB
    assert two["working memory"] == 2 * LOADING
    assert "snapshots" not in replace(device, keeps=False).parts
    assert "states of drafts" not in replace(device, drafts=False).parts
    for pool_bytes, states in ((400 * MiB, 64), (4 * GiB, 102), (64 * GiB, 512)):  # a quarter of the pool
        assert replace(device, max_running=256, pool_bytes=pool_bytes).num_draft_states == states


def test_what_an_input_takes_is_the_sum_of_its_causes() -> None:
    """Fault: a part is bounded by what there may be, not by what there is, or exceeds what may be."""
    use = Use(
        requests=3, snapshot_bytes=50 * MiB, kv_bytes=7 * MiB, pass_tokens=100, window_tokens=MiB, input_tokens=MiB
    )
    program = (248 + 17) * MiB
    assert PLAN.used(use) == {
        "weights": 4 * GiB, "live states": 30 * MiB, "planned snapshots": 50 * MiB, "KV": 7 * MiB,
        "prompts": 20 * MiB, "drafts": 44 * MiB, "working memory": LOADING, "Python, torch and the tokenizer": program,
    }  # fmt: skip
    plan = replace(PLAN, pool_bytes=20 * MiB, max_running=2, draft_bytes=MiB)
    used = plan.used(use)
    assert (used["live states"], used["planned snapshots"], used["drafts"]) == (20 * MiB, 20 * MiB, MiB)
    told = PLAN.needs(16 * GiB, use)
    assert told.startswith(
        f"about {sum(PLAN.used(use).values()) / GiB:.2f} GiB (weights 4.00 GiB, live states 0.03 GiB"
    )
    assert (
        f"), at most {(PLAN.total + 20 * MiB) / GiB:.2f} of 16.00 GiB at --max-running 32 (weights 4.00 GiB, 32 running"
        in told
    )
    assert "about" not in PLAN.needs(GiB) and "about" not in replace(PLAN, on_host=False).needs(GiB, use)
    assert "without the weights, which are not here (" in replace(PLAN, sizes=None).needs(GiB)


@table("changes, limit, remedy", [
    ({}, 11 * GiB, "--pool-size 2GiB"), ({"dtype": "bfloat16", "max_running": 99}, 8 * GiB, "--pool-size 2GiB"),
    ({}, 12 * GiB, "--dtype bfloat16 or --pool-size 2GiB"), ({"dtype": "bfloat16"}, 6 * GiB, "--pool-size 1GiB"),
    ({"max_running": 999}, 20 * GiB, "--pool-size 2GiB or --max-running 499"),
    ({}, 4 * GiB, "a smaller --max-running and --pool-size and --dtype bfloat16"),
    ({"dtype": "bfloat16"}, 2 * GiB, "a smaller --max-running and --pool-size"),
    ({"on_host": False}, 10 * GiB, "--gpus 2 or --pool-size 1GiB"),
    ({"on_host": False, "gpus": 2}, 14 * GiB, "--gpus 3 or --pool-size 2GiB"),
])  # fmt: skip
def test_what_does_not_fit_names_what_alone_would_make_it_fit(
    changes: dict[str, object], limit: int, remedy: str
) -> None:
    """Fault: a run is killed hours later, or the option that the sentence proposes does not help."""
    plan = replace(PLAN, **changes)  # type: ignore[arg-type]
    plan.check(plan.total, "the machine has")
    with pytest.raises(UsageError) as refused:
        plan.check(limit, "the machine has", 1 if plan.on_host else 3)
    sentence = str(refused.value)
    assert sentence.endswith(f"; give {remedy}") and f"the machine has {limit / GiB:.2f} GiB: weights" in sentence
    assert sentence.startswith(f"the run may take at most {plan.total / GiB:.2f} GiB, and ")
    assert not plan.on_host or plan.needs(limit).endswith(f"; `run` would refuse that: give {remedy}")
    for pool in re.findall(r"--pool-size (\d+)GiB", remedy):
        replace(plan, pool_bytes=int(pool) * GiB).check(limit, "")
    for gpus in map(int, re.findall(r"--gpus (\d)", remedy)):
        replace(plan, gpus=gpus).check(limit // plan.gpus * gpus, "")
    for running in map(int, re.findall(r"--max-running (\d+)", remedy)):
        replace(plan, max_running=running).check(limit, "")


@table("which, weights, remedies", [
    ("float channel", "auto", ["--weights encoded"]), ("pack int4", "decoded", ["--weights encoded"]),
    ("pack int4", "auto", []), ("nvfp4", "decoded", []), ("float channel", "adapter", []),
    ("", "auto", [f"MODEL as a copy that `apcbatch convert --to int{bits}` makes" for bits in (8, 4)]),
])  # fmt: skip
def test_weights_that_do_not_fit_name_how_they_take_less(
    which: str, weights: str, remedies: list[str], tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Fault: a quantised model is said not to fit where `--weights encoded` would make it, or that is proposed where it
    changes nothing: the weights are encoded already, no product reads the format, or an adapter is merged."""
    folder = tiny_checkpoint("jamba", hidden_size=128, intermediate_size=128)
    folder = quantised(folder, tmp_path, which)[0] if which else folder
    model = load_model_config(folder)
    save_file({}, tmp_path / "adapter_model.safetensors")
    given = {"adapter": str(tmp_path)} if weights == "adapter" else {"weights": weights}
    config = Config(dtype="bfloat16", policy="none", max_running=1, pool_size=0, **given)  # type: ignore[arg-type]
    plan = MemoryPlan.of(config, LAYOUT, model, folder, "cpu")
    with pytest.raises(UsageError) as refused:
        plan.check(plan.total - 1, "the machine has")
    found = re.search(
        r" or (\D.*|--weights encoded) \(weights [0-9.]+ GiB\)$", str(refused.value).replace("give", "or")
    )
    assert (found and found[1]) == (remedies[0] if remedies else None), str(refused.value)
    for sizes in (plan.smaller()[remedy] for remedy in remedies):
        replace(plan, sizes=sizes).check(plan.total - 1, "")


def test_an_arena_has_the_sizes_of_the_plan(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: the sizes that are checked and those that a device allocates are two computations, and differ."""
    plans: list[MemoryPlan] = []
    monkeypatch.setattr("apcbatch.engine.parts.writes_draft_states", lambda device: True)
    monkeypatch.setattr(MemoryPlan, "check", lambda plan, *limit: plans.append(plan))
    for policy in ("planned", "none"):
        engine = OpenedEngine(
            tiny_checkpoint("jamba"), pool_size_bytes=8 * MiB, max_running=3, policy=policy, device="cpu"
        )
        arena, parts = engine.parts.arena, plans.pop().parts
        held = sum(part.nbytes for part in (*arena.slots.values(), *arena.pages.values()))  # type: ignore[union-attr]
        assert held == sum(size for name, size in parts.items() if re.search("states|snapshots", name))
        engine.close()


def test_free_memory_is_counted_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: what another process holds on a card, or a fuller card among several, is taken to be free; what torch
    keeps of a closed engine is not."""
    free = {torch.device("cuda", 0): (50, 80), torch.device("cuda", 1): (30, 80)}
    monkeypatch.setattr(torch.cuda, "mem_get_info", free.get)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 7)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    first, second = free
    assert devices.memory_of([first]) == (55, "the device has free", 4)
    assert devices.memory_of([first, second]) == (70, "the 2 devices have free", 4)


@pytest.mark.slow
def test_a_run_stays_below_the_most_that_it_may_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a part is not counted, so that a run with a small pool exceeds its plan."""
    line = {"messages": [{"role": "user", "content": "Tell me about the tides. " * 100}]}
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"id": str(n)} | line) + "\n" for n in range(8)))
    common = ["in.jsonl", "--model", "demo-jamba", "--device", "cpu", "--pool-size", "8MiB"]
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *common, "--json", "plan.json"]) == 0
    run = ["-m", "apcbatch", "run", *common, "-o", "out.jsonl", "--max-tokens", "8", "--summary", "summary.json", "-q"]
    subprocess.run([sys.executable, *run], check=True, capture_output=True)
    memory = json.loads((tmp_path / "plan.json").read_text())["memory"]
    assert json.loads((tmp_path / "summary.json").read_text())["peak_rss_bytes"] <= memory["at_most_bytes"]


@table("family", sorted(FAMILIES))
def test_weights_are_counted_by_their_headers(
    family: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Fault: a tied head or an ignored part counts, a shard is left out, or a folder without weights ends a plan."""
    folder = tiny_checkpoint(family)
    config = load_model_config(folder)
    tensors = load_file(folder / "model.safetensors")
    total = sum(tensor.numel() for tensor in tensors.values())
    found = sizes_in(folder, config)
    assert found is not None and found.num_weights == total
    assert found.tokenizer_bytes == sum(path.stat().st_size for path in folder.glob("tokenizer.json"))
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    assert sizes_in(tmp_path, config) is None
    names = sorted(tensors)
    cut = random.randrange(1, len(names))
    where = {name: f"model-{1 + (i >= cut)}.safetensors" for i, name in enumerate(names)}
    extra = torch.ones(3, 5)
    if config.tie_word_embeddings:
        where["lm_head.weight"], tensors["lm_head.weight"] = "model-1.safetensors", extra
    where["position_ids"], tensors["position_ids"] = "model-2.safetensors", torch.ones(7, dtype=torch.int64)
    for file in set(where.values()):
        save_file({name: tensors[name] for name in where if where[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    split = sizes_in(tmp_path, config)
    assert split == replace(found, tokenizer_bytes=0)
    (tmp_path / "model-2.safetensors").write_bytes(b"{}")
    assert sizes_in(tmp_path, config) is None


def test_the_widest_sub_block_is_counted(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Fault: an input is counted with each matrix that reads it, each expert of a mixture and not those of a token, or
    the taps of a convolution as columns."""
    config = load_model_config(tiny_checkpoint("jamba", num_experts_per_tok=2))
    shapes = {"model.embed_tokens.weight": (70, 3), "model.layers.0.norm.weight": (3,)}
    mixer = {"in_proj.weight": (8, 3), "out_proj.weight": (3, 4), "conv1d.weight": (6, 1, 2), "gate.weight": (5, 3)}
    shapes |= {f"model.layers.0.mamba.{name}": shape for name, shape in mixer.items()}
    for expert in range(3):
        shapes[f"model.layers.1.feed_forward.experts.{expert}.up_proj.weight"] = (9, 3)
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    sizes = sizes_in(tmp_path, config)
    assert sizes == CheckpointSizes(
        num_weights=210 + 3 + 24 + 12 + 12 + 15 + 81, num_kept=0, kept_bytes=0, num_decoded=0, num_in_block=81,
        num_in_embedding=210, width=8 + 3 + 6 + 5 + (3 + 4 + 2), tokenizer_bytes=0, adapter_bytes=0,
    )  # fmt: skip
    experts = "model.layers.0.feed_forward.experts"
    for tensors in (
        {f"{experts}.up": torch.zeros(3, 9, 4)},
        {f"{experts}.{expert}.up.weight": torch.zeros(9, 4) for expert in range(3)},
    ):
        save_file(tensors, tmp_path / "model.safetensors")
        alone = sizes_in(tmp_path, config)
        assert alone is not None and alone.width == 2 * 9 + 4, list(tensors)


def test_a_run_that_may_exceed_the_memory_is_refused_before_weights_are_read(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: the refusal comes after minutes of loading, or one that fits is refused."""
    folder, read = tiny_checkpoint("jamba"), list[bool]()
    monkeypatch.setattr("apcbatch.engine.parts.load_model", lambda *of, **by_name: read.append(True))
    monkeypatch.setattr("apcbatch.model.devices.find_memory", lambda: GiB)
    with pytest.raises(UsageError, match=r"may use 1.00 GiB: snapshots .*; give --pool-size 256MiB$"):
        Engine(folder, pool_size_bytes=GiB, max_running=3)
    assert not read


def test_a_pool_without_room_is_said() -> None:
    """Fault: `--pool-size 1MB` turns all reuse off without a word, or 0 makes each request an error record."""
    slot, page = LAYOUT.slot_bytes, LAYOUT.page_bytes
    told: list[str] = []
    with pytest.raises(
        UsageError, match=f"--pool-size {page - 1} has no room for a request: the KV of up to 64 tokens"
    ):
        replace(PLAN, pool_bytes=page - 1).check_pool(told.append)
    for pool, changes, is_told in (
        (page, {}, True),
        (page, {"keeps": False}, False),
        (slot + page - 1, {}, True),
        (slot + page, {}, False),
        (0, {"layout": LAYOUT.among(range(1))}, True),
        (0, {"layout": LAYOUT.among(range(1)), "keeps": False}, False),
    ):
        told.clear()
        replace(PLAN, pool_bytes=pool, **changes).check_pool(told.append)
        assert len(told) == is_told and all("has no room for a snapshot, which takes" in one for one in told)


def test_the_plan_of_a_configuration_has_its_options(tiny_checkpoint: Callable[..., Path]) -> None:
    """Fault: `plan` and `doctor` tell of another run than that of the options."""
    config = Config(max_running=5, gpus=2, pool_size=7, policy="none", draft="none", store="s", dtype="bfloat16")
    folder = tiny_checkpoint("jamba")
    model = load_model_config(folder)
    plan = MemoryPlan.of(config, LAYOUT, model, folder, "cuda")
    assert (plan.num_live, plan.pool_bytes, plan.keeps, plan.drafts, plan.has_store) == (10, 7, False, False, True)
    plan = MemoryPlan.of(Config(draft_memory=9, max_batch_tokens=8), LAYOUT, model, folder, "cpu")
    assert (plan.drafts, plan.draft_bytes, plan.max_batch_tokens, plan.vocab_size) == (True, 9, 8, model.vocab_size)
    assert (plan.sizes, plan.on_host) == (sizes_in(folder, model), True)


def test_weights_that_are_not_there_are_looked_for_once(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: each of the sizes reads the headers of a damaged checkpoint again."""
    model, opened = load_model_config(tiny_checkpoint("jamba")), list[Path]()
    watched = "apcbatch.engine.checkpoint_sizes.WeightFiles"
    monkeypatch.setattr(watched, lambda folder: opened.append(folder) or WeightFiles(folder))
    plan = MemoryPlan.of(Config(), LAYOUT, model, tmp_path, "cpu")
    assert (plan.sizes, plan.smaller(), opened) == (None, {}, [tmp_path])
