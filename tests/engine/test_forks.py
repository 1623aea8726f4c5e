"""Several answers from one prefill: each is what a request of its own with the same key gets, bit for bit, with
any number of slots and pages, and nothing stays held."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apcbatch import Engine, Request, Result
from apcbatch.engine import step
from apcbatch.engine.sampler import greedy
from tests.effort import tries
from tests.engine.opened import OpenedEngine
from tests.engine.runs import by_id, serve, tokens, told
from tests.engine.test_given_back import Books

ROOMY = 16 << 20


def alone(requests: list[Request]) -> list[Request]:
    """Each answer as a request of its own that draws from the same stream."""
    names = [
        (request, request.id + (f"\0{answer}" if answer else "")) for request in requests for answer in range(request.n)
    ]
    return [replace(request, id=name, n=1) for request, name in names]


def check_same(requests: list[Request], found: dict[str, Result], expected: dict[str, Result]) -> None:
    for request in requests:
        result = found[request.id]
        assert result.error is None, result.error
        names = [request.id] + [f"{request.id}\0{answer}" for answer in range(1, request.n)]
        assert told(result) == [one for name in names for one in told(expected[name])]
        assert result.cached_tokens + result.computed_tokens == result.prompt_tokens == len(request.token_ids)


def several(max_tokens: int = 9) -> list[Request]:
    """Prompts that share prefixes and repeat, each with 1 to 5 answers; some answers end with their first token."""
    base = tokens(70, 1)
    prompts = [base + tokens(30, 2), base + tokens(50, 3), base, tokens(64, 4), base, base + tokens(1, 5), tokens(3, 6)]
    return [
        Request(
            str(number),
            prompt,
            max_tokens=1 + (max_tokens * number) % 13,
            temperature=0.5 + number / 4,
            seed=number,
            logprobs=number % 2 == 0,
            top_logprobs=3 * (number % 4 == 0),
            presence_penalty=number / 3,
            stop_token_ids=[token for token in range(1, 60) if token % 4 == number % 4],
            n=1 + (3 * number) % 5,
        )
        for number, prompt in enumerate(prompts)
    ]


@pytest.mark.drawn(2)
@pytest.mark.slow
def test_answers_equal_those_of_requests_alone(folder: Path, open_engine: Callable[..., Engine]) -> None:
    """Catches a fork that reads a state which another one has written to, a page that two of them write, a stream of
    numbers that depends on the order of answers, and answers that wait for each other for ever."""
    requests = several()
    expected = serve(open_engine(folder, policy="none"), alone(requests))
    for policy, max_running in (("all", 1), ("all", 16), ("last", 2), ("planned", 3), ("none", 16), ("none", 1)):
        engine = open_engine(folder, policy=policy, max_running=max_running)
        books = Books(engine)
        for _ in range(2):  # the second time the prompts are cached
            check_same(requests, by_id(engine.run(requests)), expected)
            books.balance()


@pytest.mark.slow
@settings(max_examples=tries(80))
@given(data=st.data())
def test_random_schedules(data: st.DataObject, tiny_checkpoint: Callable[..., Path]) -> None:
    """Catches a deadlock, a page or a slot that is lost, and an answer that depends on what ran beside it, with random
    sizes of everything and pools that hold little more than one request."""
    folder = tiny_checkpoint("jamba")
    small = st.integers(1, 6)
    requests = [
        Request(
            str(number),
            tokens(data.draw(st.sampled_from([3, 63, 64, 65, 100, 130])), data.draw(small)),
            max_tokens=data.draw(st.sampled_from([1, 2, 9, 70])),
            temperature=data.draw(st.sampled_from([0.0, 0.7, 1.5])),
            n=data.draw(st.integers(1, 7)),
            ignore_eos=data.draw(st.booleans()),
            logprobs=True,
            keep_answer=data.draw(st.booleans()),
        )
        for number in range(data.draw(small))
    ]
    reference = Engine(folder, policy="none", pool_size_bytes=ROOMY)
    page_bytes, state_bytes = reference.footprint.page_bytes, reference.footprint.state_bytes
    expected = by_id(reference.run(alone(requests)))
    pages = data.draw(st.integers(3, 8))
    engine = OpenedEngine(
        folder,
        block_size=data.draw(st.sampled_from([1, 16, 64])),
        policy=data.draw(st.sampled_from(["all", "last", "none"])),
        max_running=data.draw(small),
        max_batch_tokens=data.draw(st.sampled_from([5, 64, 2048])),
        pool_size_bytes=pages * page_bytes + data.draw(small) * state_bytes,
        runs_ahead=data.draw(st.booleans()),
    )
    books = Books(engine)
    found = by_id(engine.run(requests))
    for name, result in found.items():
        if result.error is not None:
            assert result.error.code == "out_of_memory" and "does not fit" in str(result.error)
            request = requests[int(name)]
            most = -(-(len(request.token_ids) + request.max_tokens) // 64) + 2
            assert most > books.pages.num_pages, f"{name} would have fitted"
    answered = [request for request in requests if found[request.id].error is None]
    check_same(answered, found, expected)
    books.balance()
    engine.close()
    reference.close()


@pytest.mark.parametrize("max_running", [2, 8])
def test_a_prompt_is_computed_once(
    max_running: int, tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a prefill for each answer, and a slot that stays empty while answers wait for one."""
    engine = Engine(tiny_checkpoint("jamba"), policy="none", max_running=max_running, pool_size_bytes=ROOMY)
    run_pass, counts = step.run_pass, []

    def count(model: Any, decodes: Any, chunks: list[step.Chunk], before: Any = None) -> Any:
        counts.append([chunk.count for chunk in chunks])
        return run_pass(model, decodes, chunks, before)

    monkeypatch.setattr(step, "run_pass", count)
    request = Request("a", tokens(100, 1), max_tokens=11, temperature=1.0, ignore_eos=True, n=6)
    (result,) = engine.run([request])
    assert counts[0] == [100] and set(sum(counts[1:], [])) == {1}
    assert sum(map(sum, counts)) == 100 + 6 * 10
    assert max(map(len, counts)) == min(max_running, 6)
    assert (result.computed_tokens, [len(answer.token_ids) for answer in result.answers]) == (100, [11] * 6)
    assert len({tuple(answer.token_ids) for answer in result.answers}) == 6
    engine.close()


