"""Read one run (OUT and its run file) into its part of the document; define the panels that show it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from apcbatch.data.input.inputs import TRACE_SUFFIX
from apcbatch.job.out_file import OutFile
from apcbatch.job.processes import MOST_PROCESSES, Process, is_seconds, process_of
from apcbatch.job.runfile import read_run_file, run_file_path
from apcbatch.report.requests import Requests, read_requests
from apcbatch.report.timeline import timelines
from apcbatch.report.tokens import draft_sums, token_sums, turn_sums
from apcbatch.report.verdict import verdict
from apcbatch.resolution import DEFAULT

OF_A_PROCESS = ("version", "begin", "command", "input", "model", "dtype", "device", "machine", "options")
OF_A_RUN_FILE = ("version", "input", "model_fingerprint", "model_files", "config", "origins")


@dataclass
class Run:
    """One run. out: its OUT. requests: its records. processes: those in its run file, oldest first. begin: when the
    first of all began. run_file: the configuration that made OUT, or None. notes: sentences on data that this report
    lacks."""

    out: OutFile
    requests: Requests
    processes: list[Process]
    begin: float
    run_file: dict[str, Any] | None
    notes: list[str]

    @property
    def options(self) -> dict[str, Any]:
        """Options of the latest process, by name."""
        return dict(self.run_file["config"]) if self.run_file is not None else {}

    def as_document(self) -> dict[str, Any]:
        """Return the run as a JSON object of the document."""
        return {
            "name": self.out.name,
            "notes": self.notes,
            "episodes": self.requests.episodes.sentence(),
            **{panel.key or panel.name: panel.data(self) for panel in PANELS if panel.data is not None},
        }


def read_run(out: OutFile) -> Run:
    """Read an OUT with its run file; UsageError for a damaged file, and for one of another program."""
    requests = read_requests(out)
    path = run_file_path(out.target)
    run_file, reason = read_run_file(path)
    notes = list(requests.notes(out.lines))
    if out.is_partial:
        notes.append(f"the run is not complete: {out.target} is made of {out.lines} when it is")
    processes: list[Process] = []
    if run_file is None:
        notes.append(f"{path} {reason}, so nothing says what the run was made with, how long it took and how it ended")
    else:
        notes += _read_processes(run_file, path, processes)
    trace = out.target + TRACE_SUFFIX
    if os.path.lexists(trace):
        notes.append(f"{trace} is of an earlier version and is not read")
    begin = (run_file or {}).get("begin")
    first = processes[0].begin if processes else 0.0
    known = None if run_file is None else {name: run_file[name] for name in OF_A_RUN_FILE if name in run_file}
    return Run(out, requests, processes, begin if is_seconds(begin) else first, known, notes)


def _read_processes(run_file: Mapping[str, Any], path: str, processes: list[Process]) -> Iterator[str]:
    """Append the processes of a run file, and yield a sentence for each that is missing."""
    entries, dropped = run_file.get("processes"), run_file.get("dropped_processes")
    if not isinstance(entries, list) or not entries:
        yield f"{path} has no entry of a process, as in earlier versions: there is no timeline and no time"
        return
    if type(dropped) is int and dropped > 0:
        yield f"{path} had the entries of {dropped} older processes, which were dropped to bound it"
    for number, found in enumerate(entries[-MOST_PROCESSES:], start=1):
        try:
            processes.append(process_of(found))
        except ValueError as error:
            yield f"the entry of process {number} in {path} cannot be read: {error}"


def _ran(run: Run) -> dict[str, Any]:
    """Return the processes and the run file. The latest process has all options, since the run file has those."""
    facts = run.run_file or {}
    fingerprint = {"fingerprint": facts.get("model_fingerprint")}
    rows = [{name: getattr(one, name) for name in OF_A_PROCESS} | fingerprint for one in run.processes]
    if rows:
        given = {name for name, _, _ in rows[-1]["options"]}
        rest = [(name, value, DEFAULT) for name, value in run.options.items() if name not in given]
        rows[-1]["options"] = [*rows[-1]["options"], *rest]
    return {"processes": rows, "run_file": run.run_file}


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
    Panel("verdict", "Verdict", data=lambda run: verdict(run.requests, run.processes, run.options)),
    Panel(
        "tokens",
        "Where the prompt tokens went",
        "Tokens",
        lambda run: token_sums(run.requests, run.options.get("policy")),
    ),
    Panel("tree", "Prefix tree", "Tree", lambda run: None),  # made where the prompts are read
    Panel("timeline", "Timeline", "", lambda run: timelines(run.requests, run.processes, run.begin), "timelines"),
    Panel("turns", "Prompt tokens by turn", "Turns", lambda run: turn_sums(run.requests)),
    Panel("drafts", "Drafts", data=lambda run: draft_sums(run.requests, run.processes)),
    Panel("curve", "Block sizes"),
    Panel("requests", "Requests", data=lambda run: run.requests.rows()),
    Panel("comparison", "Comparison"),
    Panel("ran", "What ran", data=_ran),
)
"""In the order of the page."""
