"""`apcbatch run` before anything is loaded: usage, configuration, errors as sentences."""

from __future__ import annotations

import os
import signal
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import click
import pytest
import yaml

from apcbatch import resolution
from apcbatch.cli import main as entry_point
from apcbatch.cli import program, streams
from apcbatch.cli.program import main
from apcbatch.cli.run import show
from apcbatch.config import OPTIONS
from apcbatch.errors import StoppedError, UsageError
from apcbatch.formats import FORMAT_CHOICES, TURNS
from apcbatch.job import opening
from apcbatch.job.signals import Interrupted
from tests.effort import table


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch, tmp_path):
    """A run of these tests that gets as far as the weights fails."""

    def refuse(*_):
        raise AssertionError("the weights would have been loaded")

    monkeypatch.setattr(opening, "make_engine", refuse)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"messages":[{"role":"user","content":"Hi"}]}\n')


def test_what_cannot_be_used_ends_with_2_and_a_sentence(capsys, tmp_path):
    """Fault: weights are loaded first, or a traceback is all there is, or OUT is made for nothing."""
    for arguments, sentence in [
        ("run", "Missing argument 'INPUT'"),
        ("run -", "stdin has no name to make OUT's name from; give -o FILE, or -o -"),
        ("run /dev/stdin", "/dev/stdin has no name to make OUT's name from"),
        ("run missing.jsonl", "cannot read missing.jsonl"),
        ("run in.jsonl -o out.jsonl --blok-size 3", "--block-size"),
        ("run in.jsonl -o out.jsonl --block-size 0", "--block-size is '0'; expected an integer from 1"),
        ("run in.jsonl -o out.jsonl --policy everything", "expected one of"),
        ("run in.jsonl -o out.jsonl --resume --overwrite", "--resume and --overwrite exclude each other"),
        ("run in.jsonl -o out.jsonl -q -v", "--quiet and --verbose exclude each other"),
        ("run in.jsonl -o out.jsonl --store s --no-store", "--store and --no-store exclude each other"),
        ("run in.jsonl -o out.jsonl --config c.yaml", "c.yaml: blok_size is not an option; did you mean block_size?"),
        ("run in.jsonl -o out.jsonl --config missing.yaml", "missing.yaml cannot be read"),
        ("run missing.jsonl -o out.jsonl", "missing.jsonl"),
        ("run .. -o out.jsonl", "folder"),
        ("run in.jsonl -o out.jsonl --model nothing", "'nothing'"),
        ("run in.jsonl -o out.jsonl --model org/nothing", "org/nothing"),
        ("run in.jsonl -o missing/out.jsonl", "mkdir -p"),
        ("run in.jsonl -o out.jsonl --summary missing/s.json", "--summary missing/s.json"),
        ("rum", "Did you mean"),
    ]:
        (tmp_path / "c.yaml").write_text("blok_size: 16\n")
        before = sorted(tmp_path.iterdir())
        assert main(arguments.split()) == 2
        captured = capsys.readouterr()
        assert not captured.err.splitlines()[-1].startswith("apcbatch run "), "no command continues from here"
        assert sentence in captured.err and "Traceback" not in captured.err
        assert captured.out == "" and sorted(tmp_path.iterdir()) == before


def test_show_config_prints_every_value_with_its_origin(capsys, tmp_path, monkeypatch):
    """Fault: an option is missing, or an origin is not where the value came from."""
    (tmp_path / "c.yaml").write_text("block-size: 16\nseed: 3\nmodel: 'on'\n")
    monkeypatch.setenv("APCBATCH_SEED", "4")
    assert main(["run", "--config", "c.yaml", "--temperature", "0", "--no-store", "--show-config"]) == 0
    out = capsys.readouterr().out
    shown = {}
    for line in out.splitlines():
        pair, origin = line.split("  # ")
        name, value = pair.rstrip().split(": ", 1)
        shown[name] = (value, origin)
    assert list(shown) == list(OPTIONS)
    assert shown["block_size"] == ("16", "c.yaml: block_size")
    assert shown["seed"] == ("4", "APCBATCH_SEED")
    assert shown["temperature"] == ("0.0", "--temperature")
    assert shown["store"] == ("null", "--no-store")
    assert shown["store_size"] == ("20GiB", "default")
    assert yaml.safe_load(out)["model"] == "on"
    (tmp_path / "again.yaml").write_text(out)
    assert main(["run", "--config", "again.yaml", "--show-config"]) == 0, "what is printed can be read back"


