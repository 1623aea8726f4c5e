"""Make the document of a report: runs, their comparisons, the block-size curve. Name, check and write its file.

Invariant: a file that is not a report of this program is replaced only with --overwrite; a report is written
atomically.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from apcbatch.errors import UsageError
from apcbatch.job.disk import Disk, write_file
from apcbatch.job.out_file import OutFile
from apcbatch.job.output_paths import STDOUT, without_suffixes
from apcbatch.regular_files import kind_of, open_regular_file
from apcbatch.report.comparison import compare
from apcbatch.report.fit import fit
from apcbatch.report.page import page
from apcbatch.report.panels import Run, read_run
from apcbatch.report.texts import Prompt
from apcbatch.version import VERSION

FIRST_BYTES = b"<!doctype html>\n<!-- apcbatch report"
SUFFIX = ".report.html"
FORMAT = 1
Prompts = Callable[[Run], tuple[list[Prompt | None], dict[str, Any]]]


def make_document(
    outs: Sequence[OutFile], curve: dict[str, Any] | None = None, prompts: Prompts | None = None
) -> dict[str, Any]:
    """Read the OUTs and make the document, shortened so that it fits a page. curve: result of `curve.read_curve`.
    prompts: returns the prompt of each row of a run, and its prefix tree. UsageError for an OUT that cannot be used."""
    runs = [read_run(out) for out in outs]
    documents = [run.as_document() for run in runs]
    if prompts is not None:
        for run, document in zip(runs, documents, strict=True):
            document["requests"]["prompt_text"], document["tree"] = prompts(run)
    comparisons = [
        {"base": 0, "other": place, **compare(runs[0], runs[place], documents[0], documents[place])}
        for place in range(1, len(runs))
    ]
    made = {"version": VERSION, "at": time.time()}
    return fit({"format": FORMAT, "made": made, "runs": documents, "comparisons": comparisons, "curve": curve})


def default_report(outs: Sequence[str]) -> str:
    """Return the default name of the report, in the current folder, made from the first OUT:
    `chats.answers.report.html` for `data/chats.answers.jsonl.gz`."""
    return without_suffixes(os.path.basename(outs[0])) + SUFFIX


def check_report(flag: str, path: str, overwrite: bool = False) -> None:
    """Raise UsageError for a path that no report may be written to: a stream, a pipe, or an existing file that is not a
    report. overwrite: allow any regular file."""
    if path == STDOUT:
        raise UsageError(f"{flag} needs a file, such as run{SUFFIX}; standard output has other uses")
    if not os.path.exists(path):
        return
    if not os.path.isfile(path):
        raise UsageError(f"{flag} {path} is {kind_of(os.stat(path).st_mode)}; expected a file, such as run{SUFFIX}")
    if not overwrite and not _is_replaceable(path):
        ways = ["give another file", "move that one away"] + ["give --overwrite"] * (flag == "-o")
        raise UsageError(f"{flag} {path} exists and is not a report of this program; {', or '.join(ways)}")


def write_report(path: str, document: dict[str, Any]) -> int:
    """Write the page of a document and return its size in bytes. UsageError if the file cannot be written."""
    names = [os.path.basename(run["name"]) for run in document["runs"]]
    data = page(document, f"{', '.join(names)} - apcbatch report")
    try:
        write_file(path, [data], Disk())
    except OSError as error:
        raise UsageError(f"the report {path} was not written: {error.strerror}") from None
    return len(data)


def shown_bytes(size: int) -> str:
    """Format a size in decimal units: `482 kB`, `1.9 MB`."""
    return f"{size / 1e6:.1f} MB" if size >= 1_000_000 else f"{max(1, round(size / 1e3))} kB"


def _is_replaceable(path: str) -> bool:
    """Return whether a file is empty or begins like a report."""
    try:
        with open_regular_file(path) as file:
            head = file.read(len(FIRST_BYTES))
    except OSError:
        return False
    return head in (b"", FIRST_BYTES)
