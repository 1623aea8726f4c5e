"""Numbers that a request, an engine or a checkpoint may hold, however far out: an answer, an error record or a
sentence."""

from __future__ import annotations

import math
import random
import shutil
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from apcbatch import Engine, Request, Result
from apcbatch.engine.counters import Counters
from apcbatch.engine.pool import PagePool
from apcbatch.engine.sequence import Chunk, make_sequence
from apcbatch.errors import ERROR_CODES, RETRYABLE, UsageError
from apcbatch.model.causal_lm import CausalLM
from tests.effort import table, tries
from tests.engine import runs
from tests.engine.opened import OpenedEngine
from tests.tiny import FAMILIES, VOCAB

PROMPT = [1 + i * 7 % 90 for i in range(40)]


def serve(folder: Path, *requests: Request, **options: object) -> dict[str, Result]:
    """The results by id, of an engine of its own."""
    return runs.serve(Engine(folder, **{"pool_size_bytes": 4 << 20, "block_size": 8, **options}), requests)


# One request


def test_a_token_costs_the_same_however_many_come() -> None:
    """Fault: room for tokens that is made anew for each of them, or all at once; a token beyond max_tokens, or beyond
    the context, finds room; the caller's prompt is written to; a list with an entry for each of a billion pages."""
    sequence = make_sequence(Request("r", [1, 2, 3], max_tokens=10**12), VOCAB, None, 10**13)
    rooms = set()
    tracemalloc.start()
    for token in range(20_000):
        sequence.append(token % VOCAB, 0.0)
        rooms.add(len(sequence.tokens))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    pool = PagePool(1 << 31)
    assert [pool.allocate() for _ in range(5)] == [0, 1, 2, 3, 4] and pool.num_free == (1 << 31) - 5
    assert len(rooms) <= 14 and peak < 500_000
    assert sequence.tokens[:5].tolist() == [1, 2, 3, 0, 1] and sequence.num_tokens == 20_003
    prompt = torch.tensor([1, 2, 3], dtype=torch.int32).numpy()
    for most, context, limit in ((4, None, 7), (10**12, 9, 9)):
        sequence = make_sequence(Request("r", prompt, max_tokens=most), VOCAB, context)
        assert sequence.limit == limit
        for token in range(limit - 3):
            sequence.append(token, 0.0)
        assert len(sequence.tokens) == limit
        with pytest.raises(IndexError):
            sequence.append(1, 0.0)
    assert prompt.tolist() == [1, 2, 3]


def test_kv_that_can_never_fit_costs_nobody_else(tiny_checkpoint: Callable[..., Path]) -> None:
    """Fault: for a request whose KV is larger than all pages together, every snapshot of the others was dropped
    before it was refused."""
    folder = tiny_checkpoint("jamba", max_position_embeddings=10**9)
    engine = Engine(folder, pool_size_bytes=1 << 20, block_size=8, max_request_tokens=1 << 30)
    list(engine.run([Request("a", PROMPT, max_tokens=2, ignore_eos=True)]))
    held = engine.boundaries(PROMPT)
    results = {
        result.id: result
        for result in engine.run([Request("huge", PROMPT, max_tokens=10**10), Request("b", PROMPT, max_tokens=2)])
    }
    assert held and engine.boundaries(PROMPT) == held
    assert results["huge"].error and results["huge"].error.code == "out_of_memory"
    assert "1000000000 tokens" in results["huge"].error.message and "--pool-size" in results["huge"].error.message
    assert results["b"].error is None and results["b"].cached_tokens > 0
    (alone,) = engine.run([Request("huge", PROMPT, max_tokens=10**10)])
    assert alone.error is not None and alone.error.code == "out_of_memory"
    engine.close()


# The engine's arguments


@table("name, value", [
    ("block_size", 1 << 62), ("block_size", 0), ("block_size", 2.0), ("max_batch_tokens", 1 << 62),
    ("max_batch_tokens", True), ("max_running", 1 << 62), ("max_running", 0), ("pool_size_bytes", -1),
    ("max_request_tokens", 1 << 62), ("max_request_tokens", 1),
    ("pool_size_bytes", 1 << 80), ("pool_size_bytes", "1"), ("store_size_bytes", -1), ("dtype", "float8"),
    ("policy", "some"),
])  # fmt: skip
def test_an_argument_that_cannot_be_used_is_a_sentence(
    name: str, value: object, tiny_checkpoint: Callable[..., Path]
) -> None:
    """Fault: a MemoryError, a ZeroDivisionError or an endless allocation instead of the name and what is expected."""
    with pytest.raises(UsageError, match=f"{name} is .*; expected (an integer from \\d+ to \\d+|one of)"):
        Engine(tiny_checkpoint("mamba"), **{name: value})


