"""Drafts that a test writes down, for the tests of exact speculation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from apcbatch import Engine, Request, Result
from apcbatch.drafts.drafter import Draft
from tests.engine.opened import OpenedEngine
from tests.engine.runs import serve, tokens
from tests.tiny import VOCAB

Script = Callable[[list[int], list[int]], Sequence[int]]  # (prompt, answer so far) -> drafted tokens
PROMPT = tokens(20, 1)  # with blocks of 16 the next snapshot is after 32 tokens
STEADY: dict[str, Any] = {"block_size": 16, "pool_size_bytes": 16 << 20}


class Scripted:
    """Drafts that a test writes down."""

    def __init__(self, script: Script) -> None:
        self.script, self.held_bytes = script, 0

    def begin(self, prompt: np.ndarray, references: object, most_tokens: int) -> ScriptedDrafter:
        return ScriptedDrafter(prompt.tolist(), self.script)

    def add(self, tokens: np.ndarray, num_prompt: int, begin: int) -> None:
        assert 0 <= begin <= len(tokens) > num_prompt


class ScriptedDrafter:
    def __init__(self, prompt: list[int], script: Script) -> None:
        self._prompt, self._script, self._done = prompt, script, []

    def append(self, new: np.ndarray) -> None:
        self._done += np.asarray(new).tolist()

    def propose(self, most: int) -> Draft | None:
        drafted = list(self._script(self._prompt, self._done))[:most]
        return Draft(drafted, [0.99] * len(drafted), "lookup") if drafted else None


def drafting(model: Path | str, script: Script, **options: Any) -> OpenedEngine:
    """An engine that verifies each draft of a script."""
    return OpenedEngine(model, drafts=Scripted(script), **options)


def without_drafts(folder: Path, requests: Sequence[Request], **options: Any) -> dict[str, Result]:
    return serve(Engine(folder, draft=(), **STEADY | options), requests)


def right(answers: dict[tuple[int, ...], Sequence[Sequence[int]]], most: int) -> Script:
    """The next `most` tokens of the known answer to the prompt that begins as the answer so far."""

    def draft(prompt: list[int], done: list[int]) -> Sequence[int]:
        known = [one for one in answers[tuple(prompt)] if list(one[: len(done)]) == done]
        return known[0][len(done) : len(done) + most] if known else ()

    return draft


def known(requests: Sequence[Request], results: dict[str, Result]) -> dict[tuple[int, ...], list[list[int]]]:
    return {tuple(one.token_ids): [answer.token_ids for answer in results[one.id].answers] for one in requests}


def wrong(token: int) -> int:
    return (token + 1) % VOCAB


def accepted(engine: Engine) -> int:
    return sum(accepted for _, accepted in engine.counters.drafts.values())


def drafted(engine: Engine) -> int:
    return sum(drafted for drafted, _ in engine.counters.drafts.values())
