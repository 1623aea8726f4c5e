"""Read one run (OUT, trace, run file) into its part of the document; define the panels that show it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from apcbatch.job.runfile import read_run_file, run_file_path
from apcbatch.job.tracing.segment import Segment
from apcbatch.job.tracing.trace_file import TraceError, read_trace, trace_path
from apcbatch.report.drafts import draft_sums
from apcbatch.report.out_file import OutFile
from apcbatch.report.requests import Requests, read_requests
from apcbatch.report.tokens import token_sums, turn_sums
from apcbatch.report.tree import merge_edges
from apcbatch.report.verdict import verdict

OF_A_SEGMENT = (
    "version", "begin", "program", "model", "fingerprint", "dtype", "device", "machine", "options", "input",
)  # fmt: skip
OF_A_RUN_FILE = ("version", "input", "model_fingerprint", "model_files", "config", "origins")


@dataclass
class Run:
    """One run. out: its OUT. requests: its records. segments: its processes from the trace, oldest first. run_file: the
    configuration that made OUT, or None. notes: sentences on data that this report lacks."""

    out: OutFile
    requests: Requests
    segments: list[Segment]
    run_file: dict[str, Any] | None
    notes: list[str]

    @property
    def options(self) -> dict[str, Any]:
        """Options of the latest known process, by name."""
        if self.segments:
            return {name: value for name, value, _ in self.segments[-1].options}
        return dict(self.run_file["config"]) if self.run_file is not None else {}

    @property
    def knows_end(self) -> bool:
        """Whether the trace includes the last process. It does not after a resume with --no-trace, which leaves the
        earlier trace in place."""
        kept_none = self.run_file is not None and self.run_file["config"].get("trace") is False
        return bool(self.segments) and not kept_none

    def as_document(self) -> dict[str, Any]:
        """Return the run as a JSON object of the document."""
        return {
            "name": self.out.name,
            "notes": self.notes,
            **{panel.key or panel.name: panel.data(self) for panel in PANELS if panel.data is not None},
        }


def read_run(out: OutFile) -> Run:
    """Read an OUT with its run file and trace; UsageError for a damaged file, and for one of another program."""
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
    """Return the entries of a run file that this version knows."""
    return None if run_file is None else {name: run_file[name] for name in OF_A_RUN_FILE if name in run_file}


def _ran(run: Run) -> dict[str, Any]:
    """Return the trace's segments and the run file."""
    segments = [{name: getattr(one, name) for name in OF_A_SEGMENT} for one in run.segments]
    return {"segments": segments, "run_file": run.run_file}


def _timeline(segment: Segment) -> dict[str, Any]:
    """Return the passes of one process over time. The time of a killed process ends with its last recorded pass."""
    passes = dataclasses.asdict(segment.passes)
    last_s = passes["begin_s"][-1] + passes["seconds"][-1] if passes["begin_s"] else 0.0
    seconds = last_s if segment.end is None else max(last_s, segment.end.seconds)
    return {"worker": segment.worker, "begin": segment.begin, "seconds": seconds, "passes": passes}


@dataclass(frozen=True)
class Panel:
    """Section of the page, drawn by assets/NAME.js. heading: its heading on the page. short: shorter heading for the
    list of sections. data: returns the panel's data for a run; None for a panel about all runs. key: key of the data in
    the document, if it is not the name."""

    name: str
    heading: str
    short: str = ""
    data: Callable[[Run], Any] | None = None
    key: str = ""


PANELS = (
    Panel("verdict", "Verdict", data=lambda run: verdict(run.requests, run.segments, run.knows_end, run.options)),
    Panel(
        "tokens",
        "Where the prompt tokens went",
        "Tokens",
        lambda run: token_sums(run.requests, run.options.get("policy")),
    ),
    Panel("tree", "Prefix tree", "Tree", lambda run: merge_edges(run.segments)),
    Panel("timeline", "Timeline", "", lambda run: [_timeline(segment) for segment in run.segments], "timelines"),
    Panel("turns", "Prompt tokens by turn", "Turns", lambda run: turn_sums(run.requests)),
    Panel("drafts", "Drafts", data=lambda run: draft_sums(run.requests, run.segments)),
    Panel("curve", "Block sizes"),
    Panel("requests", "Requests", data=lambda run: run.requests.rows()),
    Panel("comparison", "Comparison"),
    Panel("ran", "What ran", data=_ran),
)
"""In the order of the page."""
