"""What `tune-block-size` measures, on an engine whose costs are known to the last digit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from apcbatch.engine.validation import MAX_REQUEST_TOKENS
from apcbatch.errors import RequestError
from apcbatch.job import opening
from apcbatch.plan.footprint import Footprint
from apcbatch.resolution import load
from apcbatch.tuning import measurement
from apcbatch.tuning.measurement import Measurement, Rate, _Meter
from apcbatch.tuning.prediction import Workload
from apcbatch.types import Request, Result

PASS, CHUNK, TOKEN, PAIR, SNAPSHOT = 2e-3, 3e-4, 1e-4, 2e-8, 5e-4
RESTORE_RAM, RESTORE_DISK, WRITE_BYTE = 7e-4, 9e-3, 1e-8
STORED_BYTES = 1000


@pytest.mark.parametrize(("store", "beside"), [(None, False), ("s", True), ("gone/s", False)])
def test_a_temporary_store_is_beside_the_given_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str | None, beside: bool
) -> None:
    """Fault: the disk of the temporary folder is measured, or a store that is yet to be made ends the command."""
    made: list[Any] = []
    ended: list[str] = []
    engine = SimpleNamespace(abort=lambda: ended.append("abort"), close=lambda: ended.append("close"))

    def make_engine(config: Any, warn: object) -> SimpleNamespace:
        made.append(config)
        return engine

    monkeypatch.setattr(opening, "make_engine", make_engine)
    config = load({} if store is None else {"store": str(tmp_path / store)}, None, {})
    for has_store in (True, False):
        with measurement.temporary_engine(config, print, has_store=has_store) as opened:
            assert opened is engine and made[-1].draft == "none"
            folder = made[-1].store and Path(made[-1].store).parent
            assert (folder is not None and folder.is_dir()) == has_store
        assert not has_store or (folder.parent == tmp_path) == beside and not folder.exists()
    assert ended == ["abort", "close"] * 2


class KnownEngine:
    """An engine without a model: each call of `run` is one pass, whose seconds are those of the costs above. On a
    device a pass waits for two thirds of a restore, and what was restored once is in memory.

    clock: what `time.perf_counter` says, moved on by what is done. pool: snapshots in RAM by length of prefix."""

    def __init__(self, state_only: bool, context_length: int | None = None, device: str = "cpu") -> None:
        self.vocab_size, self.context_length, self.device = 50_000, context_length, device
        self._restored: set[tuple[int, ...]] = set()
        self.footprint = Footprint(100, 0 if state_only else 8)
        self.counters = SimpleNamespace(
            seconds={"prefill": 1.0, "store": 2.0}, store_bytes_written=500, snapshots_evicted=3
        )
        self.clock = 0.0
        self.passes: list[list[Request]] = []
        self.ended: list[str] = []
        self.unwritten = 0
        self.pair_s = 0.0 if state_only else PAIR

    def run(self, requests: list[Request]) -> Iterator[Result]:
        self.passes.append(requests)
        spent = PASS
        for request in requests:
            plan = request.plan
            new = len(request.token_ids) - plan.resume_at
            spent += CHUNK + new * TOKEN + new * (plan.resume_at + new / 2) * self.pair_s + len(plan.keep) * SNAPSHOT
            if plan.resume_at:
                prefix = tuple(request.token_ids[: plan.resume_at])
                on_disk = new == 1  # what was kept for later is asked for again with one token more
                if self.device == "cuda":
                    on_disk &= prefix not in self._restored
                    spent += on_disk * RESTORE_DISK * 2 / 3
                    self.counters.seconds["store"] += on_disk * RESTORE_DISK / 3 + (new > 1) * RESTORE_RAM
                else:
                    self.counters.seconds["store"] += RESTORE_DISK if on_disk else RESTORE_RAM
                self._restored.add(prefix)
            self.unwritten += len(plan.keep_for_later)
            self.counters.snapshots_evicted += len(plan.keep_for_later) // 4
            yield Result(request.id, prompt_tokens=len(request.token_ids))
        self.counters.seconds["prefill"] += spent
        self.clock += spent

    def flush(self) -> None:
        self.clock += self.unwritten * STORED_BYTES * WRITE_BYTE
        self.counters.store_bytes_written += self.unwritten * STORED_BYTES
        self.unwritten = 0

    def abort(self) -> None:
        self.ended.append("abort")

    def close(self) -> None:
        self.ended.append("close")


def measured(engine: KnownEngine, monkeypatch: pytest.MonkeyPatch) -> Measurement:
    monkeypatch.setattr(measurement.time, "perf_counter", lambda: engine.clock)
    return _Meter(engine).measure()


def test_known_costs_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a cost that is counted wrong, divided by the wrong number, or taken from the wrong counter; of a device,
    a restore that counts only as far as the host has to do with it."""
    for device in ["cpu", "cuda"]:
        for state_only in [True, False]:
            engine = KnownEngine(state_only, device=device)
            found = measured(engine, monkeypatch)
            assert (found.pass_s, found.chunk_s, found.token_s) == pytest.approx((PASS, CHUNK, TOKEN))
            assert (found.context_s, found.snapshot_s) == pytest.approx((0.0 if state_only else PAIR, SNAPSHOT))
            assert (found.restore_ram_s, found.restore_disk_s) == pytest.approx((RESTORE_RAM, RESTORE_DISK))
            assert found.write_byte_s == pytest.approx(WRITE_BYTE)
            long, *others = found.rates
            assert [(rate.sequences, rate.chunk, rate.context) for rate in others] == [
                (1, 64, 0), (32, 64, 0), (32, 16, 0), (16, 64, min(2 * long.chunk, 1984))
            ]  # fmt: skip
            pair_s = 0.0 if state_only else PAIR
            for rate in found.rates:
                tokens = rate.sequences * rate.chunk
                pairs = tokens * (rate.context + rate.chunk / 2)
                expected = PASS + rate.sequences * CHUNK + tokens * TOKEN + pairs * pair_s
                assert rate.tokens_per_s == pytest.approx(tokens / expected)
            assert long.sequences == 1 and 64 < long.chunk <= 2048 and not long.context
            # As many tokens as the first passes, of four chunks of 64, would take in the time that there is for it.
            first_s = PASS + 4 * CHUNK + 256 * TOKEN + 256 * 32 * pair_s
            assert long.chunk == min(2048, int(0.7 * 256 / first_s))
    disturbed = KnownEngine(True)
    disturbed.pair_s = PAIR
    assert not measured(disturbed, monkeypatch).context_s, "a model without attention costs nothing for the context"


