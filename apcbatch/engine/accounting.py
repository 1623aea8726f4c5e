"""A pass's time, shared among its sequences and between prefill and decode, by tokens.

Must not know: the clock, tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

from apcbatch.engine.counters import Counters
from apcbatch.engine.runner import Chunk


def account(chunks: Sequence[Chunk], seconds: float, counters: Counters) -> None:
    """Count a pass over these chunks, at least one, that took so many seconds; the sequences are where they were before
    it."""
    num_tokens = sum([chunk.count for chunk in chunks])
    per_token, prefill_tokens = seconds / num_tokens, 0
    for chunk in chunks:
        if chunk.sequence.in_prefill:
            chunk.sequence.prefill_s += per_token * chunk.count
            prefill_tokens += chunk.count
        else:
            chunk.sequence.decode_s += per_token * chunk.count
    counters.add_pass(len(chunks), prefill_tokens, num_tokens - prefill_tokens, per_token)
