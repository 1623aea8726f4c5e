"""How many tokens are restored, with the exact numbers of the acceptance cases 8 to 13, 15 and 16."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from apcbatch import Engine, Request, Result
from tests.effort import table
from tests.engine.runs import tokens
from tests.tiny import VOCAB

Prompt = list[int]


@pytest.fixture
def engine_of(folder: Path, open_engine: Callable[..., Engine]) -> Callable[..., Engine]:
    """An engine of a one-state or a hybrid model."""
    return partial(open_engine, folder)


def serve(engine: Engine, prompt: Prompt, max_tokens: int = 1) -> Result:
    """One request, by itself."""
    (result,) = engine.run([Request("r", prompt, max_tokens=max_tokens, ignore_eos=True)])
    assert result.error is None
    assert result.cached_tokens + result.computed_tokens == result.prompt_tokens == len(prompt)
    return result


PREFIX, LONG, SHORT, HEAD = tokens(1000, 1), tokens(2000, 2), tokens(15, 10), tokens(300, 8)
IMAGES = [token for image in range(1, 5) for token in [image] * 700]
TAIL = tokens(400, 5)
AGENT = IMAGES + tokens(3382 - len(IMAGES) - len(TAIL), 6) + TAIL
OTHER_AGENT = AGENT[:1700] + [AGENT[1700] % (VOCAB - 1) + 1] + tokens(4584 - 1701 - len(TAIL), 7) + TAIL
TOOLS = [tokens(50, 100 + i) for i in range(12)]
# From one turn to the next, the first difference is where one more tool message has become a stub.
ELIDED = [HEAD + sum((tokens(4, 9) if i < turn - 5 else TOOLS[i] for i in range(turn)), []) for turn in range(6, 12)]


@pytest.mark.drawn(2)
@table("options, prompts, cached, last", [
    # A hit covers no whole prompt, one token of which is always computed, and stops no block short.
    *(({}, [tokens(length, length)] * 2, [0, cached], None)
      for length, cached in ((15, 0), (16, 0), (17, 16), (1000, 992), (1008, 992), (1024, 1008), (1025, 1024))),
    # What is shared is reused from its last boundary, where one state a prompt would not do.
    ({}, [PREFIX + tokens(100, 10 + i) for i in range(5)], [0, 992, 992, 992, 992], None),
    ({}, [LONG, *(LONG[:1500] + [0] + tokens(499, 20 + i) for i in range(4))], [0, 1488, 1488, 1488, 1488], None),
    # An incremental agent diverges in the middle, and resumes at the third boundary.
    ({"block_size": 544}, [AGENT, AGENT, OTHER_AGENT, OTHER_AGENT], [0, 3264, 1632, 4352], None),
    # An agent that rewrites its history is not sent back to zero.
    ({}, ELIDED, [0] + [(300 + 4 * k) // 16 * 16 for k in range(1, 6)], None),
    # A prefix shorter than one block, a fork below the first boundary and a hit short of the ideal say so.
    ({}, [SHORT], [0], (0, "cold", "cold")),
    ({}, [SHORT] * 2, [0, 0], (14, "shorter_than_block", "shorter_than_block (minimum 16)")),
    ({"block_size": 256}, [tokens(38, 11) + [n] + tokens(300, 11 + n) for n in (1, 2)], [0, 0],
     (38, "diverged", "diverged at token 38 (first boundary 256)")),
    ({}, [tokens(100, 14)] * 2, [0, 96], (99, "below_grid", "below_grid (ideal 99, boundary 96)")),
    ({}, [tokens(100, 14), tokens(100, 14)[:97]], [0, 96], (96, None, None)),
    ({"policy": "none"}, [tokens(200, 17)] * 2, [0, 0], (199, "disabled", "disabled (the policy keeps nothing)")),
    # Without a plan, the second prompt that leaves the long prompt keeps the boundary before its fork.
    ({"policy": "planned"}, [tokens(100, 20), *(tokens(100, 20)[:50] + [n] + tokens(60, 20 + n) for n in range(3))],
     [0, 0, 48, 48], None),
])  # fmt: skip
def test_as_many_tokens_are_restored(
    options: dict[str, Any], prompts: list[Prompt], cached: list[int], last: tuple[Any, ...] | None, engine_of
) -> None:
    """Catches reuse that restarts from the end of a prompt only, a hit that is lost or too long, and a silent zero."""
    engine = engine_of(**options)
    served = [serve(engine, prompt) for prompt in prompts]
    assert [result.cached_tokens for result in served] == cached
    assert last in (None, (served[-1].ideal_cached_tokens, served[-1].miss_reason, served[-1].miss_detail))
    if options.get("policy") == "none":
        assert served[-1].cached_from == "none" and engine.boundaries(prompts[-1]) == []
    if options.get("policy") == "planned":
        assert engine.boundaries(prompts[1]) == [48, 96]
    engine.close()


@pytest.mark.drawn(1)
def test_policy_last_keeps_one_boundary_a_prompt(engine_of) -> None:
    """Catches `last` keeping more than the end of each prompt and answer."""
    engine = engine_of(policy="last")
    prompt = tokens(1000, 15)
    first = serve(engine, prompt, max_tokens=100)
    assert engine.boundaries(prompt + first.token_ids) == [992, 1088]
    assert serve(engine, prompt).cached_tokens == 992
    fork = serve(engine, prompt[:500] + [0] + tokens(99, 16))
    assert (fork.cached_tokens, fork.miss_reason) == (0, "diverged")


@pytest.mark.drawn(2)
@pytest.mark.parametrize("policy", ["none", "all"])
def test_the_ideal_counts_what_runs_at_the_same_time(policy: str, engine_of) -> None:
    """Catches an ideal that falls with the number of requests that run together: it is of prompts, not of timing."""
    prefix = tokens(10, 7)  # shorter than a block: no request waits for it
    requests = [Request(str(i), prefix + tokens(20, 70 + i), max_tokens=1) for i in range(6)]
    engine = engine_of(policy=policy, max_running=6)
    ideals = {result.id: result.ideal_cached_tokens for result in engine.run(requests)}
    assert sorted(ideals.values()) == [0, 10, 10, 10, 10, 10]
