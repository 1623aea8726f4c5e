"""Engines of which a test sees the parts that they were opened with, and puts its own in place of some.

They are seen where they are made, so that no test depends on what an engine keeps of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from apcbatch import Engine
from apcbatch.engine.parts import EngineParts, open_parts
from apcbatch.engine.pipeline import PassPipeline
from apcbatch.engine.row_costs import RowCosts


class Opened:
    """The parts of the engine that was opened last."""

    parts: EngineParts
    pipeline: PassPipeline


@contextmanager
def opening(runs_ahead: bool | None = None, drafts: object = None) -> Iterator[Opened]:
    """Engines opened meanwhile. runs_ahead: whether passes begin before the one before them is read, as on a device.
    drafts: the draft index, each token of which gets a row."""
    opened = Opened()

    def noted_parts(*arguments: Any) -> EngineParts:
        parts = open_parts(*arguments)
        opened.parts = parts if runs_ahead is None else replace(parts, runs_ahead=runs_ahead)
        return opened.parts

    def noted_pipeline(*parts: Any, **options: Any) -> PassPipeline:
        opened.pipeline = PassPipeline(*parts, **options)
        return opened.pipeline

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("apcbatch.engine.engine.open_parts", noted_parts)
        patch.setattr("apcbatch.engine.engine.PassPipeline", noted_pipeline)
        if drafts is None:
            yield opened
        else:
            patch.setattr("apcbatch.engine.parts.Drafts", lambda *_: drafts)
            with rows_take(lambda rows: 1.0):
                yield opened


@contextmanager
def rows_take(seconds: Callable[[int], float]) -> Iterator[None]:
    """What is made meanwhile drafts as if passes took these seconds by rows; one second for any rows makes each
    drafted token worth its row."""

    class Given(RowCosts):
        def knows(self, rows: int) -> bool:
            return True

        def of(self, rows: int) -> float:
            return seconds(rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("apcbatch.engine.drafting.RowCosts", Given)
        yield


class OpenedEngine(Engine):
    """An engine with its parts and its pipeline of passes. runs_ahead, drafts: see `opening`."""

    def __init__(
        self, model: str | Path, runs_ahead: bool | None = None, drafts: object = None, **options: Any
    ) -> None:
        with opening(runs_ahead, drafts) as opened:
            super().__init__(model, **options)
        self.parts, self.pipeline = opened.parts, opened.pipeline