def test_any_text_of_a_configuration_can_be_read_back():
    """Fault: a text turns the letters of a terminal around, or what --show-config prints is another text."""
    for text in ["a\u202eb", "a\x1b[2J", "\u00e9\u6771", "a\tb\n", "it's: #1", "word " * 40, "null"]:
        out = show(resolution.load({"system_prompt": text}, None, {}))
        assert yaml.safe_load(out)["system_prompt"] == text
        assert out.replace("\n", "").isprintable() and len(out.splitlines()) == len(OPTIONS)
        assert text in out or not text.isprintable() or text in ("it's: #1", "null")


def test_an_internal_error_is_a_sentence_and_a_traceback_on_demand(capsys, monkeypatch):
    """Fault: a traceback greets the user, or a developer cannot get one."""
    assert main(["run", "in.jsonl", "-o", "out.jsonl"]) == 1
    plain = capsys.readouterr().err
    assert "internal error: AssertionError" in plain and "APCBATCH_DEBUG=1" in plain and "Traceback" not in plain
    assert plain.splitlines()[-1].startswith("apcbatch run in.jsonl -o out.jsonl")
    monkeypatch.setenv("APCBATCH_DEBUG", "1")
    assert main(["run", "in.jsonl", "-o", "out.jsonl"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_the_choices_are_those_of_the_formats():
    """Fault: config.py and formats.py, which must not know each other, grow apart."""
    assert OPTIONS["format"].choices == FORMAT_CHOICES and OPTIONS["turns"].choices == TURNS


def test_each_error_has_its_code_and_its_sentence(monkeypatch, capsys):
    """Fault: a script takes one end of a run for another, or a sentence is about `None`."""
    for error, code, said in (
        (OSError(28, "No space", "x.jsonl"), 1, "apcbatch: x.jsonl cannot be used: No space\n"),
        (OSError(28, "No space"), 1, "apcbatch: an output cannot be used: No space\n"),
        (OSError("odd"), 1, "apcbatch: an output cannot be used: odd\n"),
        (BrokenPipeError(), 1, ""),
        (KeyboardInterrupt(), 130, ""),
        (click.Abort(), 130, ""),
        (UsageError("no"), 2, "apcbatch: no\n"),
        (StoppedError("no"), 1, "apcbatch: no\n"),
    ):
        monkeypatch.setattr(program.cli, "main", Mock(side_effect=error))
        assert (main(["doctor"]), capsys.readouterr().err) == (code, said), error


@pytest.mark.parametrize(
    ("error", "codes", "said"),
    [
        (None, [0, 1, 2, 3], ""),
        (BrokenPipeError(), [1, 1, 2, 3], ""),
        (OSError(28, "No space"), [1, 1, 2, 3], "apcbatch: standard output cannot be written: No space\n" * 4),
    ],
)
def test_what_could_not_be_printed_makes_a_success_a_failure(monkeypatch, capsys, error, codes, said):
    """Fault: a run whose numbers are lost ends with 0, or one with error records as if it had stopped early."""
    silenced = []

    def flush():
        if error is not None:
            raise error

    monkeypatch.setattr(streams, "silence", silenced.append)
    monkeypatch.setattr("sys.stdout", stream := SimpleNamespace(flush=flush))
    assert [streams.flush_output(code) for code in range(4)] == codes
    monkeypatch.setattr("sys.stdout", None)
    assert streams.flush_output(3) == 3
    assert capsys.readouterr().err == said and silenced == [stream] * 4 * (error is not None)


def test_how_the_program_was_called(monkeypatch, tmp_path):
    """Fault: the command that continues names a program that the shell does not find."""
    script = tmp_path / "bin" / "apcbatch"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("sys.argv", [str(script)])
    assert streams.program_words() == [str(script)]
    monkeypatch.setenv("PATH", str(script.parent))
    assert streams.program_words() == ["apcbatch"]
    monkeypatch.setattr("sys.argv", ["/lib/apcbatch/__main__.py"])
    assert streams.program_words()[1:] == ["-m", "apcbatch"]
    other = tmp_path / "apcbatch"
    other.write_text("#!/bin/sh\n")
    called = {"/lib/other/__main__.py": "apcbatch", "/nowhere/apcbatch": "apcbatch", "/usr/bin/env": "apcbatch"}
    for name, word in (called | {str(other): str(other), str(script): "apcbatch"}).items():
        monkeypatch.setattr("sys.argv", [name])
        assert streams.program_words() == [word], name


def test_the_entry_point_takes_the_process_arguments(monkeypatch, capsys):
    """Fault: the installed script prints help with any arguments."""
    monkeypatch.setattr("sys.argv", ["apcbatch", "--version"])
    assert entry_point() == 0 and capsys.readouterr().out.startswith("apcbatch ")


def test_an_interrupt_before_there_is_a_command_has_its_code(monkeypatch):
    """Fault: Ctrl-C while the program is being imported is a traceback, or one at its very end is another code."""
    ignored = []
    monkeypatch.setattr("apcbatch.cli.signal.signal", lambda *given: ignored.append(given))
    monkeypatch.setattr(program, "main", lambda: 3)
    assert entry_point() == 3
    monkeypatch.setattr(program, "main", Mock(side_effect=KeyboardInterrupt))
    assert entry_point() == 130 and ignored == [(signal.SIGINT, signal.SIG_IGN)] * 2


def test_a_closed_stream_is_opened_before_a_file_gets_its_number(monkeypatch):
    """Fault: what is printed goes into OUT, which got the descriptor of standard output."""
    opened = []

    def fstat(number):
        if number != 0:
            raise OSError(9, "Bad file descriptor")

    with monkeypatch.context() as patch:
        patch.setattr(streams.os, "fstat", fstat)
        patch.setattr(streams.os, "open", lambda *given: opened.append(given))
        streams.take_standard_descriptors()
    assert opened == [("/dev/null", os.O_RDWR)] * 2
    error = sys.stderr
    streams.take_standard_descriptors()
    assert sys.stderr is error
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", None)
        streams.take_standard_descriptors()
        assert sys.stderr.name == "/dev/null" and sys.stderr.write("x") == 1
        sys.stderr.close()


def test_an_argument_that_no_file_can_have_is_refused(capsys):
    """Fault: a NUL character ends in an internal error."""
    assert main(["run", "in.jsonl", "-o", "a\0b"]) == 2
    assert "the argument 'a\\x00b' holds a NUL character" in capsys.readouterr().err


def test_what_is_said_commands_no_terminal_and_fails_nowhere(monkeypatch, capsys):
    """Fault: a sentence is obeyed by a terminal, stays in a buffer, or a full disk turns it into a traceback."""
    streams.say("a\x1b[2J\nb")
    assert capsys.readouterr().err == "a\\x1b[2J\nb\n"
    monkeypatch.setattr("sys.stderr", broken := Mock(flush=Mock(side_effect=OSError(28, "No space"))))
    streams.say("lost")
    assert broken.flush.called


@table(
    "result, last_line, code, said",
    [
        (None, None, 0, ""),
        (3, None, 3, ""),
        (0, lambda code: f"again {code}", 0, ""),
        (2, lambda code: f"again {code}", 2, ""),
        (1, lambda code: f"again {code}", 1, "again 1\n"),
        (130, lambda code: f"again {code}", 130, "again 130\n"),
        (Interrupted(143), lambda code: f"again {code}", 143, "again 143\n"),
    ],
)
def test_the_last_line_is_what_continues(monkeypatch, capsys, result, last_line, code, said):
    """Fault: a command that continues is named where nothing is to be done, or none where something is."""

    def run(*_, obj, **options):
        obj.last_line = last_line
        if isinstance(result, BaseException):
            raise result
        return result

    left = []
    monkeypatch.setattr(program, "settle_leaving", lambda: left.append(True))
    monkeypatch.setattr(program.cli, "main", run)
    assert main(["doctor"]) == code and not left
    assert capsys.readouterr().err == said
    monkeypatch.setattr("sys.argv", ["apcbatch", "doctor"])
    assert main() == code and left == [True], "the process ends with its own command line alone"
    capsys.readouterr()
