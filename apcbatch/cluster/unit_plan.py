"""The plan of a unit's requests as a worker follows it: who reads which import, and who makes which export.

A unit with the requests 3, 4, 7 and 8 that resume at 128 (key K), 128, 64 and 128; 7 keeps 128 again, for 8:
    the import K has the readers 3 and 4; 8 reads what 7 makes.
    Without K, 3 computes it and keeps it for 4.
    If other units read K too, it is 7 that makes it for them: its snapshot is held until that was told.

Must not know: engines, states, what is computed. Invariant: where nothing is missing, each request resumes, keeps and
misses as its own plan says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from apcbatch.cluster.unit import Key, Piece, Unit
from apcbatch.prefix import PrefixHasher
from apcbatch.types import RequestPlan


@dataclass(frozen=True, slots=True)
class Maker:
    """Which piece publishes an export, by the driver's number, and the export's position."""

    number: int
    position: int


class UnitPlan:
    """plans: by piece, in the unit's order. makers: by export. key_fingerprint: of the engine."""

    def __init__(self, unit: Unit, key_fingerprint: bytes) -> None:
        self.plans: list[RequestPlan | None] = [piece.plan for piece in unit.pieces]
        self.makers: dict[Key, Maker] = {}
        self._unit = unit
        self._readers: dict[Key, list[int]] = {key: [] for key in unit.imports}
        self._positions: dict[Key, int] = {}
        self._made: set[Key] = set()  # by the pieces so far
        if unit.exports or unit.imports:
            for index, piece in enumerate(unit.pieces):
                if piece.plan is not None:
                    self._note(index, piece, piece.plan, key_fingerprint)

    def readers(self, key: Key) -> list[int]:
        """The pieces that resume from an import, by their place in the unit."""
        return self._readers[key]

    def position(self, key: Key) -> int:
        """Where an import with readers lies."""
        return self._positions[key]

    def go_without(self, key: Key) -> None:
        """An import cannot be had: its first reader computes it, and keeps it for the others."""
        first, *others = self._readers[key]
        plan = self.plans[first]
        assert plan is not None, "a reader has a plan"
        keep = {p: reads for p, reads in zip(plan.keep, plan.reads, strict=True)}
        keep[self._positions[key]] = len(others)
        positions = tuple(sorted(keep)) if others else plan.keep
        self.plans[first] = replace(plan, resume_at=0, keep=positions, reads=tuple(keep[p] for p in positions))

    def _note(self, index: int, piece: Piece, plan: RequestPlan, key_fingerprint: bytes) -> None:
        """Enter one piece, after those before it."""
        positions = sorted({plan.resume_at, *plan.keep} - {0})
        keys = dict(PrefixHasher(key_fingerprint, piece.request.tokens).keys_at(positions))
        source = keys.get(plan.resume_at)
        if source in self._readers and source not in self._made:
            self._readers[source].append(index)
            self._positions[source] = plan.resume_at
        reads = list(plan.reads)
        for place, position in enumerate(plan.keep):
            key = keys[position]
            self._made.add(key)
            if key in self._unit.exports and key not in self.makers:
                self.makers[key] = Maker(piece.number, position)
                reads[place] += 1
        self.plans[index] = replace(plan, reads=tuple(reads))
