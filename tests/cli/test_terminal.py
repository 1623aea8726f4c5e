"""Every command in a terminal of 40 to 120 columns: nothing runs over the edge, and colours are for those who want."""

from __future__ import annotations

import json
import re

import pytest

from apcbatch.display import cells
from tests.terminal import in_terminal

pytestmark = pytest.mark.slow  # each starts a process
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
LINES = [
    {"id": f"a-conversation-of-some-length-{number}", "messages": [
        {"role": "user", "content": f"Tell me about {number} " + "and more " * 60},
        {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And then?"}]}
    for number in range(6)
]  # fmt: skip
SENTENCES = ("nothing", "warning", "results go", "the bundled model", "an answer ends", "6 conversations", "12 of 12")
RUN = ["run", "in.jsonl", "--overwrite", "--max-tokens", "2", "--policy", "all"]


@pytest.fixture
def folder(tmp_path):
    bad = ["{", '{"messages":[{"role":"user","content":"Hi"}],"stream":true}']
    (tmp_path / "in.jsonl").write_text("".join(f"{line}\n" for line in [*map(json.dumps, LINES), *bad]))
    return tmp_path


@pytest.mark.drawn(1)
@pytest.mark.parametrize("columns", [40, 100])
def test_a_run(folder, columns):
    """Fault: at 60 columns the lines of a run are a heap, the last lines are JSON, or the bar wipes OUT's name off."""
    code, screen = in_terminal(RUN, columns, folder, "tests.job.fake_main")
    # A bar is written over: only its last state counts.
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in ESCAPE.sub("", screen).split("\n")]
    assert code == 3 and "\x1b[32mok\x1b[0m" in screen and "\x1b[31merror\x1b[0m" in screen
    assert all(cells(line) <= columns for line in lines if not line.startswith(SENTENCES))
    words = " ".join(" ".join(lines).split())
    assert "14 requests in" in words and "12 ok, 2 errors" in words
    assert "errors 1 invalid_json, 1 invalid_request" in words and "results in.answers.jsonl" in words
    assert "nothing is left to do: the error records (1 invalid_json, 1 invalid_request)" in words
    assert '"requests"' not in screen and "reading the tokenizer ..." in screen and "loading demo ..." in screen
    for part in re.split(r"[\r\n]", ESCAPE.sub("", screen)):
        assert cells(part) <= columns or part.startswith(SENTENCES)


def test_no_colours_where_none_are_wanted(folder):
    """Fault: NO_COLOR or a dumb terminal gets escape sequences, or other words."""
    _, screen = in_terminal([*RUN, "--progress", "none"], 80, folder, "tests.job.fake_main", NO_COLOR="1")
    assert "\x1b" not in screen and "12 ok, 2 errors" in screen
    _, plain = in_terminal(["show", "in.jsonl"], 80, folder, TERM="dumb")
    assert "\x1b" not in plain and "Refused: nothing" in plain
    _, coloured = in_terminal(["show", "in.jsonl"], 80, folder)
    assert "\x1b" in coloured and plain.splitlines() == ESCAPE.sub("", coloured).splitlines()
