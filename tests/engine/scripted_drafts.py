"""Drafts that a test writes down, for the tests of exact speculation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from apcbatch import Engine, Request, Result
from apcbatch.drafts.drafter import Draft
from apcbatch.engine.drafting import Drafting
from tests.engine.runs import serve, tokens
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


def make_rows_free(drafting: Drafting, seconds: Callable[[int], float] = lambda rows: 1.0) -> None:
    """Let passes take a second whatever their rows, so that each guess is worth its row, or these seconds by rows."""
    for costs in (drafting._costs, drafting._plain_costs):
        costs.knows, costs.of = (lambda rows: True), seconds  # type: ignore[method-assign]


def drafting(engine: Engine, guess: Guess) -> Engine:
    """An engine that verifies each guess of a script."""
    engine._drafting._drafts = Scripted(guess)
    make_rows_free(engine._drafting)
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
