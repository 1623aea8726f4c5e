"""Where the prompt tokens went: computed, restored from memory, restored from disk, lost; and why they were lost.

Must not know: traces, the page. Lost tokens are those that an earlier request covered and that were computed again.
"""

from __future__ import annotations

from typing import Any

from apcbatch.report.remedies import remedy
from apcbatch.report.requests import SOURCES, Requests


def token_sums(requests: Requests, policy: object) -> dict[str, Any]:
    """The parts of the bar in tokens, with the misses, those that lost most first. lost, ideal: None if the records do
    not all say what the ideal is."""
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
    """The sum of the ideals in tokens; None if a request that was answered does not say it."""
    total = 0
    for ideal, error in zip(requests.numbers["ideal"], requests.numbers["error"], strict=True):
        if not error:
            if ideal < 0:
                return None
            total += ideal
    return total
