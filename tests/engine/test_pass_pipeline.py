"""How many passes are in flight, which is begun ahead, and what an ended sequence leaves in them."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from apcbatch.engine import pipeline
from apcbatch.engine.pipeline import PassPipeline
from tests.effort import table


class FakePass:
    """A pass of named chunks. before: the pass whose tokens it needs."""

    failed = False

    def __init__(self, model: Any, arena: Any, decodes: Any, chunks: list[Any], before: FakePass | None = None) -> None:
        self.chunks, self.before = list(chunks), before

    def remove(self, sequence: str) -> list[Any]:
        gone = [chunk for chunk in self.chunks if chunk.sequence == sequence]
        self.chunks = [chunk for chunk in self.chunks if chunk.sequence != sequence]
        return gone


def chunk(sequence: str, end: int) -> Any:
    return SimpleNamespace(sequence=sequence, end=end)


def pipeline_of(monkeypatch: pytest.MonkeyPatch, num_devices: int, runs_ahead: bool = False) -> tuple[Any, Any]:
    """(a pipeline, its scheduler, which schedules what is put into `coming`)."""
    monkeypatch.setattr(pipeline, "Pass", FakePass)
    scheduler = SimpleNamespace(coming=[], ends=[], prompts=False, foreseen=[])

    def schedule(ends: dict[str, int]) -> tuple[list[Any], list[str]]:
        scheduler.ends.append(ends)
        return (scheduler.coming.pop(0), ["never"]) if scheduler.coming else ([], [])

    scheduler.schedule = schedule
    scheduler.add_drafts = lambda chunks: None
    scheduler.has_prompts = lambda ends: scheduler.prompts
    scheduler.foresee = lambda chunks, ends: scheduler.foreseen
    counters = SimpleNamespace(seconds={"store": 0.0})
    pool = SimpleNamespace(passes_begun=lambda: None)
    names = {"model": None, "arena": None, "scheduler": scheduler, "pool": pool, "counters": counters}
    scheduler.counters = counters
    made: Any = PassPipeline(**names, num_devices=num_devices, runs_ahead=runs_ahead)
    return made, scheduler


@table("num_devices, prompts, begun", [(1, True, 1), (2, False, 2), (2, True, 3), (3, False, 3), (3, True, 4)])
def test_each_device_has_a_pass_and_prompts_one_more(
    num_devices: int, prompts: bool, begun: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a device that waits for the host, and passes that pile up before it."""
    made, scheduler = pipeline_of(monkeypatch, num_devices)
    scheduler.prompts, scheduler.coming = prompts, [[chunk(f"{number}", number)] for number in range(9)]
    never, launching_s = made.begin_passes()
    assert len(made) == begun == len(never) and launching_s >= 0
    assert made.ends == {f"{number}": number for number in range(begun)}
    assert [len(ends) for ends in scheduler.ends] == list(range(begun))


def test_an_ended_sequence_leaves_no_empty_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a pass without chunks that is read, and another sequence's chunks that go with an ended one's."""
    made, scheduler = pipeline_of(monkeypatch, 3)
    a1, b1, a2, c3 = chunk("a", 1), chunk("b", 1), chunk("a", 2), chunk("c", 3)
    scheduler.coming = [[a1, b1], [a2], [c3]]
    made.begin_passes()
    assert made.remove("x") == [] and len(made) == 3
    assert made.remove("a") == [a1, a2]
    assert len(made) == 2 and made.ends == {"b": 1, "c": 3}
    assert made.next().chunks == [b1] and made.next().chunks == [c3] and not made


def test_the_next_pass_is_begun_before_the_last_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a device that idles while tokens are read, and a pass begun on one that has failed."""
    for runs_ahead, failed, begun in ((True, False, 1), (True, True, 0), (False, False, 0)):
        made, scheduler = pipeline_of(monkeypatch, 1, runs_ahead)
        scheduler.coming = [[chunk("a", 1)]]
        made.begin_passes()
        monkeypatch.setattr(FakePass, "failed", failed)
        scheduler.foreseen = [chunk("a", 2)]
        current = made.next()
        assert [chunk.end for chunk in current.chunks] == [1] and len(made) == begun
        assert not begun or made.next().before is current


def test_launching_is_told_apart_from_scheduling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches seconds of a launch, the search for drafts among them, that count for nothing or for the store."""
    clock = itertools.count()
    monkeypatch.setattr(pipeline.time, "perf_counter", lambda: float(next(clock)))
    made, scheduler = pipeline_of(monkeypatch, 1)
    scheduler.coming = [[chunk("a", 1)]]
    scheduler.add_drafts = lambda chunks: next(clock)
    assert made.begin_passes() == (["never"], 2.0)
    assert scheduler.counters.seconds == {"store": 1.0}
