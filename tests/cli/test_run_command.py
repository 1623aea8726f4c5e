"""`apcbatch run` before anything is loaded: usage, configuration, errors as sentences."""

from __future__ import annotations

from types import SimpleNamespace

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
from apcbatch.job import open


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch, tmp_path):
    """A run of these tests that gets as far as the weights fails."""

    def refuse(config, warn):
        raise AssertionError("the weights would have been loaded")

    monkeypatch.setattr(open, "make_engine", refuse)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"messages":[{"role":"user","content":"Hi"}]}\n')


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
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
        (
            "run in.jsonl -o out.jsonl --config c.yaml",
            "c.yaml: blok_size is not an option; did you mean block_size?",
        ),
        ("run in.jsonl -o out.jsonl --config missing.yaml", "missing.yaml cannot be read"),
        ("run missing.jsonl -o out.jsonl", "missing.jsonl"),
        ("run .. -o out.jsonl", "folder"),
        ("run in.jsonl -o out.jsonl --model nothing", "'nothing'"),
        ("run in.jsonl -o out.jsonl --model org/nothing", "org/nothing"),
        ("run in.jsonl -o missing/out.jsonl", "mkdir -p"),
        ("run in.jsonl -o out.jsonl --summary missing/s.json", "--summary missing/s.json"),
        ("rum", "Did you mean"),
    ],
)
def test_what_cannot_be_used_ends_with_2_and_a_sentence(capsys, tmp_path, arguments, sentence):
    """Fault: weights are loaded first, or a traceback is all there is, or OUT is made for nothing."""
    (tmp_path / "c.yaml").write_text("blok_size: 16\n")
    before = sorted(tmp_path.iterdir())
    assert main(arguments.split()) == 2
    captured = capsys.readouterr()
    assert not captured.err.splitlines()[-1].startswith("apcbatch run "), "no command goes on from here"
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


@pytest.mark.parametrize("text", ["a\u202eb", "a\x1b[2J", "\u00e9\u6771", "a\tb\n", "it's: #1", "word " * 40, "null"])
def test_any_text_of_a_configuration_can_be_read_back(text):
    """Fault: a text turns the letters of a terminal around, or what --show-config prints is another text."""
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


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (OSError(28, "No space", "x.jsonl"), 1, "apcbatch: x.jsonl cannot be used: No space\n"),
        (OSError(28, "No space"), 1, "apcbatch: an output cannot be used: No space\n"),
        (OSError("odd"), 1, "apcbatch: an output cannot be used: odd\n"),
        (BrokenPipeError(), 1, ""),
        (KeyboardInterrupt(), 130, ""),
        (click.Abort(), 130, ""),
        (UsageError("no"), 2, "apcbatch: no\n"),
        (StoppedError("no"), 1, "apcbatch: no\n"),
    ],
)
def test_each_error_has_its_code_and_its_sentence(monkeypatch, capsys, error, code, said):
    """Fault: a script takes one end of a run for another, or a sentence is about `None`."""

    def fail(*_, **options):
        raise error

    monkeypatch.setattr(program.cli, "main", fail)
    assert main(["doctor"]) == code
    assert capsys.readouterr().err == said


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


def test_the_entry_point_takes_the_process_arguments(monkeypatch, capsys):
    """Fault: the installed script prints help whatever it is given."""
    monkeypatch.setattr("sys.argv", ["apcbatch", "--version"])
    assert entry_point() == 0 and capsys.readouterr().out.startswith("apcbatch ")
