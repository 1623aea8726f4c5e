"""The arena of a model whose layers are split over several devices: one arena per stage, with the state of its layers.

A slot or a page has the same number in every stage: slot 7 of a stage's arena holds the state of that stage's layers in
slot 7. Slots and pages are counted once, not per stage. Invariant: parts on the host are stacked over all layers, as
those of an arena on one device are, so that either arena can read what the other wrote.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from apcbatch.layout import StateLayout
from apcbatch.model.arena import Mark, StateArena, Tensors


class Marks:
    """Mark of several devices: one Mark for each."""

    def __init__(self, marks: Sequence[Mark]) -> None:
        self.marks = marks

    def wait(self) -> None:
        for mark in self.marks:
            mark.wait()


class SpreadArena:
    """Arena over several devices, with the methods of StateArena. layout: layout of all layers. stages: arenas over
    consecutive layers, with the same number of slots and pages each."""

    def __init__(self, layout: StateLayout, stages: Sequence[StateArena]) -> None:
        self.layout, self.stages = layout, stages

    def finite(self, slots: Sequence[int]) -> list[torch.Tensor]:
        """See StateArena: one result per device, for the parts on it."""
        return [flags for stage in self.stages for flags in stage.finite(slots)]

    @property
    def on_host(self) -> bool:
        """See StateArena: False, as the layers of a slot lie on several devices."""
        return False

    def host_slot(self, slot: int) -> Tensors:
        """Raise ValueError, since this arena is never on the host."""
        raise ValueError(f"slot {slot} lies in {len(self.stages)} stages, in no one place; copy it out")

    def mark(self) -> Marks:
        """Return a mark after the work submitted to the devices so far."""
        return Marks([stage.mark() for stage in self.stages])

    def copy_out(self, slot: int, host: Tensors, after: Mark) -> None:
        """See StateArena; after: a mark of this arena."""
        assert isinstance(after, Marks)
        for (stage, rows), mark in zip(self._rows(host), after.marks, strict=True):
            stage.copy_out(slot, rows, mark)

    def copy_in(self, slot: int, host: Mapping[str, torch.Tensor]) -> Marks:
        return Marks([stage.copy_in(slot, rows) for stage, rows in self._rows(host)])

    def gather(self, pages: torch.Tensor, begin: int, end: int, after: Mark | None = None) -> Tensors:
        """See StateArena; after: a mark of this arena."""
        assert after is None or isinstance(after, Marks)
        marks = [None] * len(self.stages) if after is None else after.marks
        parts = [stage.gather(pages, begin, end, mark) for stage, mark in zip(self.stages, marks, strict=True)]
        return self._stacked(parts)

    def scatter(self, pages: torch.Tensor, begin: int, parts: Mapping[str, torch.Tensor]) -> None:
        for stage, rows in self._rows(parts):
            stage.scatter(pages, begin, rows)

    def copy_page(self, source: int, target: int) -> None:
        for stage in self.stages:
            stage.copy_page(source, target)

    def shown(self, slot: int, pages: torch.Tensor, position: int) -> Tensors:
        return self._stacked([stage.shown(slot, pages, position) for stage in self.stages])

    def _stacked(self, parts: Sequence[Mapping[str, torch.Tensor]]) -> Tensors:
        """Concatenate the stages' parts of each role into one tensor over all layers, on the host."""
        names = [stack.role.name for stack in self.layout.stacks]
        found = {name: [part[name].cpu() for part in parts if name in part] for name in names}
        return {name: torch.cat(pieces) for name, pieces in found.items() if pieces}

    def _rows(self, parts: Mapping[str, torch.Tensor]) -> list[tuple[StateArena, Tensors]]:
        """Split parts that are stacked over all layers: return (stage, parts with the rows of its layers) for each
        stage. Names that a stage does not have are left out."""
        begin = {stack.role.name: 0 for stack in self.layout.stacks if stack.role.name in parts}
        found = []
        for stage in self.stages:
            rows = {}
            for stack in stage.layout.stacks:
                name = stack.role.name
                if name in begin:
                    rows[name] = parts[name][begin[name] : begin[name] + len(stack.layers)]
                    begin[name] += len(stack.layers)
            found.append((stage, rows))
        return found


Arena: TypeAlias = StateArena | SpreadArena
