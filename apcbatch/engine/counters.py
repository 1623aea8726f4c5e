"""What an engine has done so far, as numbers.

Must not know: who counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Counters:
    """snapshots_read counts distinct ones that were restored."""

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
    seconds: dict[str, float] = field(default_factory=lambda: {"prefill": 0.0, "decode": 0.0, "store": 0.0})
