"""Lay out what each process of a run did over time: running and failed requests, from the times in the records.

A record belongs to the latest process that began before the record's end: processes of one OUT follow each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from apcbatch.job.processes import Process
from apcbatch.report.requests import Requests
from apcbatch.report.verdict import STAGES, stage

COLUMNS = 400
Micros = npt.NDArray[np.int64]


def timelines(requests: Requests, processes: Sequence[Process], out_begin: float) -> list[dict[str, Any]]:
    """Return an entry for each process, with COLUMNS columns of equal time. out_begin: when OUT's first process began.

    seconds: duration; of a killed process up to its last record. phases: seconds by phase, None without a summary.
    running: the most requests that ran at once in the column. failed: error records written up to the column's end.
    """
    begins, ends = (np.array(column, np.int64) for column in (requests.begin_us, requests.end_us))
    is_error = np.array(requests.numbers["error"], np.int64) != 0
    starts = np.array([round(1e6 * max(0.0, one.begin - out_begin)) for one in processes], np.int64)
    process_of = np.searchsorted(np.maximum.accumulate(starts), ends, "right") - 1
    entries = []
    for number, (process, start) in enumerate(zip(processes, starts, strict=True)):
        own = (process_of == number) & (ends >= 0)
        answered = own & (begins >= 0)
        last_s = float((ends[own].max() - start) / 1e6) if own.any() else 0.0
        seconds = last_s if process.end is None else max(last_s, process.end.seconds)
        width = max(1e6 * seconds, 1.0) / COLUMNS
        failed = np.bincount(_columns(ends[own & is_error] - start, width), minlength=COLUMNS)
        entries.append(
            {
                "begin": process.begin,
                "seconds": seconds,
                "phases": _phases(process),
                "running": _running(np.maximum(begins[answered] - start, 0), ends[answered] - start, width),
                "failed": np.cumsum(failed).tolist(),
            }
        )
    return entries


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


def _phases(process: Process) -> dict[str, float] | None:
    """Return the seconds of each phase of a process that ended; `idle` is the rest of its time."""
    if process.end is None:
        return None
    *phases, total = STAGES
    spent = {name: stage(process.end.summary, name) for name in phases}
    return spent | {"idle": max(0.0, stage(process.end.summary, total) - sum(spent.values()))}
