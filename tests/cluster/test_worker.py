"""Workers over units: what a plan gives when it crosses them is what one engine gives, whatever does not arrive."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from apcbatch import Engine, Request, Result
from apcbatch.cluster.recovery import read_in_flight
from apcbatch.cluster.runtime import ClusterCounters
from apcbatch.cluster.wire import (
    Alive,
    Answer,
    Done,
    Exported,
    Import,
    ImportFailed,
    Key,
    Message,
    Piece,
    Unit,
    encode_request,
)
from apcbatch.cluster.worker import Worker
from apcbatch.drafts.drafter import Draft
from apcbatch.engine.engine import open_engine
from apcbatch.engine.parts import EngineParts
from apcbatch.plan.planner import Plan, Planner
from apcbatch.types import RequestPlan
from tests.cluster.cutting import cut
from tests.effort import seeds
from tests.engine.opened import opening
from tests.plan.plan_oracle import Dataset, make_plan, random_dataset, within_vocabulary
from tests.tiny import VOCAB

BLOCK = 6
POOL_BYTES = 16 << 20

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=["mamba", "jamba", "qwen3_5"])
def folder(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path]) -> str:
    return str(tiny_checkpoint(request.param))


class OpenedWorker(Worker):
    """A worker with its engine, and with the parts of that. drafts: see tests/engine/opened.py."""

    engine: Engine
    parts: EngineParts

    def __init__(self, *arguments: Any, drafts: object = None, **options: Any) -> None:
        def noted(*of: Any) -> Engine:
            with opening(drafts=drafts) as opened:
                self.engine = open_engine(*of)
            self.parts = opened.parts
            return self.engine

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("apcbatch.cluster.worker.open_engine", noted)
            super().__init__(*arguments, **options)


@pytest.fixture
def open_worker() -> Iterator[Callable[..., OpenedWorker]]:
    opened: list[OpenedWorker] = []

    def make(model: str, drafts: object = None, **options: object) -> OpenedWorker:
        values = {"device": "cpu", "block_size": BLOCK, "pool_size": POOL_BYTES, **options}
        opened.append(OpenedWorker({"model": model, **values}, threads=1, drafts=drafts))
        return opened[-1]

    yield make
    for worker in opened:
        worker.close()


def requests_of(data: Dataset) -> list[Request]:
    return [
        Request(str(index), list(prompt), max_tokens=3, ignore_eos=True, logprobs=True, keep_answer=False)
        for index, prompt in enumerate(data.prompts)
    ]


def record(result: Result) -> tuple[Any, ...]:
    """All that a record says of a request but times."""
    assert result.error is None and result.tag is None
    return (
        result.id, result.prompt_tokens, result.token_ids, result.logprobs, result.finish_reason, result.cached_tokens,
        result.computed_tokens, result.cached_from, result.ideal_cached_tokens, result.boundary, result.miss_reason,
        result.miss_detail,
    )  # fmt: skip


def alone(folder: str, requests: list[Request], plan: Plan) -> dict[int, tuple[Any, ...]]:
    """The records of one engine that follows the whole plan."""
    engine = Engine(folder, block_size=BLOCK, policy="planned", pool_size_bytes=POOL_BYTES)
    planned = [replace(requests[index], plan=plan.requests[index]) for index in plan.order]
    results = {int(result.id): record(result) for result in engine.run(planned)}
    engine.close()
    return results


class Repeating:
    """Drafts that repeat the last token, from an index of 7 bytes."""

    held_bytes = 7

    def begin(self, prompt, references, most_tokens):
        return self

    def add(self, tokens, num_prompt: int, begin: int) -> None:
        pass

    def append(self, new) -> None:
        self.last = int(new[-1])

    def propose(self, most: int) -> Draft | None:
        return Draft([self.last] * most, [0.9] * most, "lookup")


class Run:
    """What workers said about units, done one by one or two at a time."""

    def __init__(self) -> None:
        self.records: dict[int, tuple[Any, ...]] = {}
        self.states: dict[Key, bytes] = {}
        self.without: list[Key] = []
        self.done: list[Done] = []
        self.computed_tokens = self.drafted = self.accepted = 0

    def take(self, unit: Unit, message: Message) -> None:
        """Note a message of a unit that is not done."""
        assert message.unit == unit.number and unit.number not in {done.unit for done in self.done}
        if isinstance(message, Answer):
            assert message.number not in self.records and message.number in {piece.number for piece in unit.pieces}
            self.records[message.number] = record(message.result)
            self.computed_tokens += message.result.computed_tokens
            self.drafted += message.result.drafted_tokens
            self.accepted += message.result.accepted_tokens
        elif isinstance(message, Exported):
            assert message.key in unit.exports and message.key not in self.states
            assert message.num_bytes == len(message.state)
            self.states[message.key] = message.state
        elif isinstance(message, ImportFailed):
            self.without.append(message.key)
        else:
            assert {piece.number for piece in unit.pieces} <= set(self.records)
            self.done.append(message)

    def do(self, worker: Worker, *units: Unit, states: Mapping[Key, bytes] | None = None) -> None:
        """Have units done side by side."""
        given = self.states if states is None else states
        by_number = {unit.number: unit for unit in units}
        for unit in units:
            worker.begin(unit, {key: given[key] for key in unit.imports if key in given})
        while worker.is_busy:
            for message in worker.step():
                self.take(by_number[message.unit], message)

    def ready(self, unit: Unit) -> bool:
        """Whether the states of a unit's imports are there."""
        return all(key in self.states for key in unit.imports)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("at_a_time", [1, 2])
