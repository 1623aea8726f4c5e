"""The gate before waiting sequences: few passes have prompts in them, and nobody waits for ever or gets another
answer."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from apcbatch.engine.admission import PrefillAdmission
from apcbatch.engine.engine import Engine
from apcbatch.model.locate import DEMO_DIR
from apcbatch.types import Request
from tests.effort import table
from tests.engine.opened import OpenedEngine

NUM_PLACES = 32


def test_a_gate_without_cost_is_always_open() -> None:
    """Catches a CPU, where a prompt costs what its tokens do, that leaves places empty."""
    gate = PrefillAdmission(NUM_PLACES, cost=0)
    for num_free in (1, 5, 1):
        assert gate.opens(num_free)
        gate.close()


def test_many_free_places_open_it_at_once() -> None:
    """Catches sequences that end together and whose places stay empty."""
    assert PrefillAdmission(NUM_PLACES, cost=3).opens(NUM_PLACES // 4)


def test_a_gate_opens_at_a_fourth_of_the_places_or_at_its_cost() -> None:
    """Fault: a bound that is one off, and places that stood empty before it was closed and are counted again."""
    assert [PrefillAdmission(10, cost=3).opens(num_free) for num_free in (2, 3)] == [False, True]
    gate = PrefillAdmission(8, cost=2)
    for _ in range(2):
        assert [gate.opens(1) for _ in range(17)] == [False] * 15 + [True] * 2
        gate.close()


@table("between", [1, 4, 32, 100, 1000])
def test_no_more_is_lost_than_a_pass_with_prompts_costs(between: int) -> None:
    """Catches a gate that stays closed while more places stand empty than the prompts would have cost, or opens for
    each place that is free. One sequence ends every `between` passes."""
    gate, lost, num_free = PrefillAdmission(NUM_PLACES, cost=3), 0, 0
    for index in range(10 * between):
        num_free += index % between == 0
        if gate.opens(num_free):
            break
        lost += num_free
    assert gate.opens(1), "an open gate stays open until it is closed"
    assert lost < 3 * NUM_PLACES
    assert num_free == NUM_PLACES // 4 or lost + num_free >= 3 * NUM_PLACES
    gate.close()
    assert not gate.opens(1)


def test_prompts_cost_decode_passes_only_where_passes_run_ahead(
    stages: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a CPU that leaves places empty, and a device whose decode passes wait for each prompt."""
    made: list[tuple[int, int]] = []
    monkeypatch.setattr("apcbatch.engine.scheduler.PrefillAdmission", lambda *of: made.append(of))
    for count in (1, 2):
        stages(count)
        Engine(DEMO_DIR, max_running=16).close()
    assert made == [(16, 0), (32, 3)]


class _Watched:
    """An engine on the CPU whose prompts are said to cost so much; it counts the passes with prompts."""

    def __init__(self, cost: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("apcbatch.engine.scheduler.PrefillAdmission", lambda most, _: PrefillAdmission(most, cost))
            self.engine = OpenedEngine(DEMO_DIR, max_running=16, block_size=16, policy="planned")
        self.num_passes = self.num_with_prompts = 0
        scheduler = self.engine.parts.scheduler
        schedule = scheduler.schedule

        def counted(*begun):  # type: ignore[no-untyped-def]
            chunks, impossible = schedule(*begun)
            self.num_passes += 1
            self.num_with_prompts += any(chunk.sequence.in_prefill for chunk in chunks)
            return chunks, impossible

        scheduler.schedule = counted  # type: ignore[method-assign]


@pytest.mark.slow
def test_answers_are_the_same_behind_a_gate() -> None:
    """Catches a gate that changes an answer or strands a request, and one that spares no pass with prompts."""
    source = random.Random(7)
    requests = [
        Request(str(n), [source.randrange(3, 500) for _ in range(source.randint(1, 40))], source.randint(1, 40))
        for n in range(60)
    ]
    runs = {}
    for cost in (0, 3):
        watched = _Watched(cost)
        answers = {result.id: result.token_ids for result in watched.engine.run(requests)}
        assert len(answers) == len(requests)
        runs[cost] = watched, answers
    assert runs[0][1] == runs[3][1]
    (open_, _), (gated, _) = runs[0], runs[3]
    assert gated.num_with_prompts < 0.6 * open_.num_with_prompts
    assert gated.num_passes < 1.3 * open_.num_passes
