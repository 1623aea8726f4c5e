"""Sum up a run: counts from OUT's records, times and bytes from the processes in its run file.

Invariant: for a run that was never resumed, every number equals the one in its summary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from apcbatch.errors import EXIT_OK, EXIT_REQUEST_ERRORS
from apcbatch.job.processes import Process
from apcbatch.report.requests import Requests

MOST = 1 << 53  # largest number accepted from a summary; a larger one counts as damage
MOST_COLUMNS = 32
PERCENTS = (50, 95, 99)
STAGES = ("load", "plan", "prefill", "decode", "store", "total")


def verdict(requests: Requests, processes: Sequence[Process], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the verdict over all of OUT. processes: from the run file, in order. options: those of the run, by name.

    Without processes, values that the records lack are None: seconds, rates, bytes, exit code. Seconds are sums over
    the processes that ran to their end, rates are tokens over these seconds, bytes are the maximum of any process.
    """
    numbers = requests.numbers
    errors = requests.codes.total()
    prompt, cached = sum(numbers["prompt"]), sum(numbers["cached"])
    ideal = requests.ideal_tokens()
    summaries = summaries_of(processes)
    last = processes[-1] if processes else None
    end = None if last is None else last.end
    code = None if end is None else end.exit_code
    if code in (EXIT_OK, EXIT_REQUEST_ERRORS):  # OUT says which: it may be of shards, or have lost its errors since
        code = EXIT_REQUEST_ERRORS if errors else EXIT_OK
    return {
        "requests": len(requests),
        "ok": len(requests) - errors,
        "errors": errors,
        "errors_by_code": dict(sorted(requests.codes.items())),
        **requests.ended.summary(),
        "doubts": list(requests.ended.doubts(options)),
        "exit_code": code,
        "continue": None if last is None or code == EXIT_OK else last.continue_command,
        "unfinished": last is not None and end is None,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "computed_tokens": sum(numbers["computed"]),
        "ideal_tokens": ideal,
        "completion_tokens": sum(numbers["out"]),
        "hit_rate": cached / prompt if prompt else 0.0,
        "ideal_hit_rate": None if ideal is None else ideal / prompt if prompt else 0.0,
        "prefill_tokens_per_s": _rate(summaries, "prefill"),
        "decode_tokens_per_s": _rate(summaries, "decode"),
        "tokens_per_pass": tokens_per_pass(summaries),
        "seconds": seconds_of(summaries),
        "peak_rss_bytes": _most(summaries, "peak_rss_bytes"),
        "peak_device_bytes": _most(summaries, "peak_device_bytes"),
        "store_skipped": _sum(summaries, "store_skipped"),
        "ignored_columns": _ignored_columns(summaries),
        "warnings": _warnings(summaries),
        "processes": len(processes),
        "percentiles": _percentiles(requests),
    }


def summaries_of(processes: Sequence[Process]) -> list[dict[str, Any]]:
    """Return the summaries of the processes that ran to their end."""
    return [one.end.summary for one in processes if one.end is not None]


def tokens_per_pass(summaries: Sequence[dict[str, Any]]) -> float | None:
    """Return the mean number of tokens that an answer gets in a decode pass, over all processes, weighted by their
    passes. None if no summary has the figure, as in versions without drafts."""
    known = [(value, one) for one in summaries if (value := number(one.get("tokens_per_pass")))]
    if len(known) == 1:
        return known[0][0]
    tokens = [(number(one.get("decode_tokens_per_s")) or 0.0) * stage(one, "decode") for _, one in known]
    passes = sum(count / value for count, (value, _) in zip(tokens, known, strict=True))
    return sum(tokens) / passes if passes else None


def _percentiles(requests: Requests) -> list[dict[str, Any]] | None:
    """Return p50, p95 and p99 of seconds and tokens per answered request, by nearest rank; None if none was
    answered."""
    numbers = requests.numbers
    answered = [row for row, error in enumerate(numbers["error"]) if not error]
    if not answered:
        return None
    prefill, decode = ([numbers[name][row] / 10_000 for row in answered] for name in ("prefill_ms", "decode_ms"))
    columns: dict[str, list[float]] = {
        "seconds": [sum(both) for both in zip(prefill, decode, strict=True)],
        "prefill_s": prefill,
        "decode_s": decode,
        **{name: [numbers[name][row] for row in answered] for name in ("prompt", "computed", "out")},
    }
    ranks = {percent: -(-percent * len(answered) // 100) - 1 for percent in PERCENTS}
    return [
        {"name": name, **{f"p{percent}": values[rank] for percent, rank in ranks.items()}}
        for name, values in ((name, sorted(column)) for name, column in columns.items())
    ]


def seconds_of(summaries: Sequence[dict[str, Any]]) -> dict[str, float] | None:
    """Return the sum of the seconds of each stage; None without a summary."""
    return {name: sum(stage(one, name) for one in summaries) for name in STAGES} if summaries else None


def _rate(summaries: Sequence[dict[str, Any]], name: str) -> float | None:
    """Return the tokens per second of a stage over all processes. A process's tokens are its rate times its seconds."""
    parts = [(number(one.get(f"{name}_tokens_per_s")), stage(one, name)) for one in summaries]
    timed = [(rate, seconds) for rate, seconds in parts if rate is not None and seconds > 0]
    if len(timed) == 1:
        return timed[0][0]
    total_s = sum(seconds for _, seconds in timed)
    return sum(rate * seconds for rate, seconds in timed) / total_s if timed else None


def _most(summaries: Sequence[dict[str, Any]], name: str) -> int | None:
    """Return the largest number of bytes of any process; None if no process has it."""
    values = [one.get(name) for one in summaries]
    return max((value for value in values if type(value) is int and value > 0), default=None)


def _sum(summaries: Sequence[dict[str, Any]], name: str) -> int | None:
    """Return the sum of a count over all processes; None if no process has it."""
    values = [one[name] for one in summaries if type(one.get(name)) is int and 0 <= one[name] <= MOST]
    return sum(values) if values else None


def _ignored_columns(summaries: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Return column -> number of conversations that have it: the largest one, since each process reads INPUT anew."""
    found: dict[str, int] = {}
    for given in (one.get("ignored_columns") for one in summaries):
        for name, count in given.items() if isinstance(given, dict) else ():
            if type(count) is int and 0 < count <= MOST and len(found) < MOST_COLUMNS:
                found[name] = max(count, found.get(name, 0))
    return found


def _warnings(summaries: Sequence[dict[str, Any]]) -> list[str]:
    """Return all distinct warnings."""
    lists = [one.get("warnings") for one in summaries]
    return list(dict.fromkeys(str(one) for given in lists if isinstance(given, list) for one in given))


def stage(summary: dict[str, Any], name: str) -> float:
    """Return the seconds of a stage in a summary; 0 if it has none."""
    seconds = summary.get("seconds")
    return number(seconds.get(name)) or 0.0 if isinstance(seconds, dict) else 0.0


def number(value: object) -> float | None:
    """Return a value of a summary if it is a number from 0 to MOST; otherwise None."""
    return value if type(value) in (int, float) and 0 <= value <= MOST else None  # type: ignore[operator, return-value]