def test_each_kind_is_done_as_often_and_with_prompts_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a prompt that is used twice, and so found again, a request whose number is, and rounds left out."""
    engine = KnownEngine(True)
    measured(engine, monkeypatch)
    requests = [request for requests in engine.passes for request in requests]
    assert len({request.id for request in requests}) == len(requests)
    assert all(request.max_tokens == 1 for request in requests)
    fresh = [tuple(request.token_ids) for request in requests if not request.plan.resume_at]
    assert len(set(fresh)) == len(fresh)
    assert all(min(prompt) >= 0 and max(prompt) < 1 << 15 for prompt in fresh)
    assert max(map(max, fresh)) > 1 << 14
    continued = [request for request in requests if request.plan.resume_at and request.plan.resume_at > 600]
    assert len(continued) == 3 * 16
    [prefix] = {tuple(request.token_ids[: request.plan.resume_at]) for request in continued}
    keeper = next(request for request in requests if tuple(request.token_ids) == prefix)
    assert keeper.plan.keep == (len(prefix),) and keeper.plan.reads[0] > len(continued)
    assert all(request.plan.ideal == request.plan.resume_at for request in requests)
    assert all(len(request.plan.reads) == len(request.plan.keep) for request in requests)
    assert sum(request.plan.keep_for_later == (1, 2, 3, 4) for request in requests) == 32, "one pass fills the pool"
    stored = [request for request in requests if len(request.plan.keep_for_later) == 1]
    assert [(len(one.token_ids), one.plan.keep_for_later) for one in stored] == [(512, (512,))] * 8


def test_a_device_has_seen_the_size_of_a_pass_that_restores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: the first pass of a size, which takes longer on a device, is the one whose restores are measured; or it
    is made on the CPU too, where it measures nothing."""
    for device, before in (("cuda", [8, 8, 8]), ("cpu", [8])):
        engine = KnownEngine(True, device=device)
        measured(engine, monkeypatch)
        new = [{len(one.token_ids) - one.plan.resume_at for one in requests} for requests in engine.passes]
        assert [len(made) for made, sizes in zip(engine.passes, new, strict=True) if sizes == {1}] == before


