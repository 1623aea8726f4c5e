"""Callbacks of an engine: Observer for what it has done, Watcher for what it is about to do. Unset, they cost nothing.

Invariants: callbacks change no answer. Tokens are views of the engine's own arrays, so an observer copies what it
keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from apcbatch.prefix import TokenArray
from apcbatch.types import CachedFrom, Request


@dataclass(frozen=True, slots=True)
class StepFacts:
    """Facts of one step. seconds: wall seconds of the step; prefill_s, decode_s, store_s: its parts, as in the summary.
    prefill_tokens, decode_tokens: tokens computed in the pass, 0 for a step without one. running: sequences in the
    pass. waiting: requests not yet admitted. pool_bytes: bytes of the snapshots in memory. store_bytes: bytes written
    to the store so far."""

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
    """Snapshot that a pass has written. size_bytes: bytes of its slot and of the pages that no other snapshot refers
    to. in_memory: False if it was dropped within the same pass; the store may have it in both cases."""

    key: bytes
    position: int
    size_bytes: int
    in_memory: bool


class Observer(Protocol):
    """Callbacks for what the engine has done. They must not raise."""

    def stepped(self, facts: StepFacts) -> None:
        """Receive the facts of a step, after its other callbacks."""

    def answered(self, tokens: TokenArray, cached_tokens: int, source: CachedFrom) -> None:
        """Receive a request that succeeded. tokens: its prompt (tokens,) int32; the first cached_tokens were restored
        from `source`, the others computed."""

    def kept(self, tokens: TokenArray, snapshots: Sequence[KeptSnapshot]) -> None:
        """Receive the snapshots that a pass has kept, at least one, by ascending position. tokens: (tokens,) int32 up
        to the last position."""

    def dropped(self, key: bytes, evicted: bool) -> None:
        """Receive the key of a snapshot that left the memory: evicted for lack of capacity, or after its last
        reader."""


class Watcher(Protocol):
    """Callbacks for what the engine is about to do: if a pass never returns, they tell where it hangs. They must not
    raise."""

    def begins(self, request: Request) -> None:
        """Receive a request that is about to run. It runs until its result is returned."""

    def moves(self) -> None:
        """Called before each layer of a pass. Only on the CPU, where a layer may take seconds."""
