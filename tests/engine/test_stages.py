"""A model in several stages with several passes under way, on the CPU: the answers, states and files of one stage."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from apcbatch import Engine, Request, Result
from apcbatch.engine import step
from apcbatch.engine.admission import PassBudget
from tests.effort import tries
from tests.engine.opened import OpenedEngine
from tests.engine.runs import by_id, tokens, told
from tests.engine.test_sameness import agent_prompts
from tests.tiny import FAMILIES

Stages = Callable[[int], None]


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path]) -> Path:
    """A checkpoint of four layers, in two of the families with a head that is not the embedding."""
    return tiny_checkpoint(request.param, num_hidden_layers=4)


def of_every_kind(seed: int) -> list[Request]:
    """Conversations that fork and grow, whose answers are drawn, scored, several or with their logits."""
    source, requests = random.Random(seed), agent_prompts(seed)
    for number, request in enumerate(requests):
        request.max_tokens = source.randrange(1, 30)
        request.temperature = 1.0 if number % 3 == 1 else 0.0
        request.n = 3 if number % 6 == 1 else 1
        request.top_logprobs = 2 if number % 5 == 2 else 0
        request.ignore_eos = number % 2 == 0
        request.keep_answer = number % 4 == 0 and request.n == 1
        if number % 7 == 3:
            request.score_from = len(request.token_ids) // 2 + 1
    return requests


def serve(engine: OpenedEngine, requests: list[Request]) -> dict[str, Result]:
    results = by_id(engine.run(requests))
    assert len(results) == len(requests) and not engine.pipeline and not engine.num_unfinished
    return results


@pytest.mark.drawn(2)
@pytest.mark.slow
@pytest.mark.parametrize(("family", "count", "dtype"), [
    ("mamba", 2, "bfloat16"), ("falcon_mamba", 3, "float32"), ("jamba", 4, "float32"), ("jamba", 2, "bfloat16"),
])  # fmt: skip
def test_stages_change_no_bit(
    family: str, count: int, dtype: str, tiny_checkpoint: Callable[..., Path], open_engine: Callable[..., Engine],
    stages: Stages, tmp_path: Path,
) -> None:  # fmt: skip
    """Catches a stage that begins with another residual than one stage has there, a token of another pass, a slot or a
    page that is given away while a pass under way still needs it, and logits that a later pass has overwritten."""
    folder = tiny_checkpoint(family, num_hidden_layers=4)
    for seed in random.sample(range(1 << 30), tries(10)):
        requests = of_every_kind(seed)
        stages(1)
        cold = open_engine(folder, dtype=dtype, policy="none", max_running=1)
        expected = {key: told(result) for key, result in serve(cold, requests).items()}
        stages(count)
        for options in (
            {"policy": "none", "max_running": 3},
            {"policy": "all", "max_running": 2, "max_batch_tokens": 40},
            {"policy": "last", "max_running": 8, "max_batch_tokens": 200},
            {"policy": "all", "max_running": 4, "pool_size_bytes": 1 << 18, "store": tmp_path / str(seed)},
            {"policy": "all", "max_running": 4, "store": tmp_path / str(seed)},
        ):
            engine = open_engine(folder, dtype=dtype, **options)
            assert engine.fingerprint == cold.fingerprint and engine.weights_digest == cold.weights_digest
            found = {key: told(result) for key, result in serve(engine, requests).items()}
            engine.close()
            differing = [key for key in expected if found[key] != expected[key]]
            assert not differing, f"seed {seed}, {options}: {differing}"


@pytest.mark.drawn(5)
@pytest.mark.parametrize("policy", ["all", "last"])
def test_as_much_is_cached_and_kept(
    folder: Path, policy: str, open_engine: Callable[..., Engine], stages: Stages
) -> None:
    """Catches snapshots that are lost, published before they are computed, or other bytes than those of one stage."""
    seed = random.randrange(1 << 30)
    requests = agent_prompts(seed, 3)
    engines = []
    for count in (1, 3):
        stages(count)
        engines.append(open_engine(folder, policy=policy, max_running=2))
    one, several = engines
    served = [serve(engine, requests) for engine in engines]
    # a prompt that continues as an answer happens to begin finds more if that answer is there already
    begun = {(*request.token_ids, served[0][request.id].token_ids[0]) for request in requests}
    lucky = {r.id for r in requests if any(tuple(r.token_ids[: len(one)]) == one for one in begun)}
    cached = [{key: one.cached_tokens for key, one in results.items() if key not in lucky} for results in served]
    assert cached[0] == cached[1], f"seed {seed}"
    history = list(requests[-1].token_ids)
    assert one.boundaries(history) == several.boundaries(history)
    for position in one.boundaries(history):
        expected, found = one.snapshot(history[:position]), several.snapshot(history[:position])
        assert list(expected) == list(found)
        assert all(torch.equal(expected[name], found[name]) for name in expected), f"seed {seed}, {position}"


@pytest.mark.drawn(3)
def test_each_reads_what_the_other_stored(
    folder: Path, open_engine: Callable[..., Engine], stages: Stages, tmp_path: Path
) -> None:
    """Catches another order of layers in a stored snapshot, and another name of the model."""
    seed = random.randrange(1 << 30)
    requests = agent_prompts(seed, 2)
    stored = {}
    for writer, reader in ((1, 3), (3, 1)):
        store = tmp_path / str(writer)
        stages(writer)
        first = open_engine(folder, store=store, max_running=1)
        cold = serve(first, requests)
        first.close()
        files = sorted(store.glob("objects/**/*.safetensors"))
        stored[writer] = {file.name: file.read_bytes() for file in files}
        stages(reader)
        warm = serve(open_engine(folder, store=store), requests)
        assert {result.cached_from for result in warm.values()} >= {"disk"}, f"seed {seed}"
        assert {key: told(one) for key, one in cold.items()} == {key: told(one) for key, one in warm.items()}
    assert stored[1] and stored[1] == stored[3], f"seed {seed}"


class Watch:
    """How many passes were under way when each was begun, and how many sequences each has."""

    def __init__(self, engine: OpenedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = engine
        self.under_way: list[int] = []
        self.sizes: list[int] = []
        self.ahead: list[bool] = []
        run_pass = step.run_pass

        def noted(model: object, decodes: object, chunks: list[step.Chunk], before: step.Pass | None = None) -> object:
            ends = engine.pipeline.ends
            for chunk in chunks:
                assert before is not None or chunk.begin == ends.get(chunk.sequence, chunk.sequence.computed)
                assert before is not None or chunk.sequence not in ends or chunk.end <= chunk.sequence.num_prompt
            self.under_way.append(len(engine.pipeline))
            self.sizes.append(len(chunks))
            self.ahead.append(before is not None)
            return run_pass(model, decodes, chunks, before)

        monkeypatch.setattr(step, "run_pass", noted)


@pytest.fixture
def watch(
    tiny_checkpoint: Callable[..., Path], open_engine: Callable[..., Engine], stages: Stages,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Watch]:  # fmt: skip
    """watch(stages, **options) -> a watched engine of a model of four layers."""

    def make(count: int, family: str = "mamba", **options: Any) -> Watch:
        stages(count)
        engine = open_engine(tiny_checkpoint(family, num_hidden_layers=4), **{"policy": "none", **options})
        return Watch(engine, monkeypatch)

    return make


def alike(count: int, length: int, max_tokens: int) -> list[Request]:
    """Requests of one token, repeated."""
    return [Request(str(n), [n + 1] * length, max_tokens=max_tokens, ignore_eos=True) for n in range(count)]


@pytest.mark.parametrize("count", [2, 3])
def test_each_stage_has_a_pass(count: int, watch: Callable[..., Watch]) -> None:
    """Catches a pipeline that runs dry: passes that wait for the one before, groups that become one, prompts without a
    pass to spare, and more sequences in a pass than it may have."""
    seen = watch(count, max_running=4)
    serve(seen.engine, alike(4 * count, 9, 41))
    assert set(seen.sizes) == {4}
    assert len(seen.sizes) == 41 * count
    # The first of each group; a group's decodes but the first are begun while it has not been read.
    assert seen.under_way[:count] == list(range(count))
    assert seen.under_way[2 * count :].count(count - 1) > 30 * count
    assert seen.ahead.count(True) == 39 * count


def test_sequences_and_prompts_are_parted_among_the_passes(watch: Callable[..., Watch]) -> None:
    """Catches all sequences, or all prompts, in one pass, so that all devices but one wait, a sequence that is left
    behind for good, and devices that wait for the host between passes of prompts."""
    seen = watch(2, max_running=32)
    serve(seen.engine, alike(7, 9, 30))
    assert seen.sizes[0] == 7 and set(seen.sizes[1:]) == {3, 4}
    assert 2 * 29 <= len(seen.sizes) - 1 <= 2 * 31
    seen = watch(2, max_running=4, max_batch_tokens=20)
    serve(seen.engine, alike(12, 15, 1))
    assert max(seen.under_way) == 2 and seen.under_way.count(2) >= 4
    seen = watch(2, max_running=32, max_batch_tokens=8192)
    serve(seen.engine, alike(16, 150, 1))
    assert seen.sizes == [8, 7, 2] and seen.under_way == [0, 1, 2], "half of the tokens, 1024, the rest"


def test_a_prompt_goes_on_before_its_last_piece_is_read(
    watch: Callable[..., Watch],
    tiny_checkpoint: Callable[..., Path],
    open_engine: Callable[..., Engine],
    stages: Stages,
) -> None:
    """Catches a long prompt that keeps one device busy at a time, and a piece that begins where its sequence started
    instead of where the piece before it ended."""
    prompt = tokens(330, 8)
    requests = [Request(str(end), prompt[:end], max_tokens=5, ignore_eos=True) for end in (300, 330)]
    expected = serve(open_engine(tiny_checkpoint("jamba", num_hidden_layers=4), policy="none"), requests)
    seen = watch(3, "jamba", policy="planned", max_batch_tokens=40)
    found = [serve(seen.engine, [one])[one.id] for one in requests]
    assert [told(one) for one in found] == [told(expected[one.id]) for one in requests]
    assert [one.cached_tokens for one in found] == [0, 288]
    assert seen.under_way[:9] == [0, 1, 2, 3, 3, 3, 3, 3, 0], "eight pieces, and the answer's second token"


def test_a_pass_has_its_share_of_the_tokens() -> None:
    """Catches passes that are so large that few are under way, or so small that the host is in the way, and prompts
    that all go into one pass because the others' were not admitted yet."""
    plenty = [PassBudget(8192, 128, groups).prompt_tokens(0, 1 << 20) for groups in (1, 2, 3, 8, 16)]
    assert plenty == [8192, 4096, 2730, 1024, 1024]
    two = PassBudget(8192, 128, 2)
    assert [two.prompt_tokens(100, left) for left in (1, 1500, 3001, 8192, 9000)] == [1024, 1024, 1501, 3996, 3996]
    assert [PassBudget(most, 8, 4).prompt_tokens(3, 1 << 20) for most in (1, 3, 100, 8192)] == [1, 1, 97, 2045]
    assert [two.decodes(running) for running in (1, 7, 200, 256)] == [1, 4, 100, 128]
    assert [two.wanted(96, left) for left in (0, 5000, 8000)] == [8000, 3000, 0]
    assert PassBudget(1, 8, 1).wanted(8, 0) == 1, "decodes keep no prompt out for good"


