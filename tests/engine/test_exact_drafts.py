"""Why drafts change answers elsewhere, case by case: each test writes down the guesses and says where they go wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apcbatch import Engine, Request, Result
from apcbatch.drafts.drafter import Draft
from apcbatch.engine.sampler import NOT_FINITE
from apcbatch.engine.sequence import Chunk
from apcbatch.engine.step import Pass
from apcbatch.errors import RequestError
from tests.engine.runs import by_id, serve, tokens, told
from tests.engine.test_given_back import Books
from tests.tiny import VOCAB

Guess = Callable[[list[int], list[int]], Sequence[int]]  # (prompt, answer so far) -> guesses of what follows
PROMPT = tokens(20, 1)  # with blocks of 16 the next snapshot is after 32 tokens
STEADY: dict[str, Any] = {"block_size": 16, "pool_size_bytes": 16 << 20}


class Scripted:
    """Drafts that a test writes down."""

    def __init__(self, guess: Guess) -> None:
        self.guess, self.held_bytes = guess, 0

    def begin(self, prompt: np.ndarray, references: object) -> ScriptedDrafter:
        return ScriptedDrafter(prompt.tolist(), self.guess)

    def add(self, tokens: np.ndarray, num_prompt: int, begin: int) -> None:
        pass


class ScriptedDrafter:
    def __init__(self, prompt: list[int], guess: Guess) -> None:
        self._prompt, self._guess, self._done = prompt, guess, []

    def append(self, new: np.ndarray) -> None:
        self._done += np.asarray(new).tolist()

    def propose(self, most: int) -> Draft | None:
        guesses = list(self._guess(self._prompt, self._done))[:most]
        return Draft(guesses, [0.99] * len(guesses), "lookup") if guesses else None

    def settle(self, draft: Draft, drafted: int, accepted: int) -> None:
        assert 0 <= accepted <= drafted <= len(draft.tokens)


def drafting(engine: Engine, guess: Guess) -> Engine:
    """An engine that verifies each guess of a script."""
    engine._drafting._drafts = Scripted(guess)
    engine._drafting._costs.of = lambda rows: 1.0  # each guess is worth its row
    return engine


def without_drafts(folder: Path, requests: Sequence[Request], **options: Any) -> dict[str, Result]:
    return serve(Engine(folder, draft=(), **STEADY | options), requests)


def right(answers: dict[tuple[int, ...], Sequence[Sequence[int]]], most: int) -> Guess:
    """The next `most` tokens of the known answer to the prompt that begins as the answer so far."""

    def guess(prompt: list[int], done: list[int]) -> Sequence[int]:
        known = [one for one in answers[tuple(prompt)] if list(one[: len(done)]) == done]
        return known[0][len(done) : len(done) + most] if known else ()

    return guess


def known(requests: Sequence[Request], results: dict[str, Result]) -> dict[tuple[int, ...], list[list[int]]]:
    return {tuple(one.token_ids): [answer.token_ids for answer in results[one.id].answers] for one in requests}


def wrong(token: int) -> int:
    return (token + 1) % VOCAB


def accepted(engine: Engine) -> int:
    return sum(accepted for _, accepted in engine._drafting.counts.values())


def drafted(engine: Engine) -> int:
    return sum(drafted for drafted, _ in engine._drafting.counts.values())


@pytest.fixture(params=["mamba", "jamba"])
def folder(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path]) -> Path:
    """A checkpoint of a one-state and of a hybrid model. With tied embeddings the first repeats one token for ever."""
    return tiny_checkpoint(request.param, tie_word_embeddings=False)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Chunk]:
    """The chunks of all passes that are launched, in order."""
    from apcbatch.engine import step

    run_pass, chunks = step.run_pass, []

    def noted(model: Any, decodes: Any, ours: list[Chunk], before: Any = None) -> Any:
        chunks.extend(replace(chunk) for chunk in ours)
        return run_pass(model, decodes, ours, before)

    monkeypatch.setattr(step, "run_pass", noted)
    return chunks


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_row_and_five_have_the_same_bits(dtype: str, folder: Path, way: str) -> None:
    """Fault: logits of a row that depend on how many rows the pass has for its sequence."""
    requests = [
        Request(str(number), tokens(20 + number, number), max_tokens=41, ignore_eos=True, logprobs=True, top_logprobs=5)
        for number in range(3)
    ]
    expected = without_drafts(folder, requests, dtype=dtype, policy="none")
    for max_running in (1, 3):
        engine = Engine(folder, dtype=dtype, policy="none", max_running=max_running, **STEADY)
        drafting(engine, right(known(requests, expected), 4))
        found = by_id(engine.run(requests))
        assert all(told(found[one.id]) == told(expected[one.id]) for one in requests)
        assert engine.counters.decode_chunks == 3 * 8 and accepted(engine) == 3 * 32
        engine.close()


def test_a_sampled_token_is_drawn_and_not_the_likeliest_one(folder: Path, way: str) -> None:
    """Fault: a guess that is kept since it is the likeliest token, or by a draw of its own, where the answer's draw
    gives another."""
    request = Request("a", PROMPT, max_tokens=40, temperature=0.7, seed=5, ignore_eos=True, logprobs=True)
    expected = without_drafts(folder, [request])["a"]
    prefixes = [Request(str(n), PROMPT + expected.token_ids[:n], max_tokens=1) for n in range(1, 40)]
    likeliest = {int(name): one.token_ids for name, one in without_drafts(folder, prefixes).items()}
    engine = drafting(Engine(folder, policy="none", **STEADY), lambda prompt, done: likeliest[len(done)])
    (found,) = engine.run([request])
    assert told(found) == told(expected)
    assert 0 < accepted(engine) < drafted(engine)
    engine.close()


@pytest.mark.parametrize("num_right", range(6))
@pytest.mark.parametrize("then", ["plain", "another draft"])
def test_roll_back_at_every_length(num_right: int, then: str, folder: Path, way: str) -> None:
    """Fault: a state, an input of the convolution or a key that has a rejected token, or lacks an accepted one."""
    request = Request("a", PROMPT, max_tokens=30, ignore_eos=True, logprobs=True)
    plain = Engine(folder, policy="all", draft=(), **STEADY)
    (expected,) = plain.run([request])
    answer = expected.token_ids

    def guess(prompt: list[int], done: list[int]) -> Sequence[int]:
        at = len(done)
        if at == 1:
            return answer[at : at + num_right] + [wrong(one) for one in answer[at + num_right : at + 5]]
        return [answer[at], wrong(answer[at + 1])] if then == "another draft" and at < 28 else ()

    engine = drafting(Engine(folder, policy="all", **STEADY), guess)
    (found,) = engine.run([request])
    assert told(found) == told(expected)
    if then == "plain":
        assert engine._drafting.counts == {"lookup": [5, num_right]}
    whole = PROMPT + answer
    assert engine.boundaries(whole) == plain.boundaries(whole) == [16, 32, 48]
    for position in (32, 48):
        ours, theirs = engine.snapshot(whole[:position]), plain.snapshot(whole[:position])
        assert all(ours[name].equal(theirs[name]) for name in theirs), position
    engine.close()
    plain.close()


class Pair:
    """Ends an answer at two tokens in a row, as a stop text of two tokens does."""

    def __init__(self, first: int, second: int) -> None:
        self._pair, self._last = (first, second), -1

    def accept(self, token: int, may_end: bool) -> str | None:
        pair, self._last = (self._last, token), token
        return "pair" if pair == self._pair else None


class EndsWith:
    """A constraint that allows everything and is complete with its `most`-th token."""

    def __init__(self, most: int) -> None:
        self._left = most

    def fill(self, mask: np.ndarray) -> bool:
        return False

    def accept(self, token: int) -> bool:
        self._left -= 1
        assert self._left >= 0, "a token behind the end"
        return not self._left


@pytest.mark.parametrize("most", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("what", ["stop text", "stop token", "complete form", "limit"])
def test_an_end_inside_a_draft(what: str, most: int, folder: Path, way: str) -> None:
    """Fault: tokens of a draft behind the stop text, the stop token, the end of a grammar or max_tokens are in the
    answer; or a stop text of which one token is drawn and the next one drafted is overlooked."""
    free = Request("a", PROMPT, max_tokens=30, temperature=1.0, seed=8, logprobs=True, ignore_eos=True)
    answer = without_drafts(folder, [free])["a"].token_ids
    first = next(n for n in range(4, 28) if answer[n + 1] not in answer[: n + 1])  # the end is answer[first + 1]
    ends: dict[str, dict[str, Any]] = {
        "stop text": {"ending": lambda: Pair(answer[first], answer[first + 1])},
        "stop token": {"stop_token_ids": [answer[first + 1]]},
        "complete form": {"constraint": lambda: EndsWith(first + 2)},
        "limit": {"max_tokens": first + 2},
    }
    request = replace(free, **ends[what])
    expected = without_drafts(folder, [request])["a"]
    assert len(expected.token_ids) == first + 2
    engine = drafting(Engine(folder, policy="all", **STEADY), right({tuple(PROMPT): [answer]}, most))
    books = Books(engine)
    (found,) = engine.run([request])
    assert told(found) == told(expected) and accepted(engine)
    assert max(engine.boundaries(PROMPT + answer), default=0) <= len(PROMPT) + first + 1
    books.balance()
    engine.close()


def test_a_draft_ends_before_a_snapshot(folder: Path, way: str, launched: list[Chunk]) -> None:
    """Fault: a snapshot whose state has tokens that were guessed, or which is left out where a draft goes past it."""
    request = Request("a", PROMPT, max_tokens=60, ignore_eos=True, logprobs=True)
    plain = Engine(folder, policy="all", draft=(), **STEADY)
    (expected,) = plain.run([request])
    engine = drafting(Engine(folder, policy="all", **STEADY), right({tuple(PROMPT): [expected.token_ids]}, 40))
    launched.clear()
    (found,) = engine.run([request])
    assert told(found) == told(expected) and accepted(engine) > 40
    for chunk in launched:
        kept = [position for position in (32, 48, 64) if chunk.begin < position <= chunk.begin + chunk.num_rows]
        assert [keep.position for keep in chunk.keep if keep.position > 20] == kept, chunk
        assert not (chunk.draft and kept), chunk
    whole = PROMPT + expected.token_ids
    assert engine.boundaries(whole) == plain.boundaries(whole) == [16, 32, 48, 64]
    for position in (32, 48, 64):
        ours, theirs = engine.snapshot(whole[:position]), plain.snapshot(whole[:position])
        assert all(ours[name].equal(theirs[name]) for name in theirs), position
    engine.close()
    plain.close()


@pytest.mark.parametrize("max_running", [1, 2, 16])
def test_answers_fork_and_are_drafted(max_running: int, folder: Path, way: str) -> None:
    """Fault: several answers that share a state, a page or a draft; or a draft in the pass that forks."""
    requests = [Request(str(number), tokens(20 + number, number), max_tokens=30, temperature=1.2, n=4, logprobs=True)
                for number in range(2)]  # fmt: skip
    expected = without_drafts(folder, requests)
    guess = right(known(requests, expected), 6)

    def spoilt(prompt: list[int], done: list[int]) -> Sequence[int]:
        guesses = list(guess(prompt, done))
        return guesses[:3] + [wrong(one) for one in guesses[3:4]] + guesses[4:]

    for script in (guess, spoilt):
        engine = drafting(Engine(folder, policy="all", max_running=max_running, **STEADY), script)
        books = Books(engine)
        found = by_id(engine.run(requests))
        assert all(told(found[one.id]) == told(expected[one.id]) for one in requests)
        assert 0 < accepted(engine) < drafted(engine)
        books.balance()
        engine.close()


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


@pytest.mark.parametrize("where", ["fill", "accept"])
@pytest.mark.parametrize("error", [RequestError("invalid_request", "no"), ValueError("broken")], ids=["told", "broken"])
def test_a_request_that_fails_at_a_guess(error: Exception, where: str, folder: Path, way: str) -> None:
    """Fault: an error at a drafted position that ends other requests too, changes their answers, or loses what the
    request held."""
    requests = [
        Request(str(number), tokens(20 + number, number), max_tokens=30, ignore_eos=True, logprobs=True)
        for number in range(4)
    ]
    expected = without_drafts(folder, requests)
    bad = replace(requests[1], constraint=lambda: Raises(6, where, error))
    engine = drafting(Engine(folder, policy="all", max_running=4, **STEADY), right(known(requests, expected), 4))
    books = Books(engine)
    found = by_id(engine.run([requests[0], bad, *requests[2:]]))
    assert found["1"].error is not None
    assert found["1"].error.code == ("invalid_request" if isinstance(error, RequestError) else "internal")
    assert all(told(found[name]) == told(expected[name]) for name in "023")
    books.balance()
    assert told(by_id(engine.run(requests))["1"]) == told(expected["1"])
    engine.close()


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("steps", [1, 3, 5])
def test_a_run_given_up_with_drafts(
    steps: int, num_stages: int, folder: Path, stages: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: slots of drafts that are lost when a run is given up with passes in flight, or an engine that answers
    otherwise after that."""
    if num_stages > 1:
        stages(num_stages)
        monkeypatch.setattr("apcbatch.engine.open.writes_draft_states", lambda device: True)
    requests = [
        Request(str(number), tokens(20 + number, number), max_tokens=60, ignore_eos=True, logprobs=True)
        for number in range(4)
    ]
    expected = without_drafts(folder, requests)
    engine = drafting(Engine(folder, policy="all", max_running=4, **STEADY), right(known(requests, expected), 4))
    books = Books(engine)
    for request in requests:
        engine.submit(request)
    for _ in range(steps):
        engine.step()
    while num_stages > 1 and not any(chunk.draft for one in engine._pipeline._passes for chunk in one.chunks):
        assert engine.num_unfinished, "no draft was in flight"
        engine.step()
    engine.abort()
    books.balance()
    found = by_id(engine.run(requests))
    assert all(told(found[one.id]) == told(expected[one.id]) for one in requests)
    engine.close()


