"""The bench document on a tiny model: its keys and what must hold of any numbers; nothing about time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from apcbatch import _C, Engine, Request
from apcbatch.bench import GROUPS
from apcbatch.bench.document import measure
from apcbatch.bench.drafted_passes import PASSES, WARM_UP, FixedDrafts, _passes, install
from apcbatch.bench.figures import Sizes, median_ratio
from apcbatch.bench.parts import OP_PARTS, REST, Parts
from apcbatch.bench.products import Products
from apcbatch.bench.server import serving
from apcbatch.cli.program import main
from apcbatch.config import Config
from apcbatch.engine.drafting import MOST_DRAFTED
from apcbatch.errors import UsageError
from apcbatch.kernels.cpu.backend import CpuBackend
from apcbatch.kernels.ops import OPS
from tests.effort import table

TINY = Sizes(
    prefill_tokens=(8, 24),
    decode_running=(1, 3),
    draft_running=(1, 3),
    draft_rows=(1, 3, 6),
    new_tokens=2,
    kernel_tokens=64,
    product_rows=(1, 3),
    long_tokens=24,
    suffixes=2,
    suffix_tokens=4,
    prefix_tokens=8,
    snapshot_every=8,
    restored_tokens=8,
    repeats=2,
)


# At least, of a pass of 2 and of 4 layers.
PRODUCTS = {
    "mamba": 2 * 4 + 1,
    "jamba": 3 * 4 + 2 + 4 * 2 + 1,
    "mamba2": 2 * 2 + 1,
    "granitemoehybrid": 4 * 2 + 4 * (1 + 2 + 2) + 1,
    "bamba": 3 * 2 + 2 + 4 * 2 + 1,
    "falcon_h1": 3 * (2 + 2 + 2) + 1,
    "nemotron_h": 3 * 2 + 2 + (1 + 2 + 2) + 1,
    "lfm2": 3 * 2 + 2 + 4 * 2 + 1,
    "lfm2_moe": 3 * 2 + 2 + 2 + 3 * (1 + 2 * 2) + 1,
    "qwen3_5": 3 * 2 + 2 + 4 * 2 + 1,
    "qwen3_5_moe": 3 * 2 + 2 + 4 * (1 + 2 * 2 + 3) + 1,
    "qwen3_next": 3 * 2 + 2 + 4 * (1 + 2 * 2 + 3) + 1,
}


@pytest.mark.drawn(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("mamba", "float32"),
        ("jamba", "bfloat16"),
        ("mamba2", "bfloat16"),
        ("granitemoehybrid", "bfloat16"),
        ("bamba", "bfloat16"),
        ("falcon_h1", "float32"),
        ("nemotron_h", "bfloat16"),
        ("qwen3_5", "float32"),
        ("qwen3_5_moe", "bfloat16"),
        ("qwen3_next", "float32"),
        ("lfm2", "bfloat16"),
        ("lfm2_moe", "float32"),
    ],
)
def test_document(tiny_checkpoint, family: str, dtype: str) -> None:
    """Faults: a group that falls over on a family or dtype; a figure without its keys; a part of a pass lost."""
    noted: list[str] = []
    config = Config(model=str(tiny_checkpoint(family)), dtype=dtype)
    document = json.loads(json.dumps(measure(config, noted.append, sizes=TINY)))
    assert list(document) == ["version", "model", "dtype", "machine", "limits", "figures"]
    assert len(noted) == len(document["figures"])
    assert all({"group", "name", "value", "unit"} <= set(figure) for figure in document["figures"])
    names = [figure["name"] for figure in document["figures"]]
    assert len(set(names)) == len(names)
    assert {"prefill of 24", "decode, 3 running", "restore of 8 tokens from the page cache"} <= set(names)
    with_experts = ("jamba", "granitemoehybrid", "nemotron_h", "qwen3_5_moe", "qwen3_next", "lfm2_moe")
    assert ("routing to experts" in names) == (family in with_experts)
    assert ("Mamba-2 scan of 64 tokens" in names) == (
        family in ("mamba2", "granitemoehybrid", "bamba", "falcon_h1", "nemotron_h")
    )
    assert ("delta rule of one token, 3 running" in names) == family.startswith("qwen3")
    passes = {(f["running"], f["rows"]) for f in document["figures"] if f["group"] == "rows"}
    assert passes == {(1, 1), (1, 3), (1, 6), (3, 3), (3, 6)}
    [prefill] = [f for f in document["figures"] if f["name"] == "parts of a prefill of 24"]
    expected = {"matrix products", "convolution", "norms", REST} | (set() if family.startswith("lfm2") else {"scan"})
    assert expected <= set(prefill["parts"])
    assert sum(prefill["parts"].values()) == pytest.approx(1.0)
    [share] = [f for f in document["figures"] if f["name"].startswith("matrix products alone")]
    assert share["products"] >= PRODUCTS[family]
    [restore] = [f for f in document["figures"] if "page cache" in f["name"]]
    assert restore["snapshots_read"] == 4  # every stored prompt was restored, none computed again


def test_nothing_is_drafted_but_what_is_measured(tiny_checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults: a rate of decode in which random models repeat themselves and drafts come true; a pass that verifies
    other rows than its figure says, or whose figure has a prefill in it."""
    opened: list[Any] = []
    monkeypatch.setattr(
        "apcbatch.bench.server.Engine", lambda *given, **named: opened.append(named) or Engine(*given, **named)
    )
    config = Config(model=str(tiny_checkpoint("mamba")))
    with serving(config, "none", max_running=4) as plain:
        assert plain.serve(plain.prompts(2, 4), 8)["wall"] > 0
        assert plain.engine.counters.drafts == {} and opened[-1]["draft"] == ()
    with serving(config, "none", max_running=4, draft=("lookup",)) as server:
        drafts = FixedDrafts(server.engine.vocab_size)
        install(server.engine._drafting, drafts)
        for running, rows in ((1, 1), (1, 5), (3, 3), (3, 12), (4, 4 * MOST_DRAFTED)):
            drafts.count = rows // running - 1
            before = server.engine.counters.copy()
            seconds, verified = _passes(server, running, rows)
            done = server.engine.counters
            assert len(seconds) == PASSES and all(one > 0 for one in seconds)
            capacity = 64  # of the drafts of a pass
            assert verified == min(rows - running, capacity)
            assert done.decode_chunks - before.decode_chunks == (WARM_UP + PASSES) * running
            assert server.engine.num_unfinished == 0


