"""A pytest plugin that records, while the suite runs, which test touched which line and how long each test took.

It sees the commands that tests start as well: coverage starts in them by itself (COVERAGE_PROCESS_START), and
they find the test's name in the environment. One that is killed leaves no record.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path

import coverage
import pytest

FOLDER = "MUTANTS_COVER"  # the environment variable that says where the records go; see touched.settings
TEST = "MUTANTS_TEST"


class Contexts:
    """One record for each test: its seconds (fixtures included), and whether it failed."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / f"tests-{os.getpid()}.json"
        self.seconds: dict[str, float] = defaultdict(float)
        self.bad: set[str] = set()
        self.coverage = coverage.Coverage(config_file=os.environ["COVERAGE_PROCESS_START"])
        self.coverage.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        os.environ[TEST] = nodeid
        self.coverage.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.bad.add(report.nodeid)

    def pytest_runtest_logfinish(self) -> None:
        os.environ[TEST] = ""
        self.coverage.switch_context("")

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        self.coverage.save()
        passed = {name: took for name, took in self.seconds.items() if name not in self.bad}
        self.file.write_text(json.dumps({"passed": passed, "bad": sorted(self.bad)}), encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Contexts(Path(os.environ[FOLDER])), "mutants-contexts")
