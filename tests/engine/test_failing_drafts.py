"""Requests that fail, end or are dropped with drafts in their passes: they cost others no bit, and no slot is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apcbatch import Request
from apcbatch.engine import step
from apcbatch.engine.sampler import NOT_FINITE
from apcbatch.engine.sequence import Chunk
from apcbatch.engine.step import Pass
from apcbatch.errors import RequestError
from tests.engine.runs import by_id, tokens, told
from tests.engine.scripted_drafts import STEADY, accepted, drafted, drafting, known, right, without_drafts, wrong
from tests.engine.test_given_back import Books


class Raises:
    """A constraint that raises at the `most`-th token, when it is asked or when it takes one."""

    def __init__(self, most: int, where: str, error: Exception) -> None:
        self._left, self._where, self._error = most, where, error

    def fill(self, mask: np.ndarray) -> bool:
        if self._where == "fill" and self._left == 1:
            raise self._error
        return False

    def accept(self, token: int) -> bool:
        self._left -= 1
        if not self._left:
            raise self._error
        return False


def four_requests(max_tokens: int) -> list[Request]:
    """Prompts of four lengths that share no token."""
    return [
        Request(str(number), tokens(20 + number, number), max_tokens=max_tokens, ignore_eos=True, logprobs=True)
        for number in range(4)
    ]


def spread(num_stages: int, stages: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run engines as these pipeline stages, which write the states of drafted tokens."""
    if num_stages > 1:
        stages(num_stages)
        monkeypatch.setattr("apcbatch.engine.parts.writes_draft_states", lambda device: True)


@pytest.mark.drawn(6)
@pytest.mark.parametrize("where", ["fill", "accept"])
@pytest.mark.parametrize("error", [RequestError("invalid_request", "no"), ValueError("broken")], ids=["told", "broken"])
def test_a_request_that_fails_at_a_drafted_token(error: Exception, where: str, untied_folder: Path, way: str) -> None:
    """Fault: an error at a drafted position that ends other requests too, changes their answers, or loses what the
    request held."""
    requests = four_requests(30)
    expected = without_drafts(untied_folder, requests)
    bad = replace(requests[1], constraint=lambda: Raises(6, where, error))
    engine = drafting(untied_folder, right(known(requests, expected), 4), policy="all", max_running=4, **STEADY)
    books = Books(engine)
    found = by_id(engine.run([requests[0], bad, *requests[2:]]))
    assert found["1"].error is not None
    assert found["1"].error.code == ("invalid_request" if isinstance(error, RequestError) else "internal")
    assert all(told(found[name]) == told(expected[name]) for name in "023")
    books.balance()
    assert told(by_id(engine.run(requests))["1"]) == told(expected["1"])
    engine.close()


@pytest.mark.drawn(5)
@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("steps", [1, 3, 5])
def test_a_run_given_up_with_drafts(
    steps: int, num_stages: int, untied_folder: Path, stages: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: slots of drafts that are lost when a run is given up with passes in flight, or an engine that answers
    otherwise after that."""
    spread(num_stages, stages, monkeypatch)
    requests = four_requests(60)
    expected = without_drafts(untied_folder, requests)
    engine = drafting(untied_folder, right(known(requests, expected), 4), policy="all", max_running=4, **STEADY)
    books = Books(engine)
    begun, run_pass = [], step.run_pass
    monkeypatch.setattr(step, "run_pass", lambda *given: begun.append(given[2]) or run_pass(*given))
    for request in requests:
        engine.submit(request)
    for _ in range(steps):
        engine.step()
    while num_stages > 1 and not any(chunk.draft and chunk.sequence in engine.pipeline.ends for chunk in begun[-1]):
        assert engine.num_unfinished, "no draft was in flight"
        engine.step()
    engine.abort()
    books.balance()
    found = by_id(engine.run(requests))
    assert all(told(found[one.id]) == told(expected[one.id]) for one in requests)
    engine.close()


@pytest.mark.drawn(4)
@pytest.mark.parametrize("is_wrong", [True, False], ids=["behind a rejected token", "of an accepted token"])
def test_logits_that_are_not_finite(
    is_wrong: bool, untied_folder: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a NaN after tokens that the answer does not have fails the request, or one after its own tokens does
    not."""
    requests = [Request(str(number), tokens(20, number), max_tokens=30, ignore_eos=True) for number in range(2)]
    expected = without_drafts(untied_folder, requests)
    draft = right(known(requests, expected), 4)

    def spoilt(prompt: list[int], done: list[int]) -> Sequence[int]:
        drafted = list(draft(prompt, done))
        return [*drafted[:2], *map(wrong, drafted[2:])] if is_wrong else drafted

    read = Pass.read

    def with_nan(current: Pass) -> Any:
        return [
            (chunk, [row._replace(likeliest=NOT_FINITE) if place > 2 else row for place, row in enumerate(rows)])
            if chunk.sequence.request.id == "0" else (chunk, rows)
            for chunk, rows in read(current)
        ]  # fmt: skip

    monkeypatch.setattr(Pass, "read", with_nan)
    engine = drafting(untied_folder, spoilt, policy="all", **STEADY)
    found = by_id(engine.run(requests))
    assert told(found["1"]) == told(expected["1"])
    if is_wrong:
        assert told(found["0"]) == told(expected["0"]) and accepted(engine) < drafted(engine)
    else:
        assert found["0"].error is not None and found["0"].error.code == "non_finite"
    engine.close()


@pytest.mark.drawn(3)
@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_pass_with_drafts_that_fails(
    num_stages: int, untied_folder: Path, way: str, stages: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: slots of drafts lost with a pass that failed; kept inputs of the pass before it replayed for the next
    requests."""

    spread(num_stages, stages, monkeypatch)
    requests = four_requests(60)
    expected = without_drafts(untied_folder, requests)
    run_pass, failed = step.run_pass, []

    def fails_once(model: Any, decodes: Any, chunks: list[Chunk], before: Any = None) -> Any:
        if not failed and any(chunk.draft and chunk.begin > 30 for chunk in chunks):
            failed.extend(chunk.sequence.request.id for chunk in chunks)
            raise RuntimeError("the pass broke")
        return run_pass(model, decodes, chunks, before)

    monkeypatch.setattr(step, "run_pass", fails_once)
    engine = drafting(untied_folder, right(known(requests, expected), 4), policy="all", max_running=4, **STEADY)
    books = Books(engine)
    found = by_id(engine.run(requests))
    assert failed and {name for name, one in found.items() if one.error is not None} == set(failed)
    books.balance()
    found |= by_id(engine.run([one for one in requests if one.id in failed]))
    assert all(told(found[one.id]) == told(expected[one.id]) for one in requests)
    books.balance()
    engine.close()
