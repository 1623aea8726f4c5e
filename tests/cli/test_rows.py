"""Rows of a command, as a pipe and a terminal get them."""

from __future__ import annotations

import io
import sys

import pytest

from apcbatch.cli.options import read_block_sizes
from apcbatch.cli.terminal import echo_json, echo_row
from apcbatch.errors import UsageError
from apcbatch.sampling import MOST_TOKENS


class Stream(io.StringIO):
    """A stream that may be a terminal."""

    is_terminal = True

    def isatty(self) -> bool:
        return self.is_terminal


@pytest.mark.parametrize(
    ("columns", "indent", "rows"),
    [
        (None, 6, "FAIL  model: it cannot be opened here at all\n"),
        (99, 6, "\x1b[31mFAIL\x1b[0m  model: it cannot be opened here at all\n"),
        (30, 6, "\x1b[31mFAIL\x1b[0m  model: it cannot be\n      opened here at all\n"),
        (15, 9, "\x1b[31mFAIL\x1b[0m  model: it\n     cannot be\n     opened\n     here at\n     all\n"),
    ],
)
def test_a_row_is_folded_at_its_indent(
    monkeypatch: pytest.MonkeyPatch, columns: int | None, indent: int, rows: str
) -> None:
    """Fault: a row stands elsewhere than its text begins, an indent takes a narrow terminal, or a pipe gets colours."""
    stream = Stream()
    stream.is_terminal = columns is not None
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in (("COLUMNS", str(columns or 20)), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)
    echo_row("FAIL  model: it cannot be opened here at all", indent, "FAIL")
    assert stream.getvalue() == rows


@pytest.mark.parametrize("text", ["", "x", "1,", "0", "16,0", f"16,{MOST_TOKENS + 1}", "1.5"])
def test_block_sizes_that_can_be_are_read(text: str) -> None:
    """Fault: a block size of nothing, or one that no prompt has, is compared with the others."""
    assert read_block_sizes("--block-sizes", f"{MOST_TOKENS},1", "1,16") == [MOST_TOKENS, 1]
    with pytest.raises(UsageError, match="--block-sizes is .*; expected integers from 1 .*, such as 1,16"):
        read_block_sizes("--block-sizes", text, "1,16")


@pytest.mark.parametrize(
    ("data", "shown"),
    [(b"{}", "{}\n"), (b"{}\n", "{}\n"), ('{"a":"\u009b\u00e9"}'.encode(), '{"a":"\\u009b\u00e9"}\n')],
)
def test_json_ends_with_one_newline(data: bytes, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Fault: two documents stand on one line, an empty line follows one, or a text of it commands the terminal."""
    echo_json(data)
    assert capsys.readouterr().out == shown
