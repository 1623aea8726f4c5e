"""Observer and Watcher: callbacks of an engine about what it does and is about to do. Without one they cost nothing.

Invariants: they change no answer; tokens are views that the engine goes on using, so an observer copies what it keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from apcbatch.prefix import TokenArray
from apcbatch.types import CachedFrom, Request


@dataclass(frozen=True, slots=True)
class StepFacts:
    """One step. seconds: of all of it; prefill_s, decode_s, store_s: parts of that, as the summary counts them.
    prefill_tokens, decode_tokens: computed in the pass, 0 for a step without one. running: sequences in the pass.
    waiting: requests that have not begun. pool_bytes: of the snapshots in memory. store_bytes: written to the store so
    far."""

    seconds: float
    prefill_s: float
    decode_s: float
    store_s: float
    prefill_tokens: int
    decode_tokens: int
    running: int
    waiting: int
    pool_bytes: int
    store_bytes: int


@dataclass(frozen=True, slots=True)
class KeptSnapshot:
    """A snapshot that a pass has written. size_bytes: its slot, and the pages that no other one refers to. in_memory:
    not dropped again within the same pass; the store may have it either way."""

    key: bytes
    position: int
    size_bytes: int
    in_memory: bool


class Observer(Protocol):
    """Callbacks of an engine about what it has done. They must not raise."""

    def stepped(self, facts: StepFacts) -> None:
        """A step has ended; its other callbacks came before."""

    def answered(self, tokens: TokenArray, cached_tokens: int, source: CachedFrom) -> None:
        """A request succeeded. tokens: its prompt, (tokens,) int32, of which the first cached_tokens were restored from
        `source` and the others computed."""

    def kept(self, tokens: TokenArray, snapshots: Sequence[KeptSnapshot]) -> None:
        """A pass has kept snapshots of these tokens, (tokens,) int32, which go as far as the last position; ascending,
        at least one."""

    def dropped(self, key: bytes, evicted: bool) -> None:
        """A snapshot has left the memory: evicted for lack of room, or after its last reader."""


class Watcher(Protocol):
    """Callbacks of an engine about what it is about to do, to name the culprit if it never returns. They must not
    raise."""

    def begins(self, request: Request) -> None:
        """A request is about to run; it has ended when its result is there."""

    def moves(self) -> None:
        """A layer of a pass is about to run. Called on the CPU only, where a layer may take seconds."""