@pytest.mark.drawn(3)
def test_a_pass_that_fails_costs_its_own_requests(
    folder: Path, open_engine: Callable[..., Engine], stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches requests of other passes under way that end with it, or have other bits: any pass may fail."""
    seed = random.randrange(1 << 30)
    requests = of_every_kind(seed)
    stages(1)
    expected = {key: told(one) for key, one in serve(open_engine(folder, policy="none"), requests).items()}
    stages(2)
    engine, run_pass = open_engine(folder, max_running=3, max_batch_tokens=64), step.run_pass
    source = random.Random(seed)

    def fails(*arguments: Any) -> Any:
        if source.random() < 0.04:
            raise RuntimeError("this pass broke")
        return run_pass(*arguments)

    monkeypatch.setattr(step, "run_pass", fails)
    results = serve(engine, requests)
    failed = {key for key, result in results.items() if result.error is not None}
    assert all(told(result) == expected[key] for key, result in results.items() if key not in failed), f"seed {seed}"
    monkeypatch.setattr(step, "run_pass", run_pass)
    again = serve(engine, [request for request in requests if request.id in failed])
    assert all(told(result) == expected[key] for key, result in again.items()), f"seed {seed}"


def test_a_state_that_is_not_finite_ends_its_request_alone(
    watch: Callable[..., Watch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a broken state of one stage that is published because another stage's was looked at."""
    engine, run_pass = watch(2, policy="all", max_running=2).engine, step.run_pass

    def breaks(model: object, decodes: object, chunks: list[step.Chunk], before: step.Pass | None = None) -> object:
        made = run_pass(model, decodes, chunks, before)
        for chunk in chunks:
            if chunk.keep and chunk.sequence.request.id == "1":
                engine.parts.arena.stages[1].slots["ssm"][chunk.keep[-1].slot, 0, 0, 0] = torch.nan
        return made

    monkeypatch.setattr(step, "run_pass", breaks)
    results = serve(engine, alike(4, 40, 3))
    assert [results[str(n)].error and results[str(n)].error.code for n in range(4)] == [None, "non_finite", None, None]
    sound, broken = engine.boundaries([3] * 40), engine.boundaries([2] * 40)
    assert broken == sound[:-1], "those before the broken one are sound, and serve others"


@pytest.mark.drawn(4)
def test_seconds_are_counted_once(
    folder: Path, open_engine: Callable[..., Engine], stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: the time of passes that overlap is added up. The clock ticks once a reading, so that no load matters."""
    stages(3)
    engine = open_engine(folder, max_running=2)
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    begin = time.perf_counter()
    results = serve(engine, agent_prompts(4))
    took = time.perf_counter() - begin
    assert sum(engine.counters.seconds.values()) <= took
    assert sum(one.prefill_ms + one.decode_ms for one in results.values()) / 1e3 <= took
