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
        "These requests leave the path of the others at a place without a snapshot; give --policy planned, or a "
        "smaller --block-size."
    ),
    "shorter_than_block": "The common part is shorter than one block; give a smaller --block-size.",
    "evicted": "The snapshot was there and had to go; give a larger --pool-size, or a --store.",
    "stranded": ("A stored snapshot is there, but the keys and values before it are gone; give a larger --store-size."),
    "disabled": (
        "The policy is none, which keeps nothing, so give another --policy; or the prompt is scored, for which all of "
        "it is computed."
    ),
}
# What helps a request that diverged under a policy; the sentence above is for a run whose policy is not known.
DIVERGED: dict[str, str] = {
    "planned": (
        "The plan keeps no snapshot where these requests leave the path of the others; give a larger --pool-size or a "
        "larger --window, or a smaller --block-size where the path is left before the first boundary."
    ),
    "all": (
        "These requests leave the path of the others before the first boundary, or beside one that is not there yet; "
        "give a smaller --block-size, or --policy planned, which computes a shared prefix first."
    ),
    "last": (
        "The policy last keeps the ends of prompts, and these requests leave the path of the others before one; give "
        "--policy planned."
    ),
}
UNKNOWN = "This version does not know the reason; see the page of the version that ran."


def remedy(reason: str, policy: object) -> str:
    """What helps against a miss in a run with a policy."""
    if reason == "diverged" and isinstance(policy, str) and policy in DIVERGED:
        return DIVERGED[policy]
    return REMEDIES.get(reason, UNKNOWN)  # type: ignore[call-overload, no-any-return]
