"""The last words of a process: printed if it is ended from outside, and only then."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, sys
from apcbatch.process import LastWords
words = LastWords("the first\\n")
words.replace("the second\\n")
{end}
"""
ENDS = {
    "os._exit(1)": (1, "the second\n"),
    "os.kill(os.getpid(), signal.SIGKILL)": (-9, "the second\n"),
    "os.killpg(0, signal.SIGTERM)": (-15, "the second\n"),
    "os.abort()": (-6, "the second\n"),
    "words.close()": (0, ""),
    "words.close(); os._exit(1)": (1, ""),
}


@pytest.mark.parametrize("end", ENDS)
def test_last_words_are_those_of_a_process_that_was_ended(end: str) -> None:
    """Catches a run on a cluster that Ray's C++ code ends without a word, and words after a run that ended itself."""
    command = [sys.executable, "-c", SCRIPT.format(end=end)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, start_new_session=True)
    assert (done.returncode, done.stderr) == ENDS[end]
