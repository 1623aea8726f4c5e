"""A fixed, small budget of the fuzzers; `make soak` plays many more, with other seeds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CASES = 45  # three of each target


def test_mutated_input_ends_in_an_answer_or_a_sentence(tmp_path):
    """Catches damaged input of any kind that ends in a traceback, a hang, a signal, lost lines or other answers."""
    command = [sys.executable, "-m", "tests.fuzz", "--seed", "1", "--cases", str(CASES), "--patience", "6"]
    played = subprocess.run(
        [*command, "--keep-going", "--folder", str(tmp_path / "fuzz")],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert played.returncode == 0, played.stdout[-6000:] + played.stderr[-2000:]
    assert f"{CASES} cases" in played.stdout
