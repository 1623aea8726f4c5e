"""Sum up tokens: of prompts, computed, restored and lost, with the reason of each miss and its remedy; and of drafts.

Lost tokens were covered by an earlier request and computed again. Totals of drafts come from OUT's records; their
sources, tokens per pass and seconds saved from the summaries in its run file, which versions without drafts lack.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from apcbatch.job.processes import Process
from apcbatch.report.requests import MOST_ID_CHARACTERS, SOURCES, Requests
from apcbatch.report.verdict import MOST, number, summaries_of, tokens_per_pass
from apcbatch.types import MissReason

MOST_SOURCES = 32


def token_sums(requests: Requests, policy: object) -> dict[str, Any]:
    """Return the tokens of each part of the page's bar, and the misses in descending order of lost tokens. lost, ideal:
    None if a record lacks its ideal."""
    ideal = requests.ideal_tokens()
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


def draft_sums(requests: Requests, processes: Sequence[Process]) -> dict[str, Any] | None:
    """Return the sums of a run; None if nothing was drafted.

    sources: sorted, most accepted tokens first. decode_s, saved_s: sums over the processes that recorded their seconds
    saved; None if there is none. saved_s is an estimate (apcbatch/engine/drafting.py).
    """
    drafted, accepted = (sum(requests.numbers[name]) for name in ("drafted", "accepted"))
    summaries = summaries_of(processes)
    sources = _by_source(summaries)
    if not drafted and not sources:
        return None
    times = [(saved, decode_s) for saved, decode_s in map(_saved, summaries) if saved is not None]
    return {
        "drafted": drafted,
        "accepted": accepted,
        "completion_tokens": sum(requests.numbers["out"]),
        "tokens_per_pass": tokens_per_pass(summaries),
        "decode_s": sum(decode_s for _, decode_s in times) if times else None,
        "saved_s": sum(saved for saved, _ in times) if times else None,
        "sources": sources,
    }


def _by_source(summaries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    sums: dict[str, list[int]] = {}
    for summary in summaries:
        given = summary.get("drafts")
        for name, counts in list(given.items())[:MOST_SOURCES] if isinstance(given, dict) else ():
            drafted, accepted = (
                number(counts.get(key)) if isinstance(counts, dict) else None for key in ("drafted", "accepted")
            )
            if isinstance(drafted, int) and isinstance(accepted, int) and accepted <= drafted > 0:
                one = sums.setdefault(str(name)[:MOST_ID_CHARACTERS], [0, 0])
                one[0] += drafted
                one[1] += accepted
    rows = [{"source": name, "drafted": drafted, "accepted": accepted} for name, (drafted, accepted) in sums.items()]
    return sorted(rows, key=lambda row: (-row["accepted"], -row["drafted"], row["source"]))


def _saved(summary: dict[str, Any]) -> tuple[float | None, float]:
    """Return (seconds saved, seconds of decode) of a process; (None, 0) if either is not known."""
    saved, seconds = summary.get("drafts_saved_s"), summary.get("seconds")
    decode_s = number(seconds.get("decode")) if isinstance(seconds, dict) else None
    if decode_s is None or not isinstance(saved, int | float) or isinstance(saved, bool) or not abs(saved) <= MOST:
        return None, 0.0
    return saved, decode_s
