"""From the command line to the screen: real runs, `apcbatch report`, and the page that comes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.browser.opened import Opened, expect
from tests.browser.shown import agrees
from tests.browser.test_requests import comparable
from tests.conftest import ROOT, SHARED_DATA

EXAMPLES = ROOT / "examples" / "agents.jsonl"
NUMBERS = (
    "requests", "ok", "errors", "prompt_tokens", "cached_tokens", "computed_tokens", "completion_tokens", "hit_rate",
    "ideal_hit_rate", "prefill_tokens_per_s", "decode_tokens_per_s", "peak_rss_bytes",
)  # fmt: skip


def apcbatch(*arguments: object, exit_code: int = 0) -> str:
    """The last line that a command prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("APCBATCH_")}
    command = [sys.executable, "-m", "apcbatch", *map(str, arguments)]
    done = subprocess.run(
        command, env=environment | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == exit_code, done.stderr
    return done.stdout.splitlines()[-1]


@dataclass(frozen=True)
class Made:
    """Two runs of one input, the second with what the first one left in the store, and the report of both."""

    report: Path
    summaries: list[dict[str, Any]]
    records: list[dict[str, Any]]


def make(folder: Path, source: Path, limit: int, exit_code: int = 0) -> Made:
    summaries = []
    for name in ("cold", "warm"):
        options = ["--store", folder / "store", "--policy", "all", "--limit", limit, "--max-tokens", 8, "-q"]
        summaries.append(
            json.loads(apcbatch("run", source, "-o", folder / f"{name}.jsonl", *options, exit_code=exit_code))
        )
    report = folder / "report.html"
    outs = (folder / "warm.jsonl", folder / "cold.jsonl")
    said = apcbatch("report", *outs, "-o", report, "--prompts", source)
    assert str(report) in said
    records = [json.loads(line) for line in (folder / "warm.jsonl").read_text().splitlines()]
    return Made(report, summaries[::-1], records)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Of the examples, with a line that cannot be read."""
    folder = tmp_path_factory.mktemp("real")
    source = folder / "in.jsonl"
    lines = EXAMPLES.read_text().splitlines(keepends=True)[:2]
    calling = json.loads(lines[1])
    calling |= {"id": "calling", "messages": calling["messages"][:2], "max_tokens": 64}
    bad = '{"id": "bad </script><img src=x>", "messages": [{"role": 5}]}\n'
    source.write_text(lines[0] + bad + lines[1] + json.dumps(calling) + "\n")
    return make(folder, source, 30, exit_code=3)


def assert_shows(page: Opened, summary: dict[str, Any]) -> None:
    """The page of a run says what the run said at its end."""
    for name in NUMBERS:
        assert page.value(name) == pytest.approx(summary[name], rel=1e-9), name
        assert agrees(page.page.locator(f'#verdict [data-name="{name}"]').first.inner_text(), summary[name]), name
    assert page.value("seconds.total") == pytest.approx(summary["seconds"]["total"], abs=0.001)
    for part in ("memory", "disk"):
        shown = page.page.locator(f"#tokens [data-part={part}]").get_attribute("data-value")
        assert int(shown) == summary["cached_by_source"][part], part
    misses = {
        row.get_attribute("data-miss"): int(row.locator("td").first.inner_text().replace(",", ""))
        for row in page.page.locator("#tokens [data-miss]").all()
    }
    assert misses == summary["miss_reasons"]


def test_the_page_says_what_the_run_said(open_file: Callable[..., Opened], made: Made) -> None:
    """Fault: somewhere between the summary, the run file, the document and the page a number was changed."""
    page = open_file(made.report)
    assert made.summaries[0]["errors"] == 1 and made.summaries[0]["cached_by_source"]["disk"] > 0
    assert_shows(page, made.summaries[0])
    page.page.locator("#run").select_option("1")
    assert_shows(page, made.summaries[1])


def test_the_tree_adds_up_to_the_run(open_file: Callable[..., Opened], made: Made) -> None:
    """Fault: the picture is of another run, or of a part of the requests."""
    page = open_file(made.report)
    assert page.value("saved", "#edge") == made.summaries[0]["cached_tokens"]
    assert page.value("requests", "#edge") == made.summaries[0]["ok"]
    edge = page.page.locator('#tree [data-node]:not([data-node="0"])').first
    assert 0 < edge.bounding_box()["width"] <= page.page.locator('#tree [data-node="0"]').bounding_box()["width"]


def test_each_record_can_be_opened(open_file: Callable[..., Opened], made: Made) -> None:
    """Fault: an answer, a call or an error of the file is not the one on the page."""
    page = open_file(made.report)
    [calling] = [row for row, record in enumerate(made.records) if "calling" in record["custom_id"]]
    for row in {*range(0, len(made.records), max(1, len(made.records) // 6)), calling}:
        record = made.records[row]
        page.page.locator("#requests-filter").fill(f"line:{record['line']}")
        page.page.locator(f'#requests [data-row="{row}"] td').first.click()
        detail = page.page.locator("#request-detail")
        expect(detail.locator("[data-request]")).to_have_attribute("data-request", record["custom_id"])
        if record["error"] is None:
            usage = record["response"]["body"]["usage"]
            assert page.value("prompt", "#request-detail") == usage["prompt_tokens"]
            assert page.value("out", "#request-detail") == usage["completion_tokens"]
            message = record["response"]["body"]["choices"][0]["message"]
            assert bool(message["tool_calls"]) >= (row == calling)
            for call in message["tool_calls"]:
                assert call["function"]["name"] in detail.text_content()
                assert comparable(call["function"]["arguments"]) in comparable(detail.text_content())
        else:
            assert record["error"]["message"] in detail.inner_text()


def test_cold_and_warm_answer_alike(open_file: Callable[..., Opened], made: Made) -> None:
    """Fault: the promise of the same bits is broken, or the page compares other things than answers."""
    page = open_file(made.report)
    expect(page.page.locator("#comparison [data-same]")).to_have_attribute("data-same", "yes")
    assert page.value("both", "#comparison") == len(made.records)


@pytest.mark.data
@pytest.mark.parametrize(
    "source", sorted(SHARED_DATA.glob("*.jsonl*")) if SHARED_DATA.is_dir() else [], ids=lambda path: path.name
)
def test_real_conversations(open_file: Callable[..., Opened], source: Path, tmp_path: Path) -> None:
    """Fault: what people really wrote breaks the page: markup, other alphabets, long words."""
    made = make(tmp_path, source, 2)
    page = open_file(made.report, viewport={"width": 700, "height": 900})
    assert_shows(page, made.summaries[0])
    for row, record in enumerate(made.records[:8]):
        page.page.locator(f'#requests [data-row="{row}"] td').first.click()
        detail = page.page.locator("#request-detail")
        expect(detail.locator("[data-request]")).to_have_attribute("data-request", record["custom_id"])
        for choice in ((record["response"] or {}).get("body") or {}).get("choices", []):
            assert comparable(choice["message"]["content"] or "") in comparable(detail.text_content())
    assert page.page.evaluate("document.scrollingElement.scrollWidth - document.scrollingElement.clientWidth") <= 0
