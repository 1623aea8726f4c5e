"""The sameness property as a whole: random runs of the command line against cold ones, bit for bit."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from apcbatch.sampling import SETTINGS
from tests.effort import is_full, tries
from tests.soak.__main__ import repeat_command
from tests.soak.compare import Difference
from tests.soak.play import Player, Tally
from tests.soak.ways import make_draw

pytestmark = pytest.mark.slow
NUM_DRAWS, NUM_KILLED = tries(30), tries(10)


@pytest.fixture(scope="module")
def player(tmp_path_factory: pytest.TempPathFactory) -> Player:
    """One player, so that the checkpoints are made once."""
    return Player(tmp_path_factory.mktemp("soak"))


def play(player: Player, seeds: list[int], kill: bool) -> Tally:
    """The tally of all draws; a failure says how to repeat the one that differs."""
    tally = Tally()
    for seed in seeds:
        try:
            tally.add(player.play(make_draw(seed, kill)))
        except Difference as difference:
            pytest.fail(f"{difference}\nrepeat with: {repeat_command(seed, kill, 'cpu')}", pytrace=False)
    return tally


def fresh_seeds(count: int) -> list[int]:
    return [random.randrange(1 << 31) for _ in range(count)]


def test_random_runs_answer_as_a_cold_run_does(player: Player) -> None:
    """Fault: any option, order, store, pool, thread or torn output that changes a bit, loses or doubles a request."""
    tally = play(player, fresh_seeds(NUM_DRAWS), kill=False)
    while not tally.cached_tokens and tally.draws < 5 * NUM_DRAWS:  # a few draws may all do without a cache
        tally.add(play(player, fresh_seeds(1), kill=False))
    assert tally.cached_tokens > 0, "nothing was restored in any run: nothing was tested"
    if is_full():
        assert 0 < tally.accepted_tokens < tally.drafted_tokens, "no drafted token was accepted, or none rejected"


def test_every_setting_is_drawn_at_some_time() -> None:
    """Fault: a setting that no random run has, so that a bit may depend on it unnoticed."""
    draws = [make_draw(seed, kill=False) for seed in fresh_seeds(60)]
    bodies = [line.get("body", line) for draw in draws for line in map(read, draw.lines)]
    drawn = {name for body in bodies for name in body} | {name for draw in draws for name in draw.generation}
    drawn |= {"structure"} if any("guided_json" in body for body in bodies) else set()
    assert {setting.line or setting.name for setting in SETTINGS.values()} <= drawn
    ways = [part.options for draw in draws for way in draw.ways for part in way.parts]
    assert {"draft", "draft_from", "draft_memory"} <= {name for options in ways for name in options}


def read(line: str) -> dict[str, Any]:
    """A line's object; empty for a torn one."""
    try:
        return json.loads(line)
    except ValueError:
        return {}


def test_killed_runs_answer_as_a_cold_run_does(player: Player) -> None:
    """Fault: SIGKILL at any moment and --resume with other options, on the store that the killed run left."""
    play(player, fresh_seeds(NUM_KILLED), kill=True)


def test_a_difference_of_one_bit_is_told(player: Player, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: the comparison overlooks a difference, or does not say how to repeat the draw."""
    from apcbatch.engine.counters import Counters

    add_pass, counted = Counters.add_pass, []

    def perturbed(counters: Counters, chunks: list, seconds: float) -> None:
        if not any(one is counters for one in counted):
            counted.append(counters)
        for chunk in chunks:
            if chunk.sequence.logprobs and counters is not counted[0]:  # of another engine than the cold run's
                chunk.sequence.logprobs[-1] *= 1 + 2**-23
        add_pass(counters, chunks, seconds)

    monkeypatch.setattr(Counters, "add_pass", perturbed)
    with pytest.raises(Difference, match=r"differs from the cold run[^$]*logprobs, cold run[^$]*APCBATCH_ISA="):
        player.play(make_draw(7, kill=False))
