"""A request that fails changes no other request's answer, nor its reuse beyond the tokens that it was to compute."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from apcbatch import Engine
from apcbatch.engine import step
from apcbatch.engine.pending import PendingSnapshots
from apcbatch.engine.pending_handover import PendingHandover
from apcbatch.engine.policy import retention_of
from apcbatch.engine.sequence import Sequence, make_sequence
from apcbatch.plan.planner import Planner
from apcbatch.plan.tree_shape import ORDERS
from apcbatch.types import Request, RequestPlan
from tests.effort import tries
from tests.engine.opened import OpenedEngine
from tests.engine.runs import by_id, serve, tokens
from tests.engine.test_given_back import ROOMY, Books
from tests.engine.test_tight_pool import requests_of
from tests.plan.plan_oracle import dataset, make_plan, random_dataset, within_vocabulary
from tests.tiny import VOCAB

NO_TOKEN = {token: float("-inf") for token in range(VOCAB)}
WAYS: dict[str, dict[str, Any]] = {
    "at its first token": {"logit_bias": NO_TOKEN},
    "after scoring": {"logit_bias": NO_TOKEN, "score_from": 1000},
    "at submission": {"top_p": 5.0},
    "with several answers": {"logit_bias": NO_TOKEN, "n": 3, "temperature": 1.0},
    "for lack of pages": {"max_tokens": 1 << 20},
    "with its pass": {},
}


@pytest.fixture
def failing_passes(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], bool]], None]:
    """Have those passes raise whose number a function is true of."""
    run_pass, numbers = step.run_pass, iter(range(10**9))

    def fail(which: Callable[[int], bool]) -> None:
        def maybe(*arguments: Any) -> Any:
            if which(next(numbers)):
                raise RuntimeError("the pass broke")
            return run_pass(*arguments)

        monkeypatch.setattr(step, "run_pass", maybe)

    return fail


@pytest.mark.parametrize(("family", "way"), [
    ("mamba", "at its first token"), ("jamba", "at its first token"), ("mamba", "after scoring"),
    ("mamba", "at submission"), ("jamba", "with several answers"), ("jamba", "for lack of pages"),
    ("jamba", "with its pass"),
])  # fmt: skip
def test_the_others_go_on_sharing(
    family: str, way: str, tiny_checkpoint: Callable[..., Path], failing_passes: Callable[..., None]
) -> None:
    """Fault: the first of eleven requests that share 1,000 tokens failed, and the ten others restored none of them."""
    prefix = tokens(1000, 1)
    data = dataset([*prefix, 5, 6], *([*prefix, 10 + k, 7] for k in range(10)))
    plan = make_plan(data, Planner(50, "file"))
    first, *others = requests_of(data, plan)
    engine = OpenedEngine(
        tiny_checkpoint(family), block_size=50, policy="planned", max_running=4, pool_size_bytes=ROOMY
    )
    books = Books(engine)
    failing_passes(lambda number: number == 0 and way == "with its pass")
    results = by_id(list(engine.run([replace(first, **WAYS[way]), *others])))
    assert results.pop("0").error is not None
    assert all(result.error is None for result in results.values())
    was_computed = "token" in way or "scoring" in way or "answers" in way
    found = sorted((one.cached_tokens, one.ideal_cached_tokens, one.miss_reason) for one in results.values())
    assert found == [(1000, 1000, None) if was_computed else (0, 0, "cold")] + 9 * [(1000, 1000, None)]
    books.balance()
    assert not len(books.pool)
    engine.close()


@pytest.mark.parametrize("max_running", [1, 3, 8])
@pytest.mark.parametrize("family", ["mamba", "jamba"])
def test_whatever_fails_the_rest_is_reused(
    family: str, max_running: int, tiny_checkpoint: Callable[..., Path], failing_passes: Callable[..., None]
) -> None:
    """Catches a failure, of any kind and at any place of a random forest, that costs the others more prompt tokens than
    the failed requests were to compute themselves, changes an answer, or leaves a state held without a reader."""
    failing_passes(lambda number: source.random() < share)
    for seed in random.sample(range(10**6), tries(40)):
        source, share = random.Random(seed), 0.0
        data = within_vocabulary(random_dataset(seed), VOCAB)
        block_size = source.choice([1, 3])
        plan = make_plan(data, Planner(block_size, source.choice(ORDERS)))
        options: dict[str, Any] = {"max_running": max_running, "max_batch_tokens": 23, "pool_size_bytes": ROOMY}
        cold = Engine(tiny_checkpoint(family), policy="none", **options)
        expected = serve(cold, requests_of(data, plan))
        share = source.choice([0.0, 0.1, 0.4])
        bad = [WAYS["at its first token"], WAYS["at submission"], {}, {}, {}]
        engine = OpenedEngine(tiny_checkpoint(family), block_size=block_size, policy="planned", **options)
        books = Books(engine)
        requests = [replace(request, **source.choice(bad)) for request in requests_of(data, plan)]
        results = by_id(list(engine.run(requests)))
        lost = own = 0
        for name, result in results.items():
            todo, length = plan.requests[int(name)], result.prompt_tokens
            if result.error is not None:
                own += length - todo.resume_at
                continue
            lost += max(0, todo.resume_at - result.cached_tokens)
            assert (result.token_ids, result.logprobs) == (expected[name].token_ids, expected[name].logprobs)
        assert lost <= own, (data.where, lost, own)
        books.balance()
        assert not any(snapshot.reads_left for snapshot in books.pool), data.where
        engine.close()


class Shelf:
    """A handover of made-up sequences of 20 tokens. held: key -> readers of each snapshot in memory."""

    def __init__(self, **held: int) -> None:
        self.held = {key.encode(): reads for key, reads in held.items()}
        self.pending = PendingSnapshots()
        self.made: list[Sequence] = []
        snapshots: Any = self
        self.handover = PendingHandover(self.pending, snapshots, self.made.__getitem__)

    def holds(self, key: bytes) -> bool:
        return key in self.held

    def add_reads(self, key: bytes, reads: int) -> None:
        self.held[key] += reads

    def submit(self, plan: RequestPlan | None) -> Sequence:
        """A sequence whose snapshots are pending; the key of position 8 is k8 in each."""
        sequence = make_sequence(Request("", [1] * 20, plan=plan), 9, None)
        sequence.number, retention = len(self.made), retention_of("planned", sequence.request, 20, 4)
        sequence.retention = retention
        sequence.keys = {position: b"k%d" % position for position in retention.key_positions()}
        sequence.source = sequence.keys.get(retention.plan.resume_at, b"")
        retention.follow(sequence.keys, self.handover.leader_of)
        positions = retention.pending_at_submission()
        self.pending.add(sequence.number, [(position, sequence.keys[position]) for position in positions])
        self.made.append(sequence)
        return sequence

    def fail(self, sequence: Sequence) -> None:
        self.handover.record(sequence)

    def publishers(self, *positions: int) -> list[list[int]]:
        return [list(self.pending.publishers(b"k%d" % position).values()) for position in positions]


def kept_of(sequence: Sequence) -> dict[int, int]:
    """The positions that a sequence is to publish, with their readers."""
    return {position: sequence.retention.reads(position) for position in sequence.retention.kept(0, 20)}


FAILS = RequestPlan(resume_at=4, keep=(8, 12), reads=(2, 1), ideal=5)
AT_8, AT_12 = RequestPlan(resume_at=8, ideal=9), RequestPlan(resume_at=12, ideal=13)


def test_the_reader_of_the_longest_comes_first() -> None:
    """Fault: the reader of 12 does not resume where the failed request would have, or leaves 8 to be computed again."""
    shelf = Shelf(k4=1)
    first, *others = (shelf.submit(plan) for plan in (FAILS, AT_12, AT_8, AT_8))
    assert shelf.publishers(4, 8, 12) == [[], [0], [0]] and len(shelf.pending) == 2
    shelf.fail(first)
    assert (first.source, len(shelf.pending)) == (b"", 0)
    shelf.handover.take_over(others[0])
    assert kept_of(others[0]) == {8: 2} and shelf.publishers(8, 12) == [[1], []]
    assert (others[0].source, list(others[0].keys)) == (b"k4", [4, 8, 12])
    assert (others[0].retention.plan.ideal, others[0].retention.leader) == (5, -1)
    for other in others[1:]:
        assert other.retention.waits(other.keys, shelf.pending, lambda: 0), "taken over, so it is waited for"
        shelf.handover.take_over(other)
        assert (kept_of(other), other.source) == ({}, b"k8")
    shelf.pending.remove(1)
    assert not len(shelf.pending) and shelf.held == {b"k4": 1}


def test_the_reader_of_the_longest_comes_last() -> None:
    """Fault: it does not wait for the part that another reader publishes, or is not counted as a reader of that."""
    shelf = Shelf(k4=1)
    first, last, other, third = (shelf.submit(plan) for plan in (FAILS, AT_12, AT_8, AT_8))
    shelf.fail(first)
    assert not shelf.handover.must_wait(last), "it may publish all of it itself"
    shelf.handover.take_over(other)
    assert (kept_of(other), other.source, kept_of(third)) == ({8: 2}, b"k4", {})
    assert shelf.handover.must_wait(last) and not shelf.handover.must_wait(third)
    shelf.pending.remove(other.number)
    assert not shelf.handover.must_wait(last)
    shelf.handover.take_over(last)
    assert (kept_of(last), last.source, last.retention.leader) == ({}, b"k8", 0)
    assert (list(last.keys), last.retention.plan.ideal) == ([4, 8, 12], 5)
    assert not shelf.handover.failed and shelf.held == {b"k4": 1}


def test_what_future_runs_get_is_handed_over_as_far_as_the_reader_computes() -> None:
    """Fault: a snapshot for future runs is lost with the request, or is promised beyond the reader's own prefix."""
    shelf = Shelf()
    first, reader = shelf.submit(RequestPlan(keep=(8,), reads=(1,), keep_for_later=(4, 12))), shelf.submit(AT_8)
    shelf.fail(first)
    shelf.handover.take_over(reader)
    assert (kept_of(reader), shelf.publishers(4, 8, 12)) == ({4: 0}, [[1], [], []])
    assert [reader.retention.is_for_later(position) for position in (4, 8, 12)] == [True, False, False]
    assert not shelf.handover.failed