def test_every_op_has_a_part() -> None:
    """Fault: an op that is renamed or new leaves the breakdown, and its time is called python's."""
    assert set(OP_PARTS) == set(OPS)


ATTENTION_OPS = {"paged_attention", "write_kv"}
KERNELS = {
    "mamba": {"MambaMixer"},
    "jamba": {"MambaMixer", "Mlp", "Mixture", *ATTENTION_OPS},
    "mamba2": {"HeadMixer"},
    "granitemoehybrid": {"HeadMixer", "Mlp", "Mixture", *ATTENTION_OPS},
    "bamba": {"HeadMixer", "Mlp", *ATTENTION_OPS},
    "falcon_h1": {"HeadMixer", "Mlp", *ATTENTION_OPS},
    "nemotron_h": {"HeadMixer", "Mlp", "Mixture", *ATTENTION_OPS},
    "lfm2": {"ShortConv", "Mlp", *ATTENTION_OPS},
    "lfm2_moe": {"ShortConv", "Mlp", "Mixture", *ATTENTION_OPS},
    "qwen3_5": {"HeadMixer", "Mlp", *ATTENTION_OPS},
    "qwen3_5_moe": {"HeadMixer", "Mlp", "Mixture", *ATTENTION_OPS},
    "qwen3_next": {"HeadMixer", "Mlp", "Mixture", *ATTENTION_OPS},
}
# Of the compiled module, what a pass may call outside of any op: the tied embedding, the lists of a batch.
BESIDE_THE_OPS = {"unpack_rows", "span", "check_sequences", "record_parts", "part_seconds"}


