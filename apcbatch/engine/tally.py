"""The numbers that any engine counts, one in this process or a cluster of them.

Must not know: engines, stores, tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Tally:
    """snapshots_read counts distinct ones that were resumed from. prefill_tokens, decode_tokens: computed in passes, of
    requests that failed later too; chunks: of sequences in them. seconds: by phase."""

    snapshots_written: int = 0
    snapshots_read: int = 0
    snapshots_for_later: int = 0
    snapshots_evicted: int = 0
    peak_live_snapshots: int = 0
    unique_tokens: int = 0
    store_bytes_written: int = 0
    store_bytes_read: int = 0
    store_skipped: int = 0
    peak_device_bytes: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    chunks: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"prefill": 0.0, "decode": 0.0, "store": 0.0})