def test_a_snapshot_that_another_request_published_is_read_there() -> None:
    """Fault: readers are missing of a snapshot that two requests made, so that it goes too early; or the snapshot that
    the failed one would have read is held for ever."""
    shelf = Shelf(k4=2)
    first, reader = shelf.submit(FAILS), shelf.submit(AT_12)
    shelf.fail(first)
    shelf.held |= {b"k8": 5, b"k12": 3}
    shelf.handover.take_over(reader)
    assert shelf.held == {b"k4": 2, b"k8": 5, b"k12": 4} and (kept_of(reader), reader.source) == ({}, b"k12")
    shelf.handover.take_over(shelf.submit(AT_8))
    assert shelf.held == {b"k4": 1, b"k8": 7, b"k12": 4} and not shelf.handover.failed


@pytest.mark.parametrize(("is_running", "readers"), [(True, [{12: 1}]), (False, [{8: 2, 12: 1}])])
def test_readers_are_counted_once(is_running: bool, readers: list[dict[int, int]]) -> None:
    """Fault: a snapshot in memory counts the readers of a request that had begun a second time, or not at all those of
    one that had not."""
    shelf = Shelf(k8=2)
    first = shelf.submit(FAILS)
    first.slot = 0 if is_running else -1
    shelf.fail(first)
    assert [failed.reads for failed in shelf.handover.failed] == readers
    shelf.fail(first)
    shelf.fail(shelf.submit(None))
    shelf.fail(shelf.submit(RequestPlan(keep_for_later=(16,))))
    assert len(shelf.handover.failed) == 1 and len(shelf.pending) == 0, "no request waits for the others"


