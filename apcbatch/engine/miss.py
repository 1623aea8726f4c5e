"""Why a request got less than the ideal: the miss reason and its sentence.

A pure function; must not know: the pool, the store, the tree that the facts come from.
"""

from __future__ import annotations

from apcbatch.engine.coverage import Match
from apcbatch.prefix import last_boundary
from apcbatch.types import MissReason


def explain_miss(
    cached: int,
    ideal: int,
    match: Match,
    block_size: int,
    *,
    resumable: int,
    disabled: bool,
    stranded: bool,
    evicted: bool,
) -> tuple[MissReason, str] | tuple[None, None]:
    """(reason, clause) if the cached tokens fall short of the ideal or nothing was there; (None, None) otherwise.

    resumable: the longest prefix that it may resume from: the rest is scored, and computed for that. stranded: the
    store has a longer snapshot, but not all of its KV. evicted: the snapshot at the last boundary up to the ideal was
    kept and has been dropped since.
    """
    if disabled:
        return "disabled", "disabled (the policy keeps nothing)"
    if ideal == 0:
        return "cold", "cold"
    if cached >= ideal:
        return None, None
    if resumable < ideal and cached >= last_boundary(resumable, block_size):
        return "disabled", f"disabled (from token {resumable + 1} on the prompt is scored, and computed for that)"
    target = last_boundary(ideal, block_size)
    fork = f"diverged at token {ideal}"
    if target == 0:
        if match.forked:
            return "diverged", f"{fork} (first boundary {block_size})"
        return "shorter_than_block", f"shorter_than_block (minimum {block_size})"
    if cached >= target:
        return "below_grid", f"below_grid (ideal {ideal}, boundary {target})"
    if stranded:
        return "stranded", f"stranded (the KV up to {target} is incomplete)"
    if evicted:
        return "evicted", f"evicted (the snapshot at {target} was dropped)"
    return "diverged", f"{fork} (no snapshot is kept at {target})"
