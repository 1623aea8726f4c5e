"""One sentence for each miss reason: what the operator can do about it. docs/caching.md has the same table.

Must not know: runs, numbers.
"""

from __future__ import annotations

from apcbatch.types import MissReason

REMEDIES: dict[MissReason, str] = {
    "cold": (
        "Nothing before these requests begins as they do, so nothing helps in this run; with --store the next run "
        "finds what this one kept."
    ),
    "below_grid": (
        "Everything was restored but the tokens after the last boundary; a smaller --block-size leaves fewer of them, "
        "and tune-block-size says whether it pays."
    ),
    "diverged": (
        "These requests leave the path of the others at a place without a snapshot; give a smaller --block-size, or "
        "--policy planned instead of last."
    ),
    "shorter_than_block": "The common part is shorter than one block; give a smaller --block-size.",
    "evicted": "The snapshot was there and had to go; give a larger --pool-size, or a --store.",
    "stranded": ("A stored snapshot is there, but the keys and values before it are gone; give a larger --store-size."),
    "disabled": "The policy is none, which keeps nothing; give another --policy.",
}
UNKNOWN = "This version does not know the reason; see the page of the version that ran."


def remedy(reason: str) -> str:
    """What helps against a miss."""
    return REMEDIES.get(reason, UNKNOWN)  # type: ignore[call-overload, no-any-return]
