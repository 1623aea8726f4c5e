"""A small budget of the fuzzers; `make soak` plays many more."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.effort import tries

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_mutated_input_ends_in_an_answer_or_a_sentence(tmp_path: Path) -> None:
    """Catches damaged input of any kind that ends in a traceback, a hang, a signal, lost lines or other answers."""
    drawn = ["--seed", str(random.randrange(1 << 31)), "--cases", str(4 * tries(24))]
    played = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", *drawn, "--patience", "6", "--keep-going", "--folder", tmp_path / "fuzz"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert played.returncode == 0, played.stdout[-6000:] + played.stderr[-2000:]
    assert " cases in " in played.stdout
