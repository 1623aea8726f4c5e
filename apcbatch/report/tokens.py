"""Sum up prompt tokens: computed, restored from memory or disk, and lost, with the reason of each miss and its remedy.

Lost tokens were covered by an earlier request and computed again.
"""

from __future__ import annotations

from typing import Any

from apcbatch.report.requests import SOURCES, Requests
from apcbatch.types import MissReason


def token_sums(requests: Requests, policy: object) -> dict[str, Any]:
    """Return the tokens of each part of the page's bar, and the misses in descending order of lost tokens. lost, ideal:
    None if a record lacks its ideal."""
    ideal = ideal_tokens(requests)
    numbers = requests.numbers
    sources = dict.fromkeys(SOURCES, 0)
    misses: dict[int, list[int]] = {}
    lost_tokens = 0
    for cached, best, source, reason in zip(
        *(numbers[name] for name in ("cached", "ideal", "from", "reason")), strict=True
    ):
        sources[SOURCES[source]] += cached
        lost = max(0, best - cached)
        lost_tokens += lost
        if reason:
            miss = misses.setdefault(reason, [0, 0])
            miss[0] += 1
            miss[1] += lost
    rows = [
        {"reason": name, "requests": count, "tokens": tokens, "remedy": remedy(name, policy)}
        for name, (count, tokens) in ((requests.reasons[number], miss) for number, miss in misses.items())
    ]
    return {
        "computed": sum(numbers["computed"]),
        "memory": sources["memory"],
        "disk": sources["disk"],
        "lost": None if ideal is None else lost_tokens,
        "ideal": ideal,
        "misses": sorted(rows, key=lambda miss: (-miss["tokens"], -miss["requests"], miss["reason"])),
    }


def ideal_tokens(requests: Requests) -> int | None:
    """Return the ideal cached tokens of all answered requests; None if one of them lacks its ideal."""
    total = 0
    for ideal, error in zip(requests.numbers["ideal"], requests.numbers["error"], strict=True):
        if not error:
            if ideal < 0:
                return None
            total += ideal
    return total


MOST_TURNS = 100


def turn_sums(requests: Requests) -> dict[str, list[int]]:
    """Return columns with a row per turn number: answered requests, their cached and computed tokens. Turns from the
    hundredth on share one row; requests without a turn are left out."""
    sums: dict[int, list[int]] = {}
    columns = (requests.numbers[name] for name in ("turn", "cached", "computed", "error"))
    for turn, cached, computed, error in zip(*columns, strict=True):
        if turn and not error:
            row = sums.setdefault(min(turn, MOST_TURNS), [0, 0, 0])
            row[0] += 1
            row[1] += cached
            row[2] += computed
    turns = sorted(sums)
    named = {name: [sums[turn][n] for turn in turns] for n, name in enumerate(("requests", "cached", "computed"))}
    return {"turn": turns, **named}


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
# Remedies for a diverged request by policy; the one above is for a run with an unknown policy.
DIVERGED: dict[str, str] = {
    "planned": (
        "The plan keeps no snapshot where these requests leave the path of the others; give a larger --pool-size or "
        "--window-tokens."
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
    """Return the remedy for a miss in a run with this policy."""
    if reason == "diverged" and isinstance(policy, str) and policy in DIVERGED:
        return DIVERGED[policy]
    return REMEDIES.get(reason, UNKNOWN)  # type: ignore[call-overload, no-any-return]
