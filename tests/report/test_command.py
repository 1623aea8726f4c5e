"""`apcbatch report` and `run --report`: what they write, what they refuse, and that no run suffers from it."""

from __future__ import annotations

import base64
import gzip
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from apcbatch.cli.run import _run_with_report
from apcbatch.errors import StoppedError
from apcbatch.job.job import Job
from apcbatch.job.signals import Interrupted
from apcbatch.report import report_file
from tests.chats import conversation, read_records, write_lines
from tests.conftest import ROOT
from tests.job.conftest import Outcome
from tests.report.documents import document
from tests.report.runs import HOSTILE

Command = Callable[..., Outcome]
RUN = ("run", "in.jsonl", "-o", "out.jsonl", "--max-tokens", 4, "--max-running", 3, "--policy", "all", "-q")


@pytest.fixture
def out(apcbatch: Command, tmp_path: Path) -> Path:
    """An OUT of six requests."""
    write_lines(tmp_path / "in.jsonl", [conversation(number) for number in range(3)])
    assert apcbatch(*RUN).code == 0
    return tmp_path / "out.jsonl"


def data_of(path: Path) -> dict[str, Any]:
    """The document in a page."""
    [found] = re.findall(rb'<script type="application/octet-stream" id="data">(.*?)</script>', path.read_bytes(), re.S)
    return json.loads(gzip.decompress(base64.b64decode(found)))


def test_it_says_where_the_page_is(out: Path, apcbatch: Command, tmp_path: Path) -> None:
    """Fault: a script cannot tell where the page went; or the page is of another run."""
    done = apcbatch("report", "out.jsonl")
    page = tmp_path / "out.report.html"
    assert done.code == 0 and done.stderr == ""
    assert done.stdout.splitlines()[-1] == f"out.report.html ({round(page.stat().st_size / 1e3)} kB)"
    assert data_of(page)["runs"][0]["verdict"]["requests"] == 6
    (tmp_path / "deep").mkdir()
    assert apcbatch("report", out, "-o", "deep/mine.html").stdout.startswith("deep/mine.html (")
    assert apcbatch("report", out, "-o", "mine.txt").stderr.startswith("warning: -o mine.txt gets an HTML page")


@pytest.mark.parametrize(
    ("name", "report"),
    [("a.answers.jsonl", "a.answers.report.html"), ("b.jsonl.gz", "b.report.html"), ("c", "c.report.html")],
)
def test_the_page_is_named_after_out(name: str, report: str, out: Path, apcbatch: Command, tmp_path: Path) -> None:
    """Fault: the page of one OUT replaces that of another, or lies in another folder."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / name).write_bytes(gzip.compress(out.read_bytes()) if name.endswith("gz") else out.read_bytes())
    assert apcbatch("report", folder / name).code == 0
    assert (tmp_path / report).exists() and [path.name for path in folder.iterdir()] == [name]


def test_only_a_report_is_replaced(
    out: Path, apcbatch: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a slip of the hand replaces answers, or the second report of a run needs a flag."""
    page = tmp_path / "r.html"
    assert apcbatch("report", "out.jsonl", "-o", "r.html").code == 0
    first = page.read_bytes()
    assert apcbatch("report", "out.jsonl", "out.jsonl.copy").code == 2
    assert apcbatch("report", "out.jsonl", "-o", "r.html").code == 0
    for content in (b"notes of mine", first[3:], b"<!doctype html>\n<p>mine"):
        page.write_bytes(content)
        done = apcbatch("report", "out.jsonl", "-o", "r.html")
        assert done.code == 2 and "--overwrite" in done.stderr and page.read_bytes() == content
    page.write_bytes(first)
    with monkeypatch.context() as patch:
        patch.setattr(report_file, "open_regular_file", Mock(side_effect=PermissionError(13, "Permission denied")))
        assert apcbatch("report", "out.jsonl", "-o", "r.html").code == 2
    page.write_bytes(b"")
    assert apcbatch("report", "out.jsonl", "-o", "r.html").code == 0
    page.write_bytes(b"notes of mine")
    assert apcbatch("report", "out.jsonl", "-o", "r.html", "--overwrite").code == 0
    assert page.read_bytes().startswith(report_file.FIRST_BYTES)


