"""Make the document of a report: runs, their comparisons, the block-size curve."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from apcbatch.job.out_file import OutFile
from apcbatch.report.comparison import compare
from apcbatch.report.fit import fit
from apcbatch.report.panels import Run, read_run
from apcbatch.report.texts import Prompt
from apcbatch.version import VERSION

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
