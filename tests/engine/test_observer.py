"""What an engine tells an observer, against its own results and counters."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest

from apcbatch import Request
from apcbatch.job.tracing.edge_rows import edge_columns
from apcbatch.job.tracing.edges import TraceTree
from apcbatch.plan.planner import Planner
from apcbatch.prefix import prefix_key
from tests.effort import tries
from tests.engine.opened import OpenedEngine
from tests.plan.plan_oracle import random_dataset, within_vocabulary
from tests.tiny import VOCAB


class Listener:
    """Notes what it is told, and fills a tree with it."""

    def __init__(self, engine: OpenedEngine) -> None:
        self.engine, self.steps, self.prompts, self.tree = engine, [], [], TraceTree()
        self.kept_keys: list[bytes] = []
        self.evicted: list[bytes] = []
        self.held: set[bytes] = set()
        self.gone_at_once = 0

    def stepped(self, facts) -> None:
        self.steps.append(facts)

    def answered(self, tokens, cached_tokens, source) -> None:
        self.prompts.append((tuple(tokens.tolist()), cached_tokens, source))
        self.tree.answered(tokens, cached_tokens, source)

    def kept(self, tokens, snapshots) -> None:
        assert len(tokens) == snapshots[-1].position
        assert [one.position for one in snapshots] == sorted({one.position for one in snapshots})
        for one in snapshots:
            assert one.key == prefix_key(self.engine.key_fingerprint, tokens, one.position)
            assert one.size_bytes >= self.engine.footprint.state_bytes
            assert one.in_memory == (one.key in self.engine.parts.pool)
            self.kept_keys.append(one.key)
            if one.in_memory:
                self.held.add(one.key)
            else:
                self.gone_at_once += 1
        self.tree.kept(tokens, snapshots, 1.0)

    def dropped(self, key, evicted) -> None:
        self.held.discard(key)
        self.evicted += [key] * evicted
        self.tree.removed(key, evicted, 2.0)


def serve(checkpoint, seed, observed, **options):
    """(results by id, listener) of random requests; the same for a seed."""
    draw = random.Random(seed)
    data = within_vocabulary(random_dataset(seed), VOCAB, stretch=2)
    engine = OpenedEngine(
        checkpoint, block_size=draw.choice([2, 3, 7]), max_batch_tokens=draw.choice([5, 23, 500]), **options
    )
    listener = Listener(engine)
    if observed:
        engine.observe(listener)
    plans = [None] * len(data.prompts)
    if options["policy"] == "planned":
        plan = Planner(engine.block_size, "file", capacity_bytes=options["pool_size_bytes"] // 4).plan(data.tree())
        plans = plan.requests
    requests = [
        Request(
            str(index),
            list(prompt),
            max_tokens=draw.randint(1, 5),
            n=draw.choice([1, 1, 3]),
            temperature=draw.choice([0.0, 1.0]),
            score_from=draw.choice([None, None, 1]),
            plan=plans[index],
        )
        for index, prompt in enumerate(data.prompts)
    ]
    requests.append(Request("bad", [VOCAB]))
    results = {result.id: result for result in engine.run(requests)}
    engine.flush()
    counters = engine.counters
    engine.close()
    return requests, results, listener, counters


@pytest.mark.drawn(3)
@pytest.mark.parametrize("policy", ["all", "last", "planned", "none"])
@pytest.mark.parametrize("family", ["mamba", "jamba"])
def test_what_is_told_adds_up(family, policy, tiny_checkpoint, tmp_path):
    """Fault: a request, a token or a snapshot is told twice, or not at all: under some policy, with several answers,
    scores, a store, or a memory so small that snapshots go at once."""
    seed = random.randrange(10**6)
    for number, pool in enumerate((1 << 16, 1 << 18, 64 << 20)):
        where = f"seed {seed + number}"
        store = {"store": tmp_path / f"states-{number}"} if number == 1 else {}
        options = {"policy": policy, "pool_size_bytes": pool, "max_running": 1 + number, **store}
        requests, results, listener, counters = serve(tiny_checkpoint(family), seed + number, True, **options)
        good = [result for result in results.values() if result.error is None]
        told = Counter((len(prompt), cached, source) for prompt, cached, source in listener.prompts)
        assert told == Counter((one.prompt_tokens, one.cached_tokens, one.cached_from) for one in good), where
        by_prompt = Counter(prompt for prompt, _, _ in listener.prompts)
        assert by_prompt == Counter(tuple(r.token_ids) for r in requests if results[r.id].error is None), where
        rows = edge_columns(listener.tree.root, lambda token_ids: "")
        assert sum(rows.restored) == sum(one.cached_tokens for one in good), where
        assert sum(rows.computed) == sum(one.computed_tokens for one in good), where
        assert sum(rows.snapshots) == len(listener.kept_keys), where
        assert len(listener.kept_keys) == counters.snapshots_written + counters.snapshots_for_later, where
        assert sum(one.prefill_tokens for one in listener.steps) == counters.prefill_tokens, where
        assert sum(one.decode_tokens for one in listener.steps) == counters.decode_tokens, where
        if all(result.error is None for result in results.values() if result.id != "bad"):
            assert counters.prefill_tokens == sum(one.computed_tokens for one in good), where
        for name in ("prefill", "decode", "store"):
            total = sum(getattr(one, f"{name}_s") for one in listener.steps)
            assert abs(total - counters.seconds[name]) < 1e-6, where
        assert all(one.prefill_s + one.decode_s + one.store_s <= one.seconds + 1e-9 for one in listener.steps), where
        assert sum(rows.dropped) <= len(listener.evicted) + listener.gone_at_once, where
        assert max((one.running for one in listener.steps), default=0) <= 1 + number, where
        assert not store or listener.steps[-1].store_bytes <= counters.store_bytes_written, where


def test_dropped_snapshots_are_those_that_were_evicted(tiny_checkpoint):
    """Fault: what a full memory pushes out is not told, or what its last reader releases is told as evicted."""
    seed, dropped = random.randrange(10**6), 0
    for number in range(tries(30)):
        options = {"policy": "all", "pool_size_bytes": 1 << 15, "max_running": 2}
        _, _, listener, counters = serve(tiny_checkpoint("mamba"), seed + number, True, **options)
        rows = edge_columns(listener.tree.root, lambda token_ids: "")
        assert sum(rows.dropped) == counters.snapshots_evicted, f"seed {seed + number}"
        dropped += counters.snapshots_evicted
    assert dropped, f"seed {seed}: nothing was pushed out"


@pytest.mark.parametrize("policy", ["all", "planned"])
def test_nobody_who_looks_changes_anything(policy, tiny_checkpoint):
    """Fault: an answer, or what is reused, depends on whether somebody observes."""
    seed = random.randrange(10**6)
    options = {"policy": policy, "pool_size_bytes": 1 << 17, "max_running": 3, "draft": ()}
    found = []
    for observed in (True, False):
        _, results, listener, _ = serve(tiny_checkpoint("mamba"), seed, observed, **options)
        assert bool(listener.steps) == observed
        found.append({name: _without_times(result) for name, result in results.items()})
    assert repr(found[0]) == repr(found[1]), f"seed {seed}"


def _without_times(result):
    others = [_without_times(other) for other in result.others]
    return dataclasses.replace(result, prefill_ms=0.0, decode_ms=0.0, others=others)


def test_a_step_that_nobody_observes_measures_nothing(tiny_checkpoint, monkeypatch):
    """Fault: what an observer would be told is worked out although there is none."""
    from apcbatch.engine import engine as engine_module
    from apcbatch.engine.pool import SnapshotPool

    def unwanted(*arguments):
        raise AssertionError("nobody asked for this")

    monkeypatch.setattr(engine_module, "facts_between", unwanted)
    monkeypatch.setattr(SnapshotPool, "own_bytes", unwanted)
    monkeypatch.setattr(engine_module.Counters, "copy", unwanted)
    options = {"policy": "all", "pool_size_bytes": 1 << 17, "max_running": 3}
    _, results, _, _ = serve(tiny_checkpoint("mamba"), 1, False, **options)
    assert all(result.error is None for name, result in results.items() if name != "bad")
