"""One run as a part of the document: its OUT, the trace and the run file beside it.

Must not know: other runs, the page.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from apcbatch.job.runfile import read_run_file, run_file_path
from apcbatch.job.segment import Segment
from apcbatch.job.trace_file import TraceError, read_trace, trace_path
from apcbatch.report.out_file import OutFile
from apcbatch.report.requests import Requests, read_requests
from apcbatch.report.tokens import token_sums
from apcbatch.report.tree import merge_stems
from apcbatch.report.turns import turn_sums
from apcbatch.report.verdict import verdict

OF_A_SEGMENT = (
    "version", "begin", "program", "model", "fingerprint", "dtype", "device", "machine", "options", "input",
)  # fmt: skip
OF_A_RUN_FILE = ("version", "input", "model_fingerprint", "model_files", "config", "origins")


@dataclass
class Run:
    """out: the file. requests: its records. segments: of its trace, oldest first. run_file: what it was made with, or
    None. notes: sentences on what this report lacks."""

    out: OutFile
    requests: Requests
    segments: list[Segment]
    run_file: dict[str, Any] | None
    notes: list[str]

    @property
    def options(self) -> dict[str, Any]:
        """The options of the latest process that is known, by name."""
        if self.segments:
            return {name: value for name, value, _ in self.segments[-1].options}
        return dict(self.run_file["config"]) if self.run_file is not None else {}

    @property
    def knows_end(self) -> bool:
        """Whether the trace has the last process that ran: one with --no-trace leaves the trace of those before it."""
        kept_none = self.run_file is not None and self.run_file["config"].get("trace") is False
        return bool(self.segments) and not kept_none

    def as_document(self) -> dict[str, Any]:
        """The run as the page shows it."""
        return {
            "name": self.out.name,
            "notes": self.notes,
            "verdict": verdict(self.requests, self.segments, self.knows_end),
            "tokens": token_sums(self.requests, self.options.get("policy")),
            "tree": merge_stems(self.segments),
            "timelines": [_timeline(segment) for segment in self.segments],
            "turns": turn_sums(self.requests),
            "requests": self.requests.rows(),
            "ran": {
                "segments": [{name: getattr(one, name) for name in OF_A_SEGMENT} for one in self.segments],
                "run_file": self.run_file,
            },
        }


def read_run(out: OutFile) -> Run:
    """Read an OUT and what lies beside it; UsageError for a file that holds no record of this program."""
    requests = read_requests(out)
    run_file, reason = read_run_file(run_file_path(out.target))
    notes = list(requests.notes(out.lines))
    if out.is_partial:
        notes.append(f"the run is not complete: {out.target} is made of {out.lines} when it is")
    if run_file is None:
        notes.append(f"{run_file_path(out.target)} {reason}, so nothing says what the run was made with")
    segments: list[Segment] = []
    try:
        trace = read_trace(trace_path(out.target))
    except TraceError as error:
        notes.append(f"there is no prefix tree, no timeline and no time: {error}")
    else:
        segments = trace.segments
        notes += trace.notes
    run = Run(out, requests, segments, _known(run_file), notes)
    if segments and not run.knows_end:
        notes.append(
            f"the last process that ran on {out.name} kept no trace (--no-trace): the prefix tree, the timeline and "
            "the times are those of the ones before it, and its exit status is not known"
        )
    return run


def _known(run_file: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What a run file says, without what it does not say in this version."""
    return None if run_file is None else {name: run_file[name] for name in OF_A_RUN_FILE if name in run_file}


def _timeline(segment: Segment) -> dict[str, Any]:
    """What one process did over time. A killed one lasted at least to the end of its last pass that is known."""
    passes = dataclasses.asdict(segment.passes)
    last_s = passes["begin_s"][-1] + passes["seconds"][-1] if passes["begin_s"] else 0.0
    seconds = last_s if segment.end is None else max(last_s, segment.end.seconds)
    return {"worker": segment.worker, "begin": segment.begin, "seconds": seconds, "passes": passes}
