"""Where the browser of the browser tests is looked for, and what is said where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tools import chromium


def program(path: Path) -> Path:
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_the_first_name_on_the_path_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a machine that has both gives the one that CI does not test."""
    monkeypatch.delenv(chromium.ENV_BROWSER, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    chrome = program(tmp_path / "google-chrome")
    assert chromium.find() == str(chrome)
    other = program(tmp_path / "chromium")
    assert chromium.find() == str(other)


def test_a_named_browser_is_taken_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a path with a slip in it, and another browser is tested in silence."""
    monkeypatch.setenv(chromium.ENV_BROWSER, str(tmp_path / "chrme"))
    with pytest.raises(FileNotFoundError, match=r"chrme, which is not a program: install Chromium"):
        chromium.find()
    monkeypatch.setenv(chromium.ENV_BROWSER, str(named := program(tmp_path / "own")))
    assert chromium.find() == str(named)


def test_without_a_browser_make_ends_with_a_sentence(tmp_path: Path) -> None:
    """Fault: `make test-browser` ends in a traceback, or as if all were well."""
    environment = {name: value for name, value in os.environ.items() if name != chromium.ENV_BROWSER}
    command = [sys.executable, "-m", "tools.chromium"]
    done = subprocess.run(command, cwd=ROOT, env=environment | {"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("apcbatch: none of chromium, ") and done.stderr.count("\n") == 1
    assert "apt-get install chromium" in done.stderr


def test_where_there_is_no_browser_the_tests_are_skipped_with_the_reason(tmp_path: Path) -> None:
    """Fault: `make test` fails on a machine without a browser, or leaves tests out and does not say so."""
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "tests/browser"]
    environment = os.environ | {chromium.ENV_BROWSER: str(tmp_path / "none")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 5), done.stdout + done.stderr
    assert "which is not a program" in done.stdout or "playwright is not installed" in done.stdout
    with_pages = [path for path in (ROOT / "tests" / "browser").glob("test_*.py") if path.name != "test_shown.py"]
    assert done.stdout.count("SKIPPED") >= 1 and f"{len(with_pages)} skipped" in done.stdout, done.stdout