@pytest.mark.parametrize(("family", "sizes"), [("mamba", {"state_size": 256, "num_hidden_layers": 64}), ("jamba", {})])
def test_memory_that_is_not_there_is_a_sentence(
    family: str, sizes: dict[str, int], tiny_checkpoint: Callable[..., Path]
) -> None:
    """Fault: mmap's own OverflowError, or a list of every page, before the memory was checked."""
    with pytest.raises(UsageError, match=r"may take at most [\d.]+ GiB, and .*: .*running states .* snapshots [\d.]+"):
        Engine(tiny_checkpoint(family, **sizes), pool_size_bytes=1 << 60, max_running=1 << 16)


def test_the_hosts_memory_may_run_out(tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: torch's error for the host, which has no type of its own, was told as an internal one."""

    def greedy_for_memory(*_: object, **__: object) -> torch.Tensor:
        return torch.empty(1 << 60, dtype=torch.uint8)

    engine = Engine(tiny_checkpoint("mamba"), pool_size_bytes=1 << 20)
    monkeypatch.setattr(CausalLM, "passed", greedy_for_memory)
    (result,) = engine.run([Request("r", PROMPT)])
    assert result.error is not None and result.error.code == "out_of_memory" and result.error.retryable
    monkeypatch.setattr("apcbatch.model.devices.CausalLM", greedy_for_memory)
    with pytest.raises(UsageError, match="weights do not fit the memory .* smaller --pool-size, or run where"):
        Engine(tiny_checkpoint("mamba"), pool_size_bytes=1 << 20)


# Weights and logits that are not finite


def poisoned(folder: Path, target: Path, name: str, at: int, value: float) -> Path:
    """A copy of a checkpoint with one number replaced."""
    shutil.copytree(folder, target)
    weights = load_file(target / "model.safetensors")
    weights[name].view(-1)[at] = value
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.drawn(2)
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_that_are_not_finite_give_no_answer(
    family: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Fault: an answer out of NaN (token 0, again and again), or one that an infinite weight went into: for a number
    of any tensor, in prefill and decoding alike."""
    folder = tiny_checkpoint(family, num_hidden_layers=2)
    assert "non_finite" in ERROR_CODES and "non_finite" not in RETRYABLE
    values = random.sample([math.nan, math.inf, -math.inf], 3)
    passed_by = (".experts.", "block_sparse_moe.input", "block_sparse_moe.output")  # as their rows and experts may be
    names = [n for n in load_file(folder / "model.safetensors") if not any(part in n for part in passed_by)]
    for turn in range(min(3, tries(10))):
        for number, name in enumerate(names):
            value = values[(number + turn) % 3]
            broken = poisoned(folder, tmp_path / f"{turn} {number}", name, 0, value)
            request = Request("r", [0, *PROMPT], max_tokens=3, logprobs=number % 2 == 0, temperature=number % 3)
            result = serve(broken, request)["r"]
            shutil.rmtree(broken)
            assert result.error is not None and result.error.code == "non_finite", (name, value)
            assert "NaN or infinite" in result.error.message and result.token_ids == []


@pytest.mark.parametrize("policy", ["all", "last"])
def test_only_the_request_that_meets_it_fails(
    policy: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Fault: batch mates of a request that meets a NaN fail with it, or get other bits; its state is kept in memory or
    on disk."""
    folder = tiny_checkpoint("falcon_mamba")  # its head is not tied to the embedding
    bad = 96
    broken = poisoned(folder, tmp_path / "model", "backbone.embeddings.weight", bad * 36 + 5, math.nan)
    prompts = {str(i): [1 + (i * 31 + j * 5) % 90 for j in range(25 + i)] for i in range(6)}
    meets = {"early": [bad, *PROMPT], "late": [*PROMPT, bad], "middle": [*PROMPT[:20], bad, *PROMPT[20:]]}
    requests = [Request(key, prompt, max_tokens=6, ignore_eos=True, logprobs=True) for key, prompt in
                (prompts | meets).items()]  # fmt: skip
    expected = serve(folder, *(request for request in requests if request.id in prompts))
    engine = OpenedEngine(broken, policy=policy, store=tmp_path / "s", pool_size_bytes=4 << 20, block_size=8,
                          max_batch_tokens=24)  # fmt: skip
    results = {result.id: result for result in engine.run(requests)}
    engine.flush()
    for key in prompts:
        assert results[key].error is None
        assert (results[key].token_ids, results[key].logprobs) == (
            expected[key].token_ids, expected[key].logprobs,
        )  # fmt: skip
    for key, prompt in meets.items():
        assert results[key].error is not None and results[key].error.code == "non_finite"
        assert all(position <= prompt.index(bad) for position in engine.boundaries(prompt)), key
    assert not engine.num_unfinished and engine.parts.pool.num_reserved == 0
    engine.close()


def test_an_answer_that_becomes_infinite_ends_there(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Fault: the tokens before the NaN are given as the answer, or the ones after it."""
    folder = tiny_checkpoint("falcon_mamba")
    whole = serve(folder, Request("r", PROMPT, max_tokens=20, ignore_eos=True))["r"].token_ids
    met = next(token for token in whole if token not in PROMPT)
    broken = poisoned(folder, tmp_path / "model", "backbone.embeddings.weight", met * 36, math.inf)
    last = serve(broken, Request("r", PROMPT, max_tokens=whole.index(met) + 1, ignore_eos=True))["r"]
    assert last.error is None and last.token_ids == whole[: whole.index(met) + 1]  # it was chosen, never read
    result = serve(broken, Request("r", PROMPT, max_tokens=20, ignore_eos=True))["r"]
    assert result.error is not None and result.error.code == "non_finite"


@table("row", [
    [0.0, math.nan, 1.0], [0.0, math.inf, 1.0], [0.0, -math.inf, 1.0], [math.inf, -math.inf, 0.0],
])  # fmt: skip
def test_every_logit_counts(row: list[float]) -> None:
    """Fault: a row with one number that is not finite, which the maximum passes over."""
    from apcbatch.engine.sampler import NOT_FINITE, greedy
    from apcbatch.kernels.cpu.backend import CpuBackend

    logits = torch.tensor([[1.0, 3e38, -3e38], row, [3e38, 3e38, 3e38]])
    for with_logprobs in (False, True):
        assert greedy(CpuBackend(), logits, with_logprobs).read()[0] == [1, NOT_FINITE, 0]
    assert greedy(CpuBackend(), logits[:0], False).read() == ([], None)


NO_KERNELS = "a CUDA device is here and this build has no kernels for it, so the CPU is used; see apcbatch doctor"


@table("name, is_there, said", [
    ("auto", True, NO_KERNELS),
    ("cpu", True, None), ("auto", False, None), ("cuda", True, ""),
])  # fmt: skip
def test_a_device_without_kernels_is_left_alone_or_told(
    name: str, is_there: bool, said: str | None, tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches `auto` that ends where the kernels are not built or is silent about it, so that a run takes hours beside
    an idle GPU; a warning where the CPU was asked for; `cuda` that continues with the CPU, and a sentence that does not
    say how they are built."""
    from apcbatch.kernels.cuda import extension as cuda

    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_there)
    monkeypatch.setitem(sys.modules, "apcbatch._CUDA", None)
    cuda.extension.cache_clear()
    warned: list[str] = []
    try:
        if name != "cuda":
            engine = Engine(tiny_checkpoint("mamba"), device=name, pool_size_bytes=1 << 20, warn=warned.append)
            engine.close()
            assert engine.device == "cpu" and warned == [said] * bool(said)
        else:
            with pytest.raises(UsageError, match="--device cuda: the CUDA kernels are not .* by `make demo CUDA=1`"):
                Engine(tiny_checkpoint("mamba"), device=name, pool_size_bytes=1 << 20)
    finally:
        cuda.extension.cache_clear()


def test_a_pass_is_shared_by_its_tokens() -> None:
    """Fault: a pass's seconds go to another phase, in other shares or another unit."""
    prompt, answer = (make_sequence(Request(name, [1, 2, 3], max_tokens=4), VOCAB, None) for name in "pa")
    answer.computed = 3
    counters = Counters(prefill_tokens=10, decode_tokens=20, decode_chunks=30)
    counters.seconds.update(prefill=8.0, decode=16.0)
    counters.add_pass([Chunk(prompt, 0, 3), Chunk(answer, 3, 1)], 2.0)
    assert (prompt.prefill_s, prompt.decode_s, answer.prefill_s, answer.decode_s) == (1.5, 0.0, 0.0, 0.5)
    assert (counters.prefill_tokens, counters.decode_tokens, counters.decode_chunks) == (13, 21, 31)
    assert counters.seconds == {"prefill": 9.5, "decode": 16.5, "store": 0.0}
    assert (prompt.result().prefill_ms, answer.result().decode_ms) == (1500.0, 500.0)
