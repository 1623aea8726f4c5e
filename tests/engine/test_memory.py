"""The memory of an engine, planned before anything is allocated."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from apcbatch import Engine
from apcbatch.config import Config
from apcbatch.engine.memory import MemoryPlan, num_weights
from apcbatch.errors import UsageError
from apcbatch.layout import KV, SSM, StateLayout
from apcbatch.model.families import load_model_config
from tests.effort import table
from tests.tiny import FAMILIES

MiB, GiB = 1 << 20, 1 << 30
LAYOUT = StateLayout.of([SSM.part(0, (1, 10 * MiB // 4), "float32"), KV.part(1, (2, None, 1, 512), "float32")])
PLAN = MemoryPlan(
    layout=LAYOUT, dtype="float32", num_weights=GiB, num_live=32, pool_bytes=4 * GiB, keeps=True, has_store=True,
    draft_bytes=64 * MiB,
)  # fmt: skip


def test_the_parts_are_those_of_the_layout() -> None:
    """Fault: running states, the KV that is held besides the pool's or that waits for the store are not counted, or are
    in a run that has none."""
    assert PLAN.parts == {
        "weights": 4 * GiB, "32 running states": 320 * MiB, "snapshots": 4 * GiB, "KV of running requests": 4 * GiB,
        "KV waiting for the store": 320 * MiB, "drafts": 64 * MiB, "Python and torch": 300 * MiB,
    }  # fmt: skip
    assert "KV waiting for the store" not in replace(PLAN, has_store=False).parts
    none = replace(PLAN, keeps=False).parts
    assert "snapshots" not in none and "KV waiting for the store" not in none and "KV of running requests" in none
    recurrent = replace(PLAN, layout=LAYOUT.among(range(1)), pool_bytes=25 * MiB).parts
    assert recurrent["snapshots"] == 20 * MiB and not [name for name in recurrent if name.startswith("KV")]
    device = replace(PLAN, on_host=False, draft_states=3).parts
    assert list(device) == [*list(PLAN.parts)[:2], "states of drafts", *list(PLAN.parts)[2:4]]
    assert device["states of drafts"] == 30 * MiB


@table(
    "changes, limit, remedy",
    [
        ({}, 11 * GiB, "--dtype bfloat16 or --pool-size 2GiB"),
        ({"num_weights": 3 * GiB, "pool_bytes": 64 * MiB}, 8 * GiB, "--dtype bfloat16"),
        ({}, 12 * GiB, "--dtype bfloat16 or --pool-size 2GiB"),
        ({"dtype": "bfloat16"}, 6 * GiB, "--pool-size 1GiB"),
        ({"num_live": 999}, 20 * GiB, "--pool-size 2GiB or --max-running 499"),
        ({}, 4 * GiB, "a smaller --max-running and --pool-size and --dtype bfloat16"),
        ({"dtype": "bfloat16"}, 2 * GiB, "a smaller --max-running and --pool-size"),
    ],
)
def test_what_does_not_fit_names_what_alone_would_make_it_fit(
    changes: dict[str, object], limit: int, remedy: str
) -> None:
    """Fault: a run is killed hours later, or the option that the sentence proposes does not help."""
    plan = replace(PLAN, **changes)  # type: ignore[arg-type]
    plan.check(plan.total, "the machine has")
    with pytest.raises(UsageError) as refused:
        plan.check(limit, "the machine has")
    sentence = str(refused.value)
    assert sentence.endswith(f"; give {remedy}") and f"the machine has {limit / GiB:.2f} GiB: weights" in sentence
    if "999" in str(changes):
        replace(plan, num_live=499).check(limit, "")
    for pool in re.findall(r"--pool-size (\d+)GiB", remedy):
        replace(plan, pool_bytes=int(pool) * GiB).check(limit, "")


@table("family", sorted(FAMILIES))
def test_weights_are_counted_by_their_headers(
    family: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Fault: a tied head or an ignored part counts, a shard is left out, or a folder without weights ends a plan."""
    folder = tiny_checkpoint(family)
    config = load_model_config(folder)
    tensors = load_file(folder / "model.safetensors")
    total = sum(tensor.numel() for tensor in tensors.values())
    assert num_weights(folder, config) == total
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    assert num_weights(tmp_path, config) is None
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
    assert num_weights(tmp_path, config) == total
    (tmp_path / "model-2.safetensors").write_bytes(b"{}")
    assert num_weights(tmp_path, config) is None


def test_a_run_that_may_exceed_the_memory_is_refused_before_weights_are_read(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: the refusal comes after minutes of loading, or one that fits is refused."""
    folder, read = tiny_checkpoint("jamba"), list[bool]()
    monkeypatch.setattr("apcbatch.engine.open.load_model", lambda *of, **by_name: read.append(True))
    monkeypatch.setattr("apcbatch.model.devices.find_memory", lambda: GiB)
    with pytest.raises(UsageError, match=r"may use 1.00 GiB: weights .*; give --pool-size 256MiB$"):
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


def test_the_plan_of_a_configuration_has_its_options() -> None:
    """Fault: `plan` and `doctor` tell of another run than that of the options."""
    config = Config(max_running=5, gpus=2, pool_size=7, policy="none", draft="none", store="s", dtype="bfloat16")
    plan = MemoryPlan.of(config, LAYOUT, None)
    assert (plan.num_live, plan.pool_bytes, plan.keeps, plan.draft_bytes, plan.has_store) == (10, 7, False, 0, True)
    assert "without the weights, which are not here" in plan.needs(5, GiB)
    assert MemoryPlan.of(Config(draft_memory=9), LAYOUT, 3).draft_bytes == 9
