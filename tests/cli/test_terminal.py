"""Every command in a terminal of 40 to 120 columns: nothing runs over the edge, and colours are for those who want."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from apcbatch.display import cells
from apcbatch.store import Store
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


def lines_of(screen: str) -> list[str]:
    """What stands on the lines, without colours; a bar is written over, and only its last state counts."""
    return [line.rstrip("\r").rpartition("\r")[2] for line in ESCAPE.sub("", screen).split("\n")]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("columns", [40, 100])
def test_a_run(folder, columns):
    """Fault: at 60 columns the lines of a run are a heap, or the last lines are JSON."""
    code, screen = in_terminal(RUN, columns, folder, "tests.job.fake_main")
    lines = lines_of(screen)
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


@pytest.mark.drawn(1)
@pytest.mark.parametrize("columns", [60, 120])
def test_plan_and_help(folder, columns):
    """Fault: the table is folded by the terminal into a heap of numbers."""
    code, screen = in_terminal(["plan", "in.jsonl", "--block-sizes", "16,64"], columns, folder)
    assert code == 0 and all(cells(line) <= columns for line in lines_of(screen)), screen
    assert ("left out at this width" in screen) == (columns < 115)
    assert "planned" in screen and "hit rate" in screen and "stored" in screen
    code, screen = in_terminal(["plan", "-h"], columns, folder)
    options = screen.partition("Examples:")[0].splitlines()
    assert code == 0 and all(len(line) <= columns for line in options)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("columns", [40, 200])
def test_the_rows_of_a_store(tmp_path, columns):
    """Fault: a row is broken in the middle of a number."""
    with Store.open(tmp_path / "s", warn=pytest.fail) as store:
        store.register(b"f" * 32, "a-model-with-a-name")
        store.put(b"k" * 32, 64, None, b"f" * 32, {"ssm": np.zeros((2, 64), np.float32)})
    code, screen = in_terminal(["store", "stat", "s"], columns, tmp_path)
    lines = lines_of(screen)
    assert code == 0 and all(cells(line) <= columns for line in lines), screen
    words = " ".join(screen.split())
    assert "up to 64 tokens" in words and "restored 0 times" in words and "a-model-with-a-name" in words
    assert len(lines) == 3 or columns < 200


def test_a_verdict_has_its_colour(tmp_path):
    """Fault: a check that failed looks like the others."""
    _, screen = in_terminal(["doctor", "--model", "nothing"], 60, tmp_path)
    assert "\x1b[32mok\x1b[0m    python" in screen and "\x1b[31mFAIL\x1b[0m  model" in screen
    assert all(cells(line) <= 60 for line in lines_of(screen))