def test_greedy_answers_are_computed_once(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches equal answers that are each computed, and fewer of them than were asked for."""
    engine = Engine(tiny_checkpoint("mamba"), pool_size_bytes=ROOMY)
    run_pass, sizes = step.run_pass, []
    monkeypatch.setattr(
        step,
        "run_pass",
        lambda model, decodes, chunks, before=None: (
            sizes.append(len(chunks)) or run_pass(model, decodes, chunks, before)
        ),
    )
    (result,) = engine.run([Request("a", tokens(20, 1), max_tokens=5, ignore_eos=True, n=4)])
    assert [answer.token_ids for answer in result.answers] == [result.token_ids] * 4 and set(sizes) == {1}
    engine.close()


@pytest.mark.parametrize("answer", [0, 1, 2])
def test_an_answer_that_breaks_costs_its_own_request_alone(
    answer: int, tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches siblings of a failed answer that run on, or hold what they had, and other requests that fail with it."""
    folder = tiny_checkpoint("jamba")
    engine = OpenedEngine(folder, policy="all", block_size=16, max_running=3, pool_size_bytes=ROOMY)
    books, run_pass = Books(engine), step.run_pass
    bad = Request("bad", tokens(80, 1), max_tokens=40, temperature=1.0, ignore_eos=True, n=3)
    good = Request("good", tokens(70, 2), max_tokens=40, temperature=1.0, ignore_eos=True, n=2)

    def breaks(model: Any, decodes: Any, chunks: list[step.Chunk], before: Any = None) -> Any:
        logits, hidden, _ = run_pass(model, decodes, chunks, before)
        sampled = [chunk.sequence for chunk in chunks if chunk.samples]
        for row, sequence in enumerate(sampled):
            at = sequence.siblings.index(sequence)
            if sequence.request is bad and sequence.num_tokens == 80 + 18 and at == answer:
                logits[row, 3] = float("nan")
        return logits, hidden, greedy(model.backend, logits, False)

    monkeypatch.setattr(step, "run_pass", breaks)
    found = by_id(engine.run([bad, good]))
    assert found["bad"].error is not None and found["bad"].error.code == "non_finite" and len(found) == 2
    books.balance()
    reference = Engine(folder, policy="none", pool_size_bytes=ROOMY)
    check_same([good], found, by_id(reference.run(alone([good]))))
    monkeypatch.setattr(step, "run_pass", run_pass)
    check_same([bad], by_id(engine.run([bad])), by_id(reference.run(alone([bad]))))
    books.balance()
    engine.close()
    reference.close()


@pytest.mark.parametrize("failing", [1, 2, 4, 7, 10])
def test_a_pass_that_fails_fails_each_request_once(
    failing: int, tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a request that fails once for each of its answers, and what a failed pass leaves held."""
    engine = OpenedEngine(tiny_checkpoint("jamba"), policy="all", block_size=16, max_running=3, pool_size_bytes=ROOMY)
    books, run_pass, passes = Books(engine), step.run_pass, []

    def fails_once(*arguments: Any) -> Any:
        passes.append(arguments)
        if len(passes) == failing:
            raise RuntimeError("the pass broke")
        return run_pass(*arguments)

    monkeypatch.setattr(step, "run_pass", fails_once)
    requests = several()
    results = list(engine.run(requests))
    assert sorted(result.id for result in results) == sorted(request.id for request in requests)
    assert any(result.error is not None for result in results)
    books.balance()
    engine.close()


@pytest.mark.parametrize("steps", [0, 2, 5])
def test_given_up_midway(steps: int, tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Catches what waiting answers hold when a run is given up, and an engine that cannot continue after that."""
    engine = OpenedEngine(
        tiny_checkpoint("jamba"), policy="all", block_size=16, max_running=3, max_batch_tokens=48, store=tmp_path,
        pool_size_bytes=ROOMY,
    )  # fmt: skip
    books = Books(engine)
    for request in several():
        engine.submit(request)
    for _ in range(steps):
        engine.step()
    engine.abort()
    books.balance()
    assert all(result.error is None for result in engine.run(several()))
    books.balance()
    engine.close()


def test_a_preempted_answer_starts_from_the_state_at_its_prompts_end(tiny_checkpoint: Callable[..., Path]) -> None:
    """Catches a prompt that is computed again though its state is held for answers that have not begun."""
    folder = tiny_checkpoint("jamba")
    page_bytes = Engine(folder, policy="none", pool_size_bytes=ROOMY).footprint.page_bytes
    engine = Engine(folder, policy="none", max_running=3, pool_size_bytes=12 * page_bytes)
    list(engine.run([Request("a", tokens(320, 1), max_tokens=300, temperature=1.0, ignore_eos=True, n=3)]))
    assert engine.counters.preempted == 1 and 0 < engine.counters.recomputed_tokens < 320
    engine.close()


def test_only_the_first_answer_is_kept(tiny_checkpoint: Callable[..., Path]) -> None:
    """Catches snapshots of every answer where the next request builds on the first one alone."""
    engine = Engine(tiny_checkpoint("jamba"), policy="all", block_size=8, pool_size_bytes=ROOMY)
    prompt = tokens(20, 1)
    (result,) = engine.run([Request("a", prompt, max_tokens=13, temperature=1.0, ignore_eos=True, n=3)])
    held = [engine.boundaries(prompt + answer.token_ids) for answer in result.answers]
    assert held == [[8, 16, 24, 32], [8, 16], [8, 16]]
    engine.close()


class _Counted:
    """Ends an answer after a number of tokens; each one that is made is its answer's own."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.left = 2 + self.made

    def accept(self, token: int, may_end: bool) -> str | None:
        self.left -= 1
        return None if self.left else "enough"


def test_each_answer_has_its_own_ending(tiny_checkpoint: Callable[..., Path]) -> None:
    """Catches an Ending, or its progress, that several answers share."""
    _Counted.made = 0
    engine = Engine(tiny_checkpoint("mamba"), max_running=2, pool_size_bytes=ROOMY)
    request = Request("a", tokens(9, 1), max_tokens=50, temperature=1.0, ignore_eos=True, n=4, ending=_Counted)
    (result,) = engine.run([request])
    assert [len(answer.token_ids) for answer in result.answers] == [3, 4, 5, 6]
    assert {answer.stop_reason for answer in result.answers} == {"enough"}
    engine.close()