def test_what_is_refused_is_refused_with_a_sentence(out: Path, apcbatch: Command, tmp_path: Path) -> None:
    """Fault: a traceback, an exit code of success, or a file of the run that is replaced."""
    (tmp_path / "torn.gz").write_bytes(gzip.compress(random.randbytes(1000).replace(b"\n", b""))[:500])
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    (tmp_path / "notes.txt").write_text("mine\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "two.jsonl").write_bytes(out.read_bytes())
    (tmp_path / "c.gz.part").write_bytes(out.read_bytes())
    os.mkfifo(tmp_path / "pipe")
    cases = {
        ("nothing.jsonl",): "nothing.jsonl cannot be read",
        ("folder",): "folder",
        ("pipe",): "named pipe",
        ("-",): "give the file's name",
        ("s3://bucket/out.jsonl",): "its run has left out.jsonl in the folder where it ran, with out.jsonl.run.json",
        ("s3://",): "its run has left OUT in the folder where it ran",
        ("notes.txt",): "has no record of this program",
        ("torn.gz",): "output torn.gz cannot be read further before its first line: ",
        ("out.jsonl.run.json",): "has no record of this program",
        ("out.jsonl", "./out.jsonl"): "is given twice",
        ("out.jsonl",) * 9: "9 OUTs are given; one report shows 8 at most",
        ("out.jsonl",) * 8: "is given twice",
        ("out.jsonl", "-o", "-"): "needs a file",
        ("out.jsonl", "-o", "s3://bucket/r.html"): "a file on this machine",
        ("out.jsonl", "-o", "folder"): "names a folder",
        ("out.jsonl", "-o", "pipe"): "is a named pipe",
        ("out.jsonl", "-o", "pipe", "--overwrite"): "is a named pipe",
        ("out.jsonl", "-o", "/dev/full"): "is a device",
        ("out.jsonl", "-o", "none/r.html"): "mkdir -p",
        ("out.jsonl", "-o", "out.jsonl", "--overwrite"): "OUT and -o are the same file",
        ("out.jsonl", "-o", "out.jsonl.run.json", "--overwrite"): "OUT.run.json and -o are the same file",
        ("c.gz", "-o", "c.gz.part", "--overwrite"): "OUT and -o are the same file",
        ("c.gz", "-o", "c.gz", "--overwrite"): "OUT when it is complete and -o are the same file",
        ("out.jsonl", "two.jsonl", "-o", "two.jsonl", "--overwrite"): "OUT 2 and -o are the same file",
        ("out.jsonl", "two.jsonl", "-o", "out.jsonl.run.json", "--overwrite"): "OUT 1.run.json and -o are the same",
        ("out.jsonl", "two.jsonl", "./two.jsonl"): "./two.jsonl is given twice; name each OUT once",
        ("out.jsonl", "-o", "in.jsonl", "--overwrite", "--prompts", "in.jsonl"): "are the same file",
        ("out.jsonl", "-o", "t.json", "--tune", "t.json"): "are the same file",
        ("out.jsonl", "--tune", "none.json"): "--tune none.json cannot be read",
        ("out.jsonl", "--tune", "notes.txt"): "tune-block-size --json",
        ("out.jsonl", "--prompts", "none.jsonl"): "cannot read none.jsonl",
        ("out.jsonl", "--prompts", "in.jsonl", "--model", "./none"): "./none",
        (): "Missing argument",
    }
    for arguments, sentence in cases.items():
        done = apcbatch("report", *arguments)
        assert done.code == 2 and sentence in done.stderr, (arguments, done.stderr)
        assert "Traceback" not in done.stderr
    assert {path: path.read_bytes() for path in before} == before
    assert not [*tmp_path.glob("*.html")]


def test_hostile_texts_are_not_in_the_page(out: Path, apcbatch: Command, tmp_path: Path) -> None:
    """Fault: a conversation writes into the page that shows it."""
    records = read_records(out)
    for number, record in enumerate(records):
        record["custom_id"] = f"{number} {HOSTILE[number]}"
        record["response"]["body"]["choices"][0]["message"]["content"] = "".join(HOSTILE) + "W" * 1_000_000
    write_lines(out, records)
    name = 'a<img src=x onerror=alert(1)>&".jsonl'
    out.rename(tmp_path / name)
    done = apcbatch("report", name, "-o", "r.html")
    assert done.code == 0, done.stderr
    page = (tmp_path / "r.html").read_text()
    for text in ("alert(1)", "onerror=alert", "right to left", "WWWW"):
        assert text not in page.replace("&lt;img src=x onerror=alert(1)&gt;", "")
    table = data_of(tmp_path / "r.html")["runs"][0]["requests"]
    assert table["id"] == [record["custom_id"] for record in records]
    assert all(answer.startswith("".join(HOSTILE)) for answer in table["answer"])


def test_the_size_of_a_page() -> None:
    """Fault: a page of 0 kB, or one whose size is a thousand times another's."""
    for size, shown in [
        (1, "1 kB"),
        (1_499, "1 kB"),
        (482_400, "482 kB"),
        (999_400, "999 kB"),
        (1_000_000, "1.0 MB"),
        (1_949_000, "1.9 MB"),
    ]:
        assert report_file.shown_bytes(size) == shown


def test_several_runs_and_a_curve(out: Path, apcbatch: Command, tmp_path: Path) -> None:
    """Fault: options of the command do not reach the page."""
    (tmp_path / "again.jsonl").write_bytes(out.read_bytes())
    curve = document(5)["curve"]
    candidates = [row | {"predicted_prefill_s": row["predicted_s"]} for row in curve["candidates"]]
    (tmp_path / "tuned.json").write_text(
        json.dumps({"candidates": candidates, "policy": "all", "model": "demo", "recommended": {"block_size": 16}})
    )
    done = apcbatch("report", "out.jsonl", "again.jsonl", "--tune", "tuned.json", "-o", "r.html")
    assert done.code == 0 and "again.jsonl.run.json is missing" in done.stderr
    shown = data_of(tmp_path / "r.html")
    assert [run["name"] for run in shown["runs"]] == ["out.jsonl", "again.jsonl"]
    assert shown["comparisons"][0]["same_answers"] == 6
    assert shown["curve"]["recommended"]["block_size"] == 16 and shown["curve"]["source"] == "tune-block-size"


@pytest.mark.slow
def test_a_report_needs_no_torch(out: Path, tmp_path: Path) -> None:
    """Fault: a page that takes a second to make takes five, or is not made where torch is missing."""
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from apcbatch.cli.program import main\n"
        "sys.exit(main(['report', 'out.jsonl', '--prompts', 'in.jsonl']))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(data_of(tmp_path / "out.report.html")["runs"][0]["requests"]["prompt_text"])


def test_a_run_writes_its_report(apcbatch: Command, tmp_path: Path) -> None:
    """Fault: the page lacks the end of the run, or its note stands where scripts read the summary."""
    write_lines(tmp_path / "in.jsonl", [conversation(1), {"messages": []}])
    done = apcbatch(*RUN, "--report", "r.html")
    assert done.code == 3
    assert json.loads(done.stdout.splitlines()[-1])["errors"] == 1
    *_, note, last = done.stderr.splitlines()
    assert re.fullmatch(r"report: r\.html \(\d+ kB\)", note) and "nothing is left to do" in last
    verdict = data_of(tmp_path / "r.html")["runs"][0]["verdict"]
    assert (verdict["requests"], verdict["errors"], verdict["exit_code"]) == (3, 1, 3)
    (tmp_path / "r.html").unlink()
    again = apcbatch(*RUN, "--resume", "--report", "r.html")
    assert again.code == 3 and data_of(tmp_path / "r.html")["runs"][0]["verdict"]["processes"] == 1


def test_the_exit_status_is_that_of_out(apcbatch: Command, tmp_path: Path) -> None:
    """Fault: without its bad line a complete run is shown with exit status 3, merged shards with that of the last."""
    write_lines(tmp_path / "in.jsonl", [conversation(1), {"messages": []}])
    assert apcbatch(*RUN).code == 3
    write_lines(tmp_path / "in.jsonl", [conversation(1)])
    assert apcbatch(*RUN, "--resume", "--report", "r.html").code == 0
    verdict = data_of(tmp_path / "r.html")["runs"][0]["verdict"]
    assert (verdict["errors"], verdict["exit_code"], verdict["continue"]) == (0, 0, None)


@pytest.mark.drawn(1)
@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_too(number: signal.Signals, code: int, start: Callable[..., Any], tmp_path: Path) -> None:
    """Fault: the run that needs a look most has no page; or the command that continues is no longer the last line."""
    write_lines(tmp_path / "in.jsonl", [conversation(number) for number in range(20)])
    process = start(*RUN, "--report", "r.html", FAKE_STEP_S=0.02)
    process.wait_for_lines(tmp_path / "out.jsonl", 3)
    process.send(number)
    done = process.end()
    assert done.code == code, done.stderr
    *_, note, last = done.stderr.splitlines()
    assert note.startswith("report: r.html (") and "--resume" in last and "--report r.html" in last
    verdict = data_of(tmp_path / "r.html")["runs"][0]["verdict"]
    assert verdict["exit_code"] == code and 0 < verdict["requests"] < 40
    assert verdict["requests"] == len(read_records(tmp_path / "out.jsonl"))


def test_a_run_that_cannot_go_on_has_a_report_of_what_it_did(out: Path, tmp_path: Path) -> None:
    """Fault: after a full disk the answers that are there are in no report, or the run seems to have ended well."""

    def stop() -> int:
        raise StoppedError("no space left")

    job: Any = SimpleNamespace(run=stop, output=str(out), continue_command=lambda: "")
    with pytest.raises(StoppedError, match="no space left"):
        _run_with_report(job, str(tmp_path / "r.html"), "--report")
    assert data_of(tmp_path / "r.html")["runs"][0]["verdict"]["requests"] == 6


def test_strict_stops_with_a_report(apcbatch: Command, tmp_path: Path) -> None:
    """Fault: exit status 1 goes without its page."""
    write_lines(tmp_path / "in.jsonl", [conversation(1), {"messages": []}, conversation(2)])
    assert apcbatch(*RUN, "--strict", "--report", "r.html").code == 1
    assert data_of(tmp_path / "r.html")["runs"][0]["verdict"]["exit_code"] == 1


@pytest.mark.parametrize(
    ("lines", "code", "error"),
    [
        ([conversation(1)], 0, OSError(28, "No space left on device")),
        ([conversation(1), {"messages": []}], 3, RuntimeError("odd")),
        ([conversation(1)], 0, MemoryError()),
        ([conversation(1)], 0, Interrupted(signal.SIGINT)),
    ],
)
def test_a_report_that_fails_is_a_warning(
    lines: list[Any],
    code: int,
    error: BaseException,
    apcbatch: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fault: the exit code of a run whose answers are all there says that they are not."""

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(report_file, "write_file", fail)
    write_lines(tmp_path / "in.jsonl", lines)
    done = apcbatch(*RUN, "--report", "r.html")
    assert done.code == code and not (tmp_path / "r.html").exists()
    assert "warning: the report r.html was not written" in done.stderr and "Traceback" not in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["ok"] == 2


def test_what_comes_there_meanwhile_is_not_replaced(
    apcbatch: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a file that another program has written since the run began is gone."""
    write_lines(tmp_path / "in.jsonl", [conversation(1)])
    page = tmp_path / "r.html"
    answer = Job.run
    monkeypatch.setattr(Job, "run", lambda job: (page.write_text("mine\n"), answer(job))[1])
    done = apcbatch(*RUN, "--report", "r.html")
    assert done.code == 0 and page.read_text() == "mine\n"
    assert "warning: --report r.html exists and is not a report of this program" in done.stderr


def test_a_bad_path_is_refused_before_any_work(apcbatch: Command, engines: list[Any], tmp_path: Path) -> None:
    """Fault: hours of work, and then no page; or a page in place of the input."""
    write_lines(tmp_path / "in.jsonl", [conversation(1)])
    (tmp_path / "notes.txt").write_text("mine\n")
    cases = {
        ("-o", "out.jsonl", "--report", "notes.txt"): "is not a report of this program",
        ("-o", "out.jsonl", "--report", "none/r.html"): "mkdir -p",
        ("-o", "out.jsonl", "--report", "-"): "needs a file",
        ("-o", "out.jsonl", "--report", "out.jsonl"): "are the same file",
        ("-o", "out.jsonl", "--report", "out.jsonl.run.json"): "are the same file",
        ("-o", "out.jsonl", "--report", "in.jsonl"): "is not a report of this program",
        ("-o", "out.jsonl", "--report", "s.json", "--summary", "s.json"): "are the same file",
        ("-o", "-", "--report", "r.html"): "give -o a file",
        ("-o", "/dev/null", "--report", "r.html"): "give -o a file",
    }
    for options, sentence in cases.items():
        done = apcbatch("run", "in.jsonl", *options)
        assert done.code == 2 and sentence in done.stderr, (options, done.stderr)
    assert not engines and (tmp_path / "notes.txt").read_text() == "mine\n"
    assert not (tmp_path / "out.jsonl").exists() and not (tmp_path / "r.html").exists()
