"""Lay out what each process of a run did over time: running and failed requests, from the times in the records.

Processes that worked at the same time, those of shards that were merged, are shown as one group. A record belongs to
the last group that began before the record's end; groups do not overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from apcbatch.job.processes import Process
from apcbatch.report.requests import Requests
from apcbatch.report.verdict import seconds_of, summaries_of

COLUMNS = 400
Micros = npt.NDArray[np.int64]


def timelines(requests: Requests, processes: Sequence[Process], out_begin: float) -> list[dict[str, Any]]:
    """Return an entry for each process, with COLUMNS columns of equal time; one entry for those that worked at the same
    time. out_begin: when OUT's first process began.

    seconds: duration; of a killed process up to its last record. phases: seconds by phase, of all processes together,
    None without a summary. running: the most requests that ran at once in the column. failed: error records written up
    to the column's end.
    """
    begins, ends = (np.array(column, np.int64) for column in (requests.begin_us, requests.end_us))
    is_error = np.array(requests.numbers["error"], np.int64) != 0
    groups = _side_by_side(processes)
    starts = np.array([round(1e6 * max(0.0, group[0].begin - out_begin)) for group in groups], np.int64)
    process_of = np.searchsorted(np.maximum.accumulate(starts), ends, "right") - 1
    entries = []
    for number, (group, start) in enumerate(zip(groups, starts, strict=True)):
        own = (process_of == number) & (ends >= 0)
        answered = own & (begins >= 0)
        last_s = float((ends[own].max() - start) / 1e6) if own.any() else 0.0
        seconds = max(last_s, _seconds(group))
        width = max(1e6 * seconds, 1.0) / COLUMNS
        failed = np.bincount(_columns(ends[own & is_error] - start, width), minlength=COLUMNS)
        entries.append(
            {
                "begin": group[0].begin,
                "seconds": seconds,
                "phases": _phases(group),
                "running": _running(np.maximum(begins[answered] - start, 0), ends[answered] - start, width),
                "failed": np.cumsum(failed).tolist(),
            }
        )
    return entries


def _side_by_side(processes: Sequence[Process]) -> list[list[Process]]:
    """Group processes, in the order of their begins, each with those that began before its end."""
    groups: list[list[Process]] = []
    for process in processes:
        if groups and 0.0 <= process.begin - groups[-1][0].begin < _seconds(groups[-1]):
            groups[-1].append(process)
        else:
            groups.append([process])
    return groups


def _seconds(group: Sequence[Process]) -> float:
    """Return the seconds from the begin of the first process to the last end; a killed one counts as ended at its
    begin."""
    return max(one.begin - group[0].begin + (0.0 if one.end is None else one.end.seconds) for one in group)


def _running(begins: Micros, ends: Micros, width: float) -> list[int]:
    """Return the largest number of intervals that overlap in each column. A request that ends when another one begins
    does not overlap it."""
    times = np.concatenate([begins, np.maximum(ends, begins + 1)])
    steps = np.repeat([1, -1], len(begins))
    order = np.lexsort((steps, times))
    times, counts = times[order], np.cumsum(steps[order])
    carried = np.searchsorted(times, np.arange(COLUMNS) * width, "right")
    most = np.concatenate([[0], counts])[carried]
    np.maximum.at(most, _columns(times, width), counts)
    return [int(count) for count in most]


def _columns(times: Micros, width: float) -> Micros:
    return np.minimum(times / width, COLUMNS - 1).astype(np.int64)


def _phases(group: Sequence[Process]) -> dict[str, float] | None:
    """Return the seconds of each phase, summed over processes that ended; `idle` is the rest of their time."""
    spent = seconds_of(summaries_of(group))
    if spent is None:
        return None
    total = spent.pop("total")
    return spent | {"idle": max(0.0, total - sum(spent.values()))}
