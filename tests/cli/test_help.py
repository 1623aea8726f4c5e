"""Help and documentation: every command says what it does, with examples, and docs/reference/cli.md says the same."""

from __future__ import annotations

import os
import subprocess
import sys

import click
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from apcbatch.cli.options import GroupedCommand, GroupedOption, config_options, given_flags, short_help_option
from apcbatch.cli.program import cli, main
from apcbatch.cli.run import FIRST_OPTIONS
from apcbatch.config import OPTIONS, flag_name
from apcbatch.version import VERSION
from tests.conftest import ROOT
from tools.make_cli_docs import TARGET, commands, document

NAMES = [name for name, _ in commands(cli, "apcbatch")]


def test_the_page_is_what_the_commands_say():
    """Fault: a command or a flag changes and docs/reference/cli.md does not (run tools/make_cli_docs.py)."""
    assert TARGET.read_text() == document()


def test_every_command_has_help_with_examples_in_80_columns():
    """Fault: -h is not known somewhere, a command has no example, a terminal breaks lines of the help in the middle of
    a word, or a wide one gets lines too long to read, or the sentence of a command is cut."""
    for name in NAMES:
        for flag in ["-h", "--help"]:
            for columns in ("80", "200"):
                done = CliRunner().invoke(
                    cli, [*name.split()[1:], flag], prog_name="apcbatch", env={"COLUMNS": columns}
                )
                assert done.exit_code == 0 and f"Usage: {name}" in done.output, done.output
                example = "apcbatch run" if name == "apcbatch" else name
                assert f"Examples:\n    {example}" in done.output
                lines = done.output.splitlines()
                assert not [line for line in lines if len(line) > 80 or (line[:2] == "  " and line.endswith("..."))]


def test_the_short_help_of_run_has_what_a_newcomer_needs():
    """Fault: 68 options before the first run; or an option that the short page names and the command lost."""
    short, whole = (CliRunner().invoke(cli, ["run", flag], prog_name="apcbatch").output for flag in ("-h", "--help"))
    listed = [line.split()[0].rstrip(",") for line in short.splitlines() if line.startswith("  -")]
    assert listed == ["-o", *(flag_name(name) for name in FIRST_OPTIONS[1:])] and len(listed) == 10
    usage, blank, first, *_ = short.splitlines()
    assert usage.startswith("Usage: apcbatch run") and blank == "" and first.strip() and first.strip() in whole
    assert len(short.splitlines()) < 40 and "`apcbatch run --help` shows all options" in short
    flags = [flag for one in cli.commands["run"].params if isinstance(one, click.Option) for flag in one.opts]
    assert all(flag in whole for flag in flags) and "-h      Show the 10 options to begin with" in whole


def test_the_short_help_comes_before_other_faults():
    """Fault: help beside a value that cannot be used says only what is wrong with the value."""
    for words in [["-h"], ["--config", "s3://bucket/c.yaml", "-h"], ["--config", "s3://bucket/c.yaml"]]:
        done = CliRunner().invoke(cli, ["run", *words], prog_name="apcbatch")
        assert (done.exit_code == 0 and "Options to begin with:" in done.output) == ("-h" in words), done.output


def test_a_shell_completes_commands_options_values_and_files():
    """Fault: completion takes away the names of files that the shell knew before, or knows no value of an option."""
    for words, incomplete, found in [
        ([], "tu", [("plain", "tune-block-size")]),
        (["run"], "--max-to", [("plain", "--max-tokens")]),
        (["run", "x", "--policy"], "", [("plain", one) for one in ("planned", "all", "last", "none")]),
        (["run", "x", "--max-tokens"], "", []),
        (["run", "x", "--model"], "./m", [("dir", "./m")]),
        (["run", "x", "--store"], "st", [("dir", "st")]),
        (["run"], "ch", [("file", "ch")]),
        (["report", "x", "-o"], "r", [("file", "r")]),
        (["run", "-h"], "--max-to", [("plain", "--max-tokens")]),
        (["run", "x", "--policy"], "la", [("plain", "last")]),
        (["run", "x", "--policy"], "x", []),
        (["run", "x", "--config"], "c", [("file", "c")]),
        (["store", "stat"], "st", [("dir", "st")]),
    ]:
        items = ShellComplete(cli, {}, "apcbatch", "_APCBATCH_COMPLETE").get_completions(words, incomplete)
        assert [(item.type, item.value) for item in items] == found


def test_every_option_of_a_command_is_explained():
    """Fault: a flag without a help text."""
    for name, command in commands(cli, "apcbatch"):
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help, f"{name} {parameter.opts}"


