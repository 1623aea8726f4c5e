"""Counters of an engine's work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from apcbatch.engine.sequence import Chunk


@dataclass
class Counters:
    """Totals since the engine was opened.

    snapshots_read: distinct snapshots that requests resumed from. unique_tokens_is_bound: unique_tokens may be off,
    since the bounded tree of prompts forgot some. store_skipped: snapshots that the store refused or could not write.
    preempted: times that a running answer gave its KV pages up. recomputed_tokens: tokens computed again after that.
    prefill_tokens, decode_tokens: tokens computed in passes, including recomputed ones and those of requests that
    failed later; of drafted ones, those that were accepted. decode_chunks: sequences that decoded in a pass, summed
    over passes. drafts: source -> (drafted tokens that passes verified, accepted ones). drafts_saved_s: estimate of the
    seconds that they saved (apcbatch/engine/drafting.py); None if not known. peak_draft_bytes: the most bytes of the
    index of drafts. seconds: wall seconds by phase."""

    snapshots_written: int = 0
    snapshots_read: int = 0
    snapshots_for_later: int = 0
    snapshots_evicted: int = 0
    peak_live_snapshots: int = 0
    unique_tokens: int = 0
    unique_tokens_is_bound: bool = False
    store_bytes_written: int = 0
    store_bytes_read: int = 0
    store_skipped: int = 0
    peak_device_bytes: int = 0
    preempted: int = 0
    recomputed_tokens: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    decode_chunks: int = 0
    drafts: dict[str, tuple[int, int]] = field(default_factory=dict)
    drafts_saved_s: float | None = None
    peak_draft_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"prefill": 0.0, "decode": 0.0, "store": 0.0})

    def copy(self) -> Counters:
        """Return a copy that later passes do not change."""
        return replace(self, seconds=dict(self.seconds))

    def add_pass(self, chunks: Sequence[Chunk], seconds: float) -> None:
        """Count a pass of `seconds` over these chunks (at least one), and add each sequence's share of the seconds, in
        proportion to its rows, drafted ones included."""
        num_rows = sum([chunk.num_rows for chunk in chunks])
        per_row, prefill_tokens = seconds / num_rows, 0
        for chunk in chunks:
            if chunk.in_prefill:
                chunk.sequence.prefill_s += per_row * chunk.count
                prefill_tokens += chunk.count
                self.recomputed_tokens += max(0, min(chunk.end, chunk.first_new) - chunk.begin)
            else:
                chunk.sequence.decode_s += per_row * chunk.num_rows
                self.decode_chunks += 1
                self.decode_tokens += chunk.count + chunk.accepted
        self.prefill_tokens += prefill_tokens
        self.seconds["prefill"] += per_row * prefill_tokens
        self.seconds["decode"] += per_row * (num_rows - prefill_tokens)
