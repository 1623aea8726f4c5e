"""Sum up the drafts of a run: drafted and accepted tokens by source, tokens per pass, seconds saved.

Totals of tokens come from OUT's records; sources, tokens per pass and seconds from the summaries in its run file. Those
of versions without drafts have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from apcbatch.job.processes import Process
from apcbatch.report.requests import MOST_ID_CHARACTERS, Requests
from apcbatch.report.verdict import MOST, number, summaries_of, tokens_per_pass

MOST_SOURCES = 32


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
