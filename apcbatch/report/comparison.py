"""Compare two runs of the same requests: which answers differ and where, tokens, seconds, misses, options.

Invariant: two answers count as equal only if all token ids of all choices are equal, or if both are the same error.
Requests are paired by id and turn; those without an id by line and turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any

from apcbatch.job.out_file import OutFile
from apcbatch.job.record import read_record
from apcbatch.report.panels import Run
from apcbatch.report.requests import DIGEST_BYTES, Requests, token_lists
from apcbatch.report.verdict import STAGES

MOST_LISTED = 1000
ONE_FAILED = -1
NOT_TOLD = bytes(DIGEST_BYTES)  # of a record without a digest
NOT_COMPARED = frozenset(("resume", "overwrite", "retry_errors", "report", "summary", "progress", "quiet", "verbose"))
MEASURES = (
    ("requests", "requests", "requests"),
    ("errors", "requests", "errors"),
    ("prompt tokens", "tokens", "prompt_tokens"),
    ("prompt tokens restored", "tokens", "cached_tokens"),
    ("prompt tokens computed", "tokens", "computed_tokens"),
    ("restored share", "share", "hit_rate"),
    ("tokens generated", "tokens", "completion_tokens"),
    ("prefill rate", "tokens/s", "prefill_tokens_per_s"),
    ("decode rate", "tokens/s", "decode_tokens_per_s"),
    ("tokens per pass", "tokens/pass", "tokens_per_pass"),
    ("peak memory", "bytes", "peak_rss_bytes"),
    ("peak GPU memory", "bytes", "peak_device_bytes"),
)

Key = tuple[str, int, int]


def compare(base: Run, other: Run, base_document: dict[str, Any], other_document: dict[str, Any]) -> dict[str, Any]:
    """Compare two runs, given their documents. Return the comparison; the caller adds the indices of the runs."""
    base_rows, other_rows = _rows(base.requests), _rows(other.requests)
    both = [(row, other_rows[key]) for key, row in base_rows.items() if key in other_rows]
    one, two = base.requests, other.requests
    unequal = [pair for pair in both if one.answer_digest(pair[0]) != two.answer_digest(pair[1])]
    listed = unequal[:MOST_LISTED]
    digests = ((one.prompt_digest(a), two.prompt_digest(b)) for a, b in both)  # of prompt and settings
    failed = [one.numbers["error"][a] or two.numbers["error"][b] for a, b in unequal]
    return {
        "other_model": _is_other_model(base, other),
        "failed_count": sum(map(bool, failed)),
        "both": len(both),
        "only_base": len(base_rows) - len(both),
        "only_other": len(other_rows) - len(both),
        "other_requests": sum(a != b and NOT_TOLD not in (a, b) for a, b in digests),
        "same_answers": len(both) - len(unequal),
        "different": _different(base, other, listed),
        "different_count": len(unequal),
        "rows": list(_measures(base_document["verdict"], other_document["verdict"])),
        "misses": _misses(base, other),
        "changed_options": _changed_options(base, other),
    }


def _is_other_model(base: Run, other: Run) -> bool:
    """Return whether the runs had different models, or one model in two ways that have other bits (dtype, device)."""
    one, two = ((run.run_file or {}).get("model_fingerprint") for run in (base, other))
    return one != two if None not in (one, two) else base.options.get("model") != other.options.get("model")


def _rows(requests: Requests) -> dict[Key, int]:
    """Return the row of each request by (id, turn, occurrence). The occurrence, from 1, tells repeated ids apart, such
    as those of `duplicate_id` errors."""
    rows: dict[Key, int] = {}
    times: Counter[tuple[str, int]] = Counter()
    for row, (name, turn) in enumerate(zip(requests.ids, requests.numbers["turn"], strict=True)):
        times[name, turn] += 1
        rows[name, turn, times[name, turn]] = row
    return rows


def _different(base: Run, other: Run, pairs: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Return an entry for each pair of unequal answers, with the first choice and token that differ. The token is -1 if
    one answer is an error. Both OUTs are read again."""
    if not pairs:
        return []
    records = [
        _tokens_of(run.out, {run.requests.record_ids[pair[side]] for pair in pairs})
        for side, run in enumerate((base, other))
    ]
    rows = []
    for pair in pairs:
        one, two = (records[side].get(run.requests.record_ids[pair[side]]) for side, run in enumerate((base, other)))
        choice, at = (0, ONE_FAILED) if one is None or two is None else first_difference(one, two)
        rows.append(
            {"id": base.requests.ids[pair[0]], "base_row": pair[0], "other_row": pair[1], "choice": choice, "at": at}
        )
    return rows


def first_difference(one: list[list[Any]], two: list[list[Any]]) -> tuple[int, int]:
    """Return (choice, token), from 0, of the first token that differs; (0, 0) if none does. The end of the shorter
    answer counts as a difference."""
    for choice in range(max(len(one), len(two))):
        mine, theirs = (answers[choice] if choice < len(answers) else [] for answers in (one, two))
        shared = min(len(mine), len(theirs))
        at = next((n for n in range(shared) if mine[n] != theirs[n]), shared)
        if at < max(len(mine), len(theirs)) or (choice < len(one)) != (choice < len(two)):
            return choice, at
    return 0, 0


def _tokens_of(out: OutFile, ids: set[str]) -> dict[str, list[list[Any]]]:
    """Return the tokens of the answers with these record ids, by id; errors are left out."""
    heads = {f'{{"id":"{name}"'.encode() for name in ids}
    found = {}
    for _, line in out.read():
        if line is not None and line[: line.find(b",")] in heads:
            record = read_record(line)
            if record is not None and record["error"] is None:
                found[record["id"]] = token_lists(record)
    return found


def _measures(base: dict[str, Any], other: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield each measure of both runs, side by side, unless neither run has a number for it."""
    seconds = (
        (f"{name} seconds", "s", *((one["seconds"] or {}).get(name) for one in (base, other))) for name in STAGES
    )
    counts = ((name, unit, base[key], other[key]) for name, unit, key in MEASURES)
    for name, unit, mine, theirs in chain(counts, seconds):
        if mine is not None or theirs is not None:
            yield {"name": name, "unit": unit, "base": mine, "other": theirs}


def _misses(base: Run, other: Run) -> list[dict[str, Any]]:
    one, two = (
        Counter(requests.reasons[number] for number in requests.numbers["reason"] if number)
        for requests in (base.requests, other.requests)
    )
    reasons = sorted(one.keys() | two.keys(), key=lambda reason: (-one[reason] - two[reason], reason))
    return [{"reason": reason, "base": one[reason], "other": two[reason]} for reason in reasons]


def _changed_options(base: Run, other: Run) -> list[dict[str, Any]]:
    """Return the options that differ, among those that both versions have; then version and model fingerprint if they
    differ."""
    one, two = base.options, other.options
    rows = [(name, one[name], two[name]) for name in one if name in two and name not in NOT_COMPARED]
    for name in ("version", "model_fingerprint"):
        rows.append((name, (base.run_file or {}).get(name), (other.run_file or {}).get(name)))
    return [{"name": name, "base": mine, "other": theirs} for name, mine, theirs in rows if mine != theirs]