@table("family", KERNELS)
def test_no_kernel_runs_beside_the_ops(family: str, tiny_checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a kernel that a pass calls by another way than its backend's ops, whose time is then the interpreter's."""
    engine = Engine(tiny_checkpoint(family), pool_size_bytes=1 << 20)
    under_way: list[str] = []
    beside, within = [], []

    def noted(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            (within if under_way else beside).append(name)
            return kernel(*arguments)

        return call

    def around(name: str, op: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        under_way.append(name)
        try:
            return op(*arguments, **named)
        finally:
            under_way.pop()

    for name, kernel in vars(_C).items():
        if callable(kernel) and not isinstance(kernel, type) and not name.startswith("_"):
            monkeypatch.setattr(_C, name, noted(name, kernel))
    for kind in (_C.MambaMixer, _C.HeadMixer, _C.ShortConv, _C.Mlp, _C.Mixture):
        monkeypatch.setattr(kind, "run", noted(kind.__name__, kind.run))
    request = Request("a", [1, 2, 3, 4, 5], max_tokens=3, ignore_eos=True, logprobs=True)
    with engine.backend.observed(around):
        [result] = engine.run([request])
    assert result.error is None
    assert set(beside) <= BESIDE_THE_OPS
    expected = {"linear", "rms_norm", "logprob", *KERNELS[family]}
    assert expected <= set(within)


def test_parts_are_exclusive_and_restored() -> None:
    """Faults: time counted twice for a call within a call; the timers stay in the engine's path afterwards."""
    ops, x = CpuBackend(), torch.ones(2, 4)
    ops.runs_whole = False  # as on a device, whose passes are made of single ops
    before, parts = (ops.linear, ops.rms_norm), Parts()
    with parts.recording(ops):
        ops.rms_norm(x, None, 1e-5, torch.float32)
        ops.linear(x, ops.pack_linear(torch.ones(3, 4)))
    assert (ops.linear, ops.rms_norm) == before
    assert set(parts.seconds) == {"norms", "matrix products"}
    assert set(parts.of(1e9)) == {"norms", "matrix products", REST}


def test_a_pass_that_is_one_call_stays_one(tiny_checkpoint) -> None:
    """Faults: a measurement that makes the pass another one than users have; a part of it that is called python's, or
    is there twice."""
    engine, parts = Engine(tiny_checkpoint("jamba"), pool_size_bytes=1 << 20), Parts()
    calls, stack = [], engine._model._stack
    engine._model._stack = lambda *arguments: calls.append(None) or stack(*arguments)
    with parts.recording(engine.backend):
        [result] = engine.run([Request("a", [1, 2, 3, 4, 5], max_tokens=4, ignore_eos=True)])
    assert result.error is None and len(calls) == 4
    inside = {"matrix products", "convolution", "scan", "norms", "gated product", "experts", "attention", "embedding"}
    assert inside | {"sampling", "scheduling"} <= set(parts.seconds)
    assert "waiting for threads" not in parts.seconds


def test_products_are_done_again() -> None:
    """Fault: a product that is recorded by reference to its inputs, or not at all."""
    products, ops = Products(), CpuBackend()
    packed, x = ops.pack_linear(torch.ones(3, 4)), torch.ones(2, 8)[:, ::2].contiguous()
    with products.recording(ops):
        ops.linear(x, packed, out_dtype=torch.float32)
        ops.linear(x, packed)
    assert len(products) == 2
    products.again()
    assert len(products) == 2


def test_median_ratio_alternates() -> None:
    """Fault: all of one side, then all of the other, so that a drift of the machine counts for one of them."""
    calls: list[str] = []

    def side(name: str, seconds: float) -> float:
        calls.append(name)
        return seconds

    assert median_ratio(lambda: side("a", 3.0), lambda: side("b", 2.0), 2) == 1.5
    assert calls == ["a", "b", "b", "a"]


def test_run_needs_an_input() -> None:
    """Fault: a group that was asked for is left out in silence."""
    with pytest.raises(UsageError, match="--input"):
        measure(Config(), lambda line: None, groups=["run"])


@pytest.mark.effort(3)
@pytest.mark.slow
def test_whole_runs(tmp_path: Path) -> None:
    """Faults: a run that is called warm and restores nothing; one that answers other requests than the rest."""
    lines = [{"id": str(i), "messages": [{"role": "user", "content": f"{i} " + "word " * 200}]} for i in range(3)]
    input = tmp_path / "in.jsonl"
    input.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = Config(limit=2, max_tokens=2)
    document = measure(config, lambda line: None, groups=["run"], input=str(input))
    figures = {figure["name"]: figure for figure in document["figures"]}
    assert [figure["requests"] for figure in figures.values()] == [2] * 5
    assert len({figure["prompt_tokens"] for figure in figures.values()}) == 1
    for kind in ("disk", "RAM"):
        warm = figures[f"run, warm from {kind}"]
        assert warm["prompt_tokens"] - warm["cached_tokens"] <= 2 * 64


@pytest.mark.parametrize(("words", "groups"), [(["--only", "kernels"], ("kernels",)), ([], GROUPS)])
def test_the_command_measures_what_it_is_asked_for(
    words: list[str], groups: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault: --only changes nothing, or without it nothing is measured."""
    asked: list[Any] = []
    monkeypatch.setattr("apcbatch.bench.document.measure", lambda *given: asked.append(given[2]) or {"figures": []})
    assert main(["bench", *words]) == 0
    assert tuple(asked[0]) == tuple(groups) and json.loads(capsys.readouterr().out) == {"figures": []}
