"""Runs of pytest in forks of a process that has imported every library, each in its own copy of the tree.

So a run starts in a tenth of a second. Must not import the package under test: each fork imports its copy's.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

LIBRARIES = (
    "_pytest.assertion.rewrite", "click.testing", "datasets", "hypothesis", "jinja2", "numpy", "orjson", "psutil",
    "safetensors.numpy", "safetensors.torch", "tokenizers", "torch", "tqdm", "transformers",
    "transformers.models.auto.tokenization_auto", "transformers.models.jamba.modeling_jamba",
    "transformers.models.mamba.modeling_mamba", "transformers.models.falcon_mamba.modeling_falcon_mamba", "xxhash",
    "yaml", "zstandard",
)  # fmt: skip
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "GOMP_SPINCOUNT": "10000",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONDONTWRITEBYTECODE": "1",
}
MOST_MEMORY, MOST_FILE_BYTES = 6 << 30, 2 << 30  # resident, and in one file
SECONDS_TO_COLLECT, SECONDS_OF_A_TEST = 60.0, 15.0  # the second beside ten times what the test usually takes


def import_libraries() -> None:
    """All that a test may import, once."""
    os.environ.update(SETTINGS)
    os.environ.pop("PYTEST_ADDOPTS", None)
    for name in LIBRARIES:
        importlib.import_module(name)


class Watcher:
    """A pytest plugin that says which test runs and which one failed."""

    def __init__(self, file: Path) -> None:
        self.file, self.failed = file, ""

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.file.write_text(nodeid, encoding="utf-8")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid


@dataclass
class Run:
    """One fork at work in a copy of the tree. seconds: what each of its tests usually takes."""

    tree: Path
    tests: list[str]
    seconds: dict[str, float] = field(default_factory=dict)
    plugins: tuple[str, ...] = ()
    options: tuple[str, ...] = ("-x",)
    settings: dict[str, str] = field(default_factory=dict)
    pid: int = 0
    began: float = 0.0

    @property
    def folder(self) -> Path:
        """What the run writes, beside its tree."""
        return self.tree.with_name(self.tree.name + "-run")

    def start(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.folder / "tmp").mkdir(parents=True)
        (self.folder / "test").write_text("")
        self.began = time.monotonic()
        self.pid = os.fork()
        if not self.pid:
            try:
                self._work()
            finally:
                os._exit(70)

    def poll(self) -> dict[str, str] | None:
        """What came of it: outcome (`passed`, `failed`; `timeout`: also where it took all memory) and the test.

        None while it runs."""
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        test = (self.folder / "test").read_text(encoding="utf-8")
        if ended is None and self._within_limits(test):
            return None
        status = self.end()
        if ended is None:
            return {"outcome": "timeout", "test": test}
        if (self.folder / "result.json").exists():
            return dict(json.loads((self.folder / "result.json").read_text(encoding="utf-8")))
        return {"outcome": "failed", "test": f"{test} (the process ended with status {status})"}

    def _within_limits(self, test: str) -> bool:
        allowed = SECONDS_OF_A_TEST + 10 * self.seconds.get(test, 25.0) if test else SECONDS_TO_COLLECT
        took = time.time() - (self.folder / "test").stat().st_mtime
        return took <= allowed and psutil.Process(self.pid).memory_info().rss <= MOST_MEMORY

    def end(self) -> int:
        """Kill the run and what it has left behind, its process group; its status."""
        with suppress(ProcessLookupError):  # it has not made the group yet
            os.killpg(self.pid, signal.SIGKILL)  # its pid is there until it is waited for
        os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        shutil.rmtree(self.folder / "tmp", ignore_errors=True)
        return status

    def _work(self) -> None:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_FILE_BYTES, MOST_FILE_BYTES))
        output = os.open(self.folder / "output", os.O_WRONLY | os.O_CREAT, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        sys.path[:] = [str(self.tree), *(entry for entry in sys.path if entry not in ("", os.getcwd()))]
        os.chdir(self.tree)
        os.environ.update(self.settings, PYTHONPATH=str(self.tree), TMPDIR=str(self.folder / "tmp"))
        sys.dont_write_bytecode, tempfile.tempdir = True, None
        watcher = Watcher(self.folder / "test")
        plugins = [word for name in self.plugins for word in ("-p", name)]
        quiet = ["-q", "-p", "no:cacheprovider", "--tb=short", "--hypothesis-seed=0", "--seed=0", *self.options]
        code = pytest.main([*quiet, *plugins, *self.tests], plugins=[watcher])
        outcome = "passed" if code == pytest.ExitCode.OK else "failed"
        result = {"outcome": outcome, "test": watcher.failed or ("" if outcome == "passed" else "collection")}
        (self.folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
        sys.stdout.flush()
        os._exit(0)
