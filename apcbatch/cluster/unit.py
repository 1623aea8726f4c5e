"""What travels between the driver and a worker: units of work, and what a worker says about them.

Must not know: Ray, tensors, how work is cut, who computes it. Everything here is plain, small and can be pickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from apcbatch.types import RequestPlan, Result

if TYPE_CHECKING:
    from apcbatch.cluster.wire import WireRequest

Key = bytes  # a prefix key
Handle = Any  # where a state lies, as the seam has it: an object reference, bytes, a token


@dataclass(frozen=True, slots=True)
class Piece:
    """One request of a unit. number: the driver's, never used twice in a run. plan: as the unit alone sees it: `keep`
    holds what this unit or others read, and `reads` counts the readers in this unit only, so that it is 0 for a
    snapshot that is only exported; None for a request without a plan."""

    number: int
    request: WireRequest
    plan: RequestPlan | None


@dataclass(frozen=True, slots=True)
class Unit:
    """Requests for one worker, in the plan's order. number: never used twice, not even for the same requests.
    exports: snapshots that a piece keeps and other units read, to be told as soon as they are published. imports:
    snapshots of other units that pieces resume from; a state for each of them comes along."""

    number: int
    pieces: tuple[Piece, ...]
    exports: frozenset[Key] = frozenset()
    imports: tuple[Key, ...] = ()


@dataclass(frozen=True, slots=True)
class Made:
    """A snapshot that the unit exports is there; told before the Answer of the piece that keeps it. num_bytes: of the
    state as it travels."""

    unit: int
    key: Key
    position: int
    num_bytes: int
    state: Handle


@dataclass(frozen=True, slots=True)
class Answer:
    """A request of the unit has ended; result.error is set if it failed. result.tag means nothing."""

    unit: int
    number: int
    result: Result


@dataclass(frozen=True, slots=True)
class Without:
    """An import could not be had; what needed it was computed without it."""

    unit: int
    key: Key


@dataclass(frozen=True, slots=True)
class Alive:
    """The worker computes; said of any of its units when it has said nothing for some seconds."""

    unit: int


@dataclass(frozen=True, slots=True)
class Done:
    """The last word about a unit. seconds: that it took. prefill_tokens, decode_tokens: computed in its passes.
    counters: what the unit added to the engine's counters, under their names there, each number of `seconds` as
    `prefill_s`, `decode_s`, `store_s`; import_bytes, import_s: states that came from another node, and the seconds
    until they were there. What begins with `peak_` is the highest so far instead."""

    unit: int
    seconds: float
    prefill_tokens: int
    decode_tokens: int
    counters: Mapping[str, float] = field(default_factory=dict)


Message = Made | Answer | Without | Alive | Done