def test_records_are_those_of_one_engine(folder: str, at_a_time: int, open_worker: Callable[..., Worker]) -> None:
    """Catches a plan that a worker does not follow, a state that is not told or told twice, a miss that is explained
    by what this worker alone has seen, and units that get in each other's way."""
    workers, crossed = [open_worker(folder), open_worker(folder)], 0
    for seed in chain([1], seeds(20)):  # of 1, two states cross
        source = random.Random(seed)
        data = within_vocabulary(random_dataset(seed), VOCAB - seed % 8, stretch=1 + seed % 3)
        requests, plan = requests_of(data), make_plan(data, Planner(BLOCK))
        waiting = cut(requests, plan, workers[0].facts().key_fingerprint, source)
        run, count = Run(), len(waiting)
        while waiting:
            ready = [unit for unit in waiting if run.ready(unit)]
            chosen = source.sample(ready, min(at_a_time, len(ready)))
            waiting = [unit for unit in waiting if unit not in chosen]
            run.do(source.choice(workers), *chosen)
        assert run.records == alone(folder, requests, plan), data.where
        assert len(run.done) == count and not run.without
        assert run.computed_tokens == plan.computed_tokens, data.where
        crossed += len(run.states)
    assert crossed
    for worker in workers:
        assert worker.parts.pool.held_bytes == 0, "a state without readers is released"


@pytest.mark.drawn(4)
@pytest.mark.parametrize("fault", ["missing", "torn", "flipped", "foreign"])
def test_an_import_that_cannot_be_had_costs_nothing_but_time(
    folder: str, fault: str, open_worker: Callable[..., Worker]
) -> None:
    """Catches a unit that fails or waits for a state that never comes, one that takes a bad state, and readers that
    each compute the stem again."""
    stem = [1 + (7 * place) % 90 for place in range(30)]
    prompts = [[*stem, 5], [*stem, 6, 6], [*stem, 7, 7, 7]]
    data = Dataset([tuple(prompt) for prompt in prompts], [0, 1, 2])
    requests, plan = requests_of(data), make_plan(data, Planner(BLOCK))
    expected = alone(folder, requests, plan)
    one, other = open_worker(folder), open_worker(folder)
    first, *readers = plan.order
    assert [plan.leaders[index] for index in readers] == [first, first]
    todo = plan.requests[first]
    run = Run()
    pieces = [Piece(index, encode_request(requests[index]), plan.requests[index]) for index in plan.order]
    key = cut(requests, plan, one.facts().key_fingerprint, NoSharing())[0].exports
    run.do(one, Unit(0, (replace(pieces[0], plan=replace(todo, reads=(1,))),), key))
    (name,) = key
    state = run.states[name]
    damaged = {
        "missing": None, "torn": state[:-1], "flipped": state[:-1] + bytes([state[-1] ^ 4]),
        "foreign": state.replace(name.hex().encode(), bytes(32).hex().encode()),
    }[fault]  # fmt: skip
    assert damaged != state
    run.computed_tokens = 0
    run.do(
        other,
        Unit(1, tuple(pieces[1:]), imports={name: Import(todo.keep[0], (0, 1))}),
        states={name: damaged} if damaged else {},
    )
    assert run.without == [name]
    answers = {index: found[:5] for index, found in run.records.items()}
    assert answers == {index: found[:5] for index, found in expected.items()}
    assert run.computed_tokens == sum(len(prompts[index]) for index in readers) - todo.keep[0]
    assert other.parts.pool.held_bytes == 0


