"""Runs the command line in this process with the fake engine, and as a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

from apcbatch.cli.program import main
from apcbatch.job import opening, processes
from apcbatch.job.runfile import read_run_file
from apcbatch.model.locate import DEMO_DIR
from apcbatch.types import Result
from tests.job.fakes import FakeEngine

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Outcome:
    """What one command line did."""

    code: int
    stdout: str
    stderr: str

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads(self.stdout.splitlines()[-1])

    @property
    def lines(self) -> list[str]:
        return self.stdout.splitlines()[:-1]

    @property
    def final_line(self) -> str:
        return self.stderr.splitlines()[-1]


@pytest.fixture(scope="package", autouse=True)
def no_waiting() -> Iterator[None]:
    """Runs in this process do not wait for the disk: eight times each, 4 ms and more where it is a real one. Those
    that are refused as another one writes OUT do not wait 2 s for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("apcbatch.job.sink.LOCK_WAIT_S", 0.05)
        patch.setattr(os, "fsync", lambda descriptor: None)  # what is asked to be synced, test_power_cut.py sees
        yield


@pytest.fixture(autouse=True)
def unplanned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake engine keeps everything and knows no plans; test_end_to_end.py runs the default policy for real."""
    monkeypatch.setenv("APCBATCH_POLICY", "all")


def answers(records: list[dict[str, Any]]) -> dict[str, Any]:
    """What each request was answered, without timing and reuse; each id must be there once."""
    found = {}
    for record in records:
        assert record["id"] not in found, f"{record['id']} is there twice"
        body = record["response"] and record["response"]["body"]
        found[record["id"]] = (
            record["custom_id"],
            record["line"],
            record["turn"],
            record["error"],
            body and (body["choices"], body["usage"]["prompt_tokens"], record["apcbatch"]["completion_token_ids"]),
        )
    return found


def batch_line(custom_id: str, **body: Any) -> dict[str, Any]:
    """A line of a batch file: a completion if the body has a prompt, else a chat, which asks `Hi` without messages."""
    content = {} if "prompt" in body else {"messages": [{"role": "user", "content": "Hi"}]}
    url = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": content | body}


def processes_of(out: Path) -> list[processes.Process]:
    """The entries of OUT's run file."""
    facts, reason = read_run_file(f"{out}.run.json")
    assert facts is not None, reason
    return [processes.process_of(entry) for entry in facts["processes"]]


@pytest.fixture
def engines(monkeypatch) -> list[FakeEngine]:
    """The fake engines that runs of this test make, in order."""
    made: list[FakeEngine] = []

    def make_engine(config, warn, files=None):
        made.append(FakeEngine(config, warn))
        return made[-1]

    monkeypatch.setattr(opening, "make_engine", make_engine)
    return made


@pytest.fixture
def apcbatch(engines, real: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """Runs a command line in tmp_path with the fake engine."""
    return real


@pytest.fixture
def real(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Outcome]:
    """Runs a command line in tmp_path with the bundled model."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Outcome:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """interrupt(steps): the user presses Ctrl-C once, before the engine's step that follows that number of steps."""

    def press(steps: int = 0) -> None:
        step, left = FakeEngine.step, [steps]

        def pressed(self: FakeEngine) -> list[Result]:
            left[0] -= 1
            if left[0] < 0:
                monkeypatch.setattr(FakeEngine, "step", step)
                signal.raise_signal(signal.SIGINT)
            return step(self)

        monkeypatch.setattr(FakeEngine, "step", pressed)

    return press


class Process:
    """`python -m tests.job.fake_main ...` in a folder."""

    def __init__(self, folder: Path, *arguments: object, stdin: IO[bytes] | None = None, **variables: object) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT)} | {name: str(value) for name, value in variables.items()}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.job.fake_main", *map(str, arguments)],
            cwd=folder, env=environment, text=True, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def wait_for_lines(self, path: Path, count: int) -> None:
        """Return when OUT has at least that number of lines."""
        while self._process.poll() is None:
            if path.exists() and path.read_bytes().count(b"\n") >= count:
                return
            time.sleep(0.01)
        raise AssertionError(f"the run ended first: {self._process.communicate()[1]}")

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait_for_words(self, words: str) -> None:
        """Return when a line of stderr has these words."""
        for line in self._process.stderr:
            if words in line:
                return
        raise AssertionError(f"the run ended without saying {words!r}")

    def end(self) -> Outcome:
        stdout, stderr = self._process.communicate(timeout=60)
        return Outcome(self._process.returncode, stdout, stderr)


def killed_while_it_writes(path: Path) -> None:
    """A process writes a file beside the path and is ended before its name is that of the path."""
    script = f"""
import os
from apcbatch.job.disk import Disk, replacing
with replacing({str(path)!r}, Disk()):
    os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 9


@pytest.fixture
def start(tmp_path) -> Callable[..., Process]:
    """Starts a command line as a process of its own in tmp_path."""
    return lambda *arguments, **variables: Process(tmp_path, *arguments, **variables)


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """The bundled model without its chat template."""
    folder = tmp_path / "bare"
    shutil.copytree(DEMO_DIR, folder, ignore=shutil.ignore_patterns("chat_template.jinja"))
    path = folder / "tokenizer_config.json"
    values = json.loads(path.read_text())
    values.pop("chat_template", None)
    path.write_text(json.dumps(values))
    return folder
