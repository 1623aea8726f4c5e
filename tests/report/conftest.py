"""The command line with the fake engine, as the tests of the job have it, and a maker of real runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from apcbatch.config import Config
from apcbatch.data.input.inputs import find_inputs
from apcbatch.job.out_file import find_out
from apcbatch.report.prompts import PromptReader
from apcbatch.report.report_file import make_document
from tests.job.conftest import apcbatch, engines, real, start  # noqa: F401

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "agents.jsonl"


def document_of(*outs: Path | str, prompts: Path | str | None = None) -> dict[str, Any]:
    """The document of some OUTs, as the page gets it. prompts: the INPUT of all of them, to be read."""
    reader = None
    if prompts is not None:
        reader = PromptReader(find_inputs([str(prompts)], pytest.fail), Config.model, pytest.fail)
    return json.loads(json.dumps(make_document([find_out(str(out)) for out in outs], None, reader), allow_nan=False))


def run_of(out: Path | str, prompts: Path | str | None = None) -> dict[str, Any]:
    """The one run of a document."""
    return document_of(out, prompts=prompts)["runs"][0]