def test_run_offers_every_option_that_has_a_flag():
    """Fault: an option can be set in the file and not on the command line."""
    run = dict(commands(cli, "apcbatch"))["apcbatch run"]
    flags = {flag for parameter in run.params for flag in parameter.opts}
    assert {flag_name(name) for name, spec in OPTIONS.items() if spec.flag is not None} <= flags


def test_what_needs_no_weights_loads_no_torch(tmp_path):
    """Fault: a plan, a look at a prompt or a usage error waits for a library that it does not use, or a plan needs the
    weights."""
    (tmp_path / "in.jsonl").write_text(
        '{"messages":[{"role":"user","content":"Hi"},{"role":"assistant","content":"Hello"}]}\n' * 3
    )
    code = (
        "import sys; from apcbatch.cli.program import main\n"
        "for code, *arguments in ((0, 'plan'), (0, 'show'), (2, 'tune-block-size', '--policy', 'none')):\n"
        "    assert main([arguments[0], 'in.jsonl', *arguments[1:]]) == code, arguments\n"
        "    assert not {'torch', 'transformers', 'pyarrow', 'jinja2', 'llguidance'} & set(sys.modules), arguments"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})


def test_version(capsys):
    """Fault: --version prints another version than the package's."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"apcbatch {VERSION}\n"


def test_a_default_is_shown_where_there_is_one():
    """Fault: a default that --help leaves out, or that it makes up where the machine decides."""
    for flag, default in [("--block-size", "64"), ("--max-running", None), ("--pool-size", None)]:
        whole = " ".join(CliRunner().invoke(cli, ["run", "--help"], prog_name="apcbatch").output.split())
        own = whole.partition(f" {flag} ")[2].partition(" --")[0]
        assert ("[default: " in own) == (default is not None) and (default is None or f"[default: {default}]" in own), (
            own
        )


WHOLE = """\
Usage: made [OPTIONS]

  First.

  Second.

Other options:
  -h             Show the 2 options to begin with, and stop.
  --other X|yes  another
  --help         Show this message and exit.

Output options:
  -q, --quiet  No line for each request.

Model options:
  --exact / --fast  On CUDA, multiply matrices in a fixed order of sums, so that
                    cached answers equal cold ones bit for bit, as they always
                    do on the CPU; --fast uses the libraries' products for more
                    than 128 rows.

Reuse options:
  --block-size N     Tokens between snapshots; those that a plan keeps for its
                     own run lie anywhere.  [default: 64]
  --store DIR        Keep snapshots in DIR for later runs.
  --no-store         Keep nothing on disk.
  --store-size SIZE  Maximum size of the store on disk.  [default: 20GiB]
  --pool-size SIZE   Maximum size of snapshots in memory; by default a quarter
                     of the RAM, at most 4GiB.

Generation options:
  --stop TEXT  Text that ends an answer and is removed from it; may be given
               several times.
"""
SHORT = """\
Usage: made [OPTIONS]

  First.

Options to begin with:
  --block-size N    Tokens between snapshots; those that a plan keeps for its
                    own run lie anywhere.  [default: 64]
  --exact / --fast  On CUDA, multiply matrices in a fixed order of sums, so that
                    cached answers equal cold ones bit for bit, as they always
                    do on the CPU; --fast uses the libraries' products for more
                    than 128 rows.

  the end
"""


def test_a_command_with_options_of_each_kind():
    """Fault: a default, a group, an opposite or a short flag is missing; or a default is taken for what was given."""

    @click.command(cls=GroupedCommand, context_settings={"help_option_names": ["--help"]})
    @short_help_option(("block_size", "exact"), "the end")
    @config_options(["quiet", "exact", "block_size", "store", "store_size", "pool_size", "stop"])
    @click.option("--other", metavar="X|yes", cls=GroupedOption, help="another")
    @click.option("--count", type=int, hidden=True)
    @click.pass_context
    def made(ctx, **options):
        """First.

        Second."""
        assert "h" not in options
        click.echo(sorted(given_flags(ctx).items()))

    words = ["--stop", "a", "--stop", "b", "-q", "--fast", "--block-size", "7", "--no-store", "--other", "x"]
    given = [("block_size", "7"), ("exact", False), ("no_store", True), ("quiet", True), ("stop", ("a", "b"))]
    asked = {("--help",): WHOLE, ("-h",): SHORT, ("--count", "x", "-h"): SHORT, (): "[]\n", tuple(words): f"{given}\n"}
    assert {flags: CliRunner().invoke(made, flags).output for flags in asked} == asked
    assert [item.value for item in ShellComplete(made, {}, "made", "_X").get_completions(["--other"], "")] == ["yes"]
    assert ShellComplete(made, {}, "made", "_X").get_completions(["-h"], "--bl")[0].value == "--block-size"