def test_a_reader_counts_where_its_own_publisher_does() -> None:
    """Catches a snapshot that is held for ever or dropped early, since one of two publishers has the other's reader:
    one that failed before the reader came, one that waits while the other's snapshot is held; or a snapshot that is
    kept, or published, for a reader that has failed."""
    shelf = Shelf(k4=2)
    first, second = shelf.submit(FAILS), shelf.submit(FAILS)
    shelf.handover.add_readers(b"k4", -1)
    assert shelf.held == {b"k4": 1}
    shelf.fail(second)
    reader = shelf.submit(AT_8)
    assert reader.retention.leader == second.number and not reader.retention.waits(
        reader.keys, shelf.pending, lambda: 0
    )
    shelf.held[b"k8"] = 3
    for leader in (0, None, None, 7, 7):
        shelf.handover.add_readers(b"k8", -1, leader)
    assert (kept_of(first), shelf.held) == ({8: 1, 12: 1}, {b"k4": 1, b"k8": 1}), "held by a third publisher"
    assert [failed.reads for failed in shelf.handover.failed] == [{8: 0, 12: 1}]
    shelf.handover.add_readers(b"k12", 2)
    shelf.handover.add_readers(b"k16", 1)
    assert [failed.reads for failed in shelf.handover.failed] == [{8: 0, 12: 3}] and kept_of(first) == {8: 1, 12: 1}
    shelf.handover.add_readers(b"k12", -3)
    assert not shelf.handover.failed and shelf.held[b"k4"] == 0, "no request is left to resume from k4 for it"
    shelf.handover.add_readers(b"k12", -1)
    shelf.handover.add_readers(b"k8", -1, 0)
    assert kept_of(first) == {}


def test_the_end_of_a_run_drops_all_readers() -> None:
    """Fault: a snapshot is held, after an abort, for requests that were dropped."""
    shelf = Shelf(k4=1)
    shelf.fail(shelf.submit(FAILS))
    shelf.fail(shelf.submit(RequestPlan(keep=(16,), reads=(1,))))  # which resumes from none
    shelf.handover.clear()
    assert not shelf.handover.failed and shelf.held == {b"k4": 0}