def test_little_time_and_a_short_context_are_kept_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches prompts beyond the model's context, and rounds that continue although the time is used up."""
    engine = KnownEngine(False, context_length=300)
    measured(engine, monkeypatch)
    longest = max(len(request.token_ids) for requests in engine.passes for request in requests)
    assert longest in range(201, 300)
    slow = KnownEngine(True)
    monkeypatch.setattr(measurement, "SECONDS_FOR_ROUNDS", 0.5)
    measured(slow, monkeypatch)
    assert sum(len(requests) == 16 for requests in slow.passes) == 1


def test_a_request_that_fails_ends_the_measuring() -> None:
    """Catches costs worked out from requests that failed."""
    engine: Any = KnownEngine(True)
    error = RequestError("out_of_memory", "no room")
    engine.run = lambda requests: [Result("r", prompt_tokens=1, error=error)]
    with pytest.raises(RequestError, match="no room"):
        _Meter(engine).measure()


def test_what_is_never_evicted_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an endless loop where the pool holds all that comes."""
    engine: Any = KnownEngine(True)
    engine.counters = SimpleNamespace(seconds=engine.counters.seconds, store_bytes_written=0, snapshots_evicted=0)
    run = engine.run

    def never_evicts(requests: list[Request]) -> Iterator[Result]:
        yield from run(requests)
        engine.counters.snapshots_evicted = 0

    engine.run = never_evicts
    assert math.isfinite(measured(engine, monkeypatch).restore_disk_s)
    fills = [requests for requests in engine.passes if requests[0].plan.keep_for_later == (1, 2, 3, 4)]
    assert len(fills) == measurement.MAX_FILL_RUNS


@pytest.mark.parametrize(("fails", "state_only"), [(False, True), (False, False), (True, False)])
def test_the_engine_is_one_of_its_own(
    fails: bool, state_only: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a measurement in the user's store, one that leaves something behind, and one with less room than what it
    keeps takes."""
    made: list[Any] = []
    engine = KnownEngine(state_only)

    def make(config: Any, warn: Any) -> KnownEngine:
        made.append(config)
        assert Path(config.store).parent.parent == tmp_path and Path(config.store).parent.is_dir()
        if fails:
            engine.run = lambda requests: [Result("r", 1, error=RequestError("internal", "broken"))]  # type: ignore
        return engine

    monkeypatch.setattr(opening, "make_engine", make)
    monkeypatch.setattr(measurement.time, "perf_counter", lambda: engine.clock)
    flags = {"store": str(tmp_path / "store"), "max_running": 7, "block_size": 64, "max_request_tokens": 99}
    config = load(flags, None, {})
    if fails:
        with pytest.raises(RequestError, match="broken"):
            measurement.measure(config, engine.footprint, pytest.fail)
    else:
        measurement.measure(config, engine.footprint, pytest.fail)
    [own] = made
    assert own.max_request_tokens == MAX_REQUEST_TOKENS and (own.draft, own.draft_from) == ("none", None)
    assert (own.policy, own.block_size, own.max_running, own.model) == ("planned", 1, 32, config.model)
    kept_bytes = (2048 // 16 + 1 + 32) * 100 + 4 * 2048 * engine.footprint.kv_token_bytes
    assert own.store_size > own.pool_size >= kept_bytes
    assert engine.ended == ["abort", "close"]
    assert list(tmp_path.iterdir()) == []


def test_seconds_are_the_sum_of_their_parts() -> None:
    """Catches a part that is left out, counted with another's number, or the slowest rate taken for the best."""
    rates = (Rate(1, 2, 3, 40.0), Rate(1, 2, 3, 50.0), Rate(1, 2, 3, 30.0))
    costs = Measurement(rates, 1000.0, 100.0, 10.0, 1.0, 0.1, 0.6, 0.8, 0.0)
    assert Workload(2, 3, 5, 7.0, 0).prefill_s(costs, 11) == pytest.approx(2000 + 300 + 50 + 7 + 1.1)
    assert (costs.tokens_per_s, costs.break_even_ram, costs.break_even_disk) == pytest.approx((50.0, 30.0, 40.0))