def test_a_miss_is_explained_by_what_the_run_has_seen(folder: str, open_worker: Callable[..., Worker]) -> None:
    """Catches a worker that takes a fork, or an end, for a first prompt, since another one had the other branch."""
    prompts = [(1, 2, 3), (1, 2, 3, 4, 5, 6, 7, 8), (9, 9, 8, 8, 8, 8, 8), (9, 9, 7, 7, 7, 7, 7)]
    data = Dataset(prompts, [0, 1, 2, 3])
    requests, plan, run = requests_of(data), make_plan(data, Planner(BLOCK)), Run()
    plan.requests[:] = [RequestPlan(ideal=one.ideal) for one in plan.requests]  # nothing is kept
    for unit in cut(requests, plan, b"", NoSharing()):
        run.do(open_worker(folder), unit)
    assert run.records == alone(folder, requests, plan)
    reasons = {index: found[-2] for index, found in run.records.items()}
    assert reasons == {0: "cold", 1: "diverged", 2: "cold", 3: "diverged"}


class NoSharing(random.Random):
    """Cuts every request into a unit of its own."""

    def randint(self, a: int, b: int) -> int:
        return 1


def test_a_request_that_is_refused_is_an_answer(folder: str, open_worker: Callable[..., Worker]) -> None:
    """Catches a refused request that ends the unit, and a state that is held for ever for it."""
    worker = open_worker(folder)
    prompt = [1, 2, 3, 4, 5, 6, 7]
    plans = [RequestPlan(keep=(3,), reads=(2,)), RequestPlan(resume_at=3, ideal=3), RequestPlan(resume_at=3, ideal=3)]
    requests = [Request(str(n), prompt, max_tokens=2, keep_answer=False, ignore_eos=True) for n in range(3)]
    maker = Unit(
        0, (Piece(0, encode_request(requests[0]), replace(plans[0], reads=(1,))),), frozenset([key_of(worker)])
    )
    run = Run()
    run.do(worker, maker)
    bad = replace(requests[1], top_p=7.0)
    pieces = (Piece(1, encode_request(bad), plans[1]), Piece(2, encode_request(requests[2]), plans[2]))
    unit = Unit(1, pieces, imports={key_of(worker): Import(3, (0, 1))})
    worker.begin(unit, run.states)
    said = [message for _ in iter(lambda: worker.is_busy, False) for message in worker.step()]
    results = {message.number: message.result for message in said if isinstance(message, Answer)}
    assert results[1].error is not None and "top_p" in results[1].error.message
    assert (results[2].error, results[2].cached_tokens) == (None, 3)
    assert isinstance(said[-1], Done) and worker.parts.pool.held_bytes == 0


@pytest.mark.parametrize("fault", [{"top_p": 7.0}, {"logit_bias": dict.fromkeys(range(VOCAB), float("-inf"))}])
def test_what_a_failed_request_was_to_export_is_exported(
    fault: dict[str, Any], folder: str, open_worker: Callable[..., Worker]
) -> None:
    """Fault: the other units' requests, and those beside it, computed the prefix of a request that failed, each of them
    anew. The next reader in the unit makes it; where there is none, nothing is held for it."""
    worker = open_worker(folder)
    prompt = [1, 2, 3, 4, 5, 6, 7]
    plans = [RequestPlan(keep=(3,), reads=(2,)), RequestPlan(resume_at=3, ideal=3)]
    first, second = (Request(str(n), prompt, max_tokens=2, keep_answer=False, ignore_eos=True) for n in range(2))
    pieces = Piece(0, encode_request(replace(first, **fault)), plans[0]), Piece(1, encode_request(second), plans[1])
    worker.begin(Unit(0, pieces, frozenset([key_of(worker)])), {})
    said = [message for _ in iter(lambda: worker.is_busy, False) for message in worker.step()]
    made = [message for message in said if isinstance(message, Exported)]
    results = {message.number: message.result for message in said if isinstance(message, Answer)}
    assert results[0].error is not None and results[1].error is None
    assert [one.key for one in made] == [key_of(worker)] and isinstance(said[-1], Done)
    alone = Piece(2, encode_request(replace(first, top_p=7.0)), replace(plans[0], reads=(1,)))
    worker.begin(Unit(1, (alone,), frozenset([key_of(worker)])), {})
    said = [message for _ in iter(lambda: worker.is_busy, False) for message in worker.step()]
    assert [type(message) for message in said] == [Answer, Done] and worker.parts.pool.held_bytes == 0


