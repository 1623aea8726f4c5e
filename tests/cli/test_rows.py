"""Rows of a command, as a pipe and a terminal get them."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import click
import pytest

from apcbatch.cli.options import ANYWHERE, LOCAL, read_block_sizes
from apcbatch.cli.terminal import (
    echo,
    echo_json,
    echo_row,
    json_document,
    survey_with_bar,
    terminal_width,
    warn,
    write_output,
)
from apcbatch.errors import UsageError
from apcbatch.sampling import MOST_TOKENS
from tests.effort import table


class Stream(io.StringIO):
    """A stream that may be a terminal."""

    is_terminal = True

    def isatty(self) -> bool:
        return self.is_terminal


def test_a_row_is_folded_at_its_indent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a row stands elsewhere than its text begins, an indent takes a narrow terminal, or a pipe gets colours."""
    for columns, indent, rows in [
        (None, 6, "FAIL  model: it cannot be opened here at all\n"),
        (99, 6, "\x1b[31mFAIL\x1b[0m  model: it cannot be opened here at all\n"),
        (30, 6, "\x1b[31mFAIL\x1b[0m  model: it cannot be\n      opened here at all\n"),
        (15, 9, "\x1b[31mFAIL\x1b[0m  model: it\n     cannot be\n     opened\n     here at\n     all\n"),
    ]:
        stream = Stream()
        stream.is_terminal = columns is not None
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.delenv("NO_COLOR", raising=False)
        for name, value in (("COLUMNS", str(columns or 20)), ("TERM", "xterm")):
            monkeypatch.setenv(name, value)
        echo_row("FAIL  model: it cannot be opened here at all", indent, "FAIL")
        assert stream.getvalue() == rows


def test_block_sizes_that_can_be_are_read() -> None:
    """Fault: a block size of nothing, or one that no prompt has, is compared with the others."""
    for text in ["", "x", "1,", "0", "16,0", f"16,{MOST_TOKENS + 1}", "1.5"]:
        assert read_block_sizes("--block-sizes", f"{MOST_TOKENS},1", "1,16") == [MOST_TOKENS, 1]
        with pytest.raises(UsageError, match="--block-sizes is .*; expected integers from 1 .*, such as 1,16"):
            read_block_sizes("--block-sizes", text, "1,16")


@table(
    "data, shown",
    [(b"{}", "{}\n"), (b"{}\n", "{}\n"), ('{"a":"\u009b\u00e9"}'.encode(), '{"a":"\\u009b\u00e9"}\n')],
)
def test_json_ends_with_one_newline(data: bytes, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Fault: two documents stand on one line, an empty line follows one, or a text of it commands the terminal."""
    echo_json(data)
    assert capsys.readouterr().out == shown


def test_an_output_goes_to_its_file_or_to_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fault: a file that cannot be written is a traceback, or `-` becomes a file."""
    write_output("--json", str(tmp_path / "t.json"), b"{}\n")
    assert (tmp_path / "t.json").read_bytes() == b"{}\n" and capsys.readouterr().out == ""
    write_output("--json", "-", b"[1]")
    assert capsys.readouterr().out == "[1]\n" and [path.name for path in tmp_path.iterdir()] == ["t.json"]
    with pytest.raises(UsageError, match="^--json .*none/t.json cannot be written: No such file or directory$"):
        write_output("--json", str(tmp_path / "none" / "t.json"), b"{}")


def test_reading_is_shown_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a bar that stands still, stays behind, or gets into a file."""
    bar = Mock(__enter__=lambda one: one, __exit__=lambda *_: None, spec=["update", "__enter__", "__exit__"])
    made = Mock(return_value=bar)

    def survey(config: Any, inputs: Any, make: Any, warn: Any, advance: Any, answers: Any) -> Any:
        for _ in range(3):
            advance()
        return config, inputs, make, answers

    monkeypatch.setattr("tqdm.tqdm", made)
    monkeypatch.setattr("apcbatch.tuning.survey.survey", survey)
    given: Any = ("config", "inputs", "make", "answers")
    assert survey_with_bar(*given) == given
    assert bar.update.call_count == 3
    made.assert_called_once_with(desc="reading", unit=" lines", leave=False, disable=None)


def test_a_stream_that_is_no_terminal_has_no_width() -> None:
    """Fault: what goes into a file is folded at the width of a terminal."""
    stream = Stream()
    assert terminal_width(stream) is not None
    stream.is_terminal = False
    assert terminal_width(stream) is terminal_width(None) is None


def test_text_and_warnings_go_where_they_belong(capsys: pytest.CaptureFixture[str]) -> None:
    """Fault: a warning gets into a pipe, or a letter of it commands the terminal."""
    echo("a\x1b\nb")
    warn("c\x1b")
    assert capsys.readouterr() == ("a\\x1b\nb\n", "warning: c\\x1b\n")
    echo_row("odd  x", 2, "odd")
    assert capsys.readouterr().out == "odd  x\n"
    assert json_document({"b": [1], "a": "\u00e9"}) == '{\n  "b": [\n    1\n  ],\n  "a": "\u00e9"\n}\n'.encode()


def test_a_path_that_cannot_be_used_is_named_by_where_it_was_given() -> None:
    """Fault: a sentence that names no argument, or one with the dots of its usage."""
    argument, option = click.Argument(["inputs"], metavar="INPUT..."), click.Option(["--json"])
    for parameter, name in ((argument, "INPUT"), (click.Argument(["folder"]), "folder"), (option, "--json")):
        with pytest.raises(UsageError, match=f"^{name}\\b[^.]"):
            LOCAL.convert("s3://bucket/x", parameter, None)
        assert ANYWHERE.convert("s3://bucket/x", parameter, None) == "s3://bucket/x"
    assert LOCAL.convert("file:///x/y", option, None) == LOCAL.convert("/x/y", None, None) == "/x/y"