@pytest.mark.parametrize("is_wrong", [True, False], ids=["behind a wrong guess", "of an accepted guess"])
def test_logits_that_are_not_finite(is_wrong: bool, folder: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a NaN after tokens that the answer does not have fails the request, or one after its own tokens does
    not."""
    requests = [Request(str(number), tokens(20, number), max_tokens=30, ignore_eos=True) for number in range(2)]
    expected = without_drafts(folder, requests)
    guess = right(known(requests, expected), 4)

    def spoilt(prompt: list[int], done: list[int]) -> Sequence[int]:
        guesses = list(guess(prompt, done))
        return [*guesses[:2], *map(wrong, guesses[2:])] if is_wrong else guesses

    read = Pass.read

    def with_nan(current: Pass) -> Any:
        return [
            (chunk, [row._replace(likeliest=NOT_FINITE) if place > 2 else row for place, row in enumerate(rows)])
            if chunk.sequence.request.id == "0" else (chunk, rows)
            for chunk, rows in read(current)
        ]  # fmt: skip

    monkeypatch.setattr(Pass, "read", with_nan)
    engine = drafting(Engine(folder, policy="all", **STEADY), spoilt)
    found = by_id(engine.run(requests))
    assert told(found["1"]) == told(expected["1"])
    if is_wrong:
        assert told(found["0"]) == told(expected["0"]) and accepted(engine) < drafted(engine)
    else:
        assert found["0"].error is not None and found["0"].error.code == "non_finite"
    engine.close()