def test_what_is_at_work_is_written_down_before(
    folder: str, open_worker: Callable[..., Worker], tmp_path: Path
) -> None:
    """Catches a request that is computed and not in the file, so that another one would be blamed for a crash, and one
    that stays there."""
    worker = OpenedWorker(
        {"model": folder, "device": "cpu", "block_size": BLOCK, "pool_size": POOL_BYTES, "max_running": 3},
        threads=1,
        in_flight=str(tmp_path / "at-work"),
    )
    requests = [Request(str(n), [1 + n, 2, 3], max_tokens=1 + n % 4, n=1 + n % 2, temperature=1.0) for n in range(9)]
    worker.begin(Unit(0, tuple(Piece(10 + n, encode_request(one), None) for n, one in enumerate(requests))), {})
    seen, told = set[int](), worker.moves

    def moves() -> None:
        scheduler = worker.parts.scheduler
        begun = [*scheduler.places.running, *(forks.sequences[0] for forks in scheduler.places.forks)]
        in_flight = read_in_flight(str(tmp_path / "at-work"))
        assert in_flight == {sequence.request.tag[1] for sequence in begun}
        seen.update(in_flight)
        told()

    worker.engine.watch(worker.begins, moves)
    while worker.is_busy:
        worker.step()
    assert seen == {10 + n for n in range(9)}
    assert read_in_flight(str(tmp_path / "at-work")) == frozenset()
    worker.close()


def test_a_worker_says_that_it_lives(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a long pass in which nothing is said, and words of a worker that has no work or of a unit that is
    done."""
    said: list[Message] = []
    config = {"model": folder, "device": "cpu", "block_size": BLOCK, "pool_size": POOL_BYTES}
    worker = Worker(config, threads=1, report_alive=said.append)
    worker.moves()
    assert not said
    monkeypatch.setattr("apcbatch.cluster.worker.ALIVE_EVERY_S", 0.0)
    for number in (3, 4):
        worker.begin(Unit(number, (Piece(number, encode_request(Request("r", [1, 2, 3], max_tokens=4)), None),)), {})
        worker.step()
        first = len(said)
        assert first >= 2, "it speaks at each layer, not after the pass alone"
        while worker.is_busy:
            worker.step()
        assert len(said) > first and set(said) == {Alive(number)}
        said.clear()
        worker.moves()
        assert not said
    refused = Request("r", [1, 2, 3], top_p=7.0)
    worker.begin(Unit(5, (Piece(5, encode_request(refused), None),)), {})
    worker.step()
    assert said == [Alive(5)], "a step without a pass"
    worker.close()


def key_of(worker: Worker) -> Key:
    """Of the first three tokens 1, 2 and 3."""
    from apcbatch.prefix import prefix_key

    return prefix_key(worker.facts().key_fingerprint, [1, 2, 3], 3)


def test_counters_add_up(
    folder: str, open_worker: Callable[..., OpenedWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: work that is counted for no unit, for two, or for the first of two workers alone; a peak that is a sum; a
    unit that is done before its snapshots are in the store."""
    workers = [open_worker(folder, drafts=Repeating()) for _ in range(2)]
    units = [
        Unit(number, (Piece(number, encode_request(Request(str(number), [1, 2, 3 + number], max_tokens=4)), None),))
        for number in range(3)
    ]
    run, flushed = Run(), list[int]()
    monkeypatch.setattr(workers[0].engine, "flush", lambda: flushed.append(len(run.records)))
    run.do(workers[0], *units[:2])
    assert len(flushed) == 2, "by each unit"
    run.do(workers[1], *units[2:])
    first, second = (worker.engine.counters for worker in workers)
    said = [done.counters for done in run.done]
    assert said[1:] == [first, second] and said[0].prefill_tokens in (3, 6)
    total = ClusterCounters.total(said[1:])
    for name in ("prefill_tokens", "decode_tokens", "decode_chunks", "snapshots_written"):
        assert getattr(total, name) == getattr(first, name) + getattr(second, name), name
    assert total.prefill_tokens == 9 == run.computed_tokens
    assert total.seconds == {name: first.seconds[name] + second.seconds[name] for name in first.seconds}
    assert total.drafts == {"lookup": (run.drafted, run.accepted)} and run.drafted > 0
    assert total.peak_draft_bytes == 7
    assert total.peak_live_snapshots == max(first.peak_live_snapshots, second.peak_live_snapshots)
    assert (total.unique_tokens, total.drafts_saved_s) == (0, None)
