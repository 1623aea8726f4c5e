"""Writes docs/reference/cli.md from the commands' own help; run it after every change of a command. What is above the
first command is written by hand, but for the names of the variables.

A test compares the file with what this script would write, so that no command and no flag stays undocumented.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill

import click

from apcbatch.cli.program import cli
from apcbatch.config import OPTIONS, env_name

TARGET = Path(__file__).resolve().parent.parent / "docs" / "reference" / "cli.md"
WIDTH = 80
HEAD_WIDTH = 120
VARIABLES = re.compile(r"^Variables: .*?\.$", re.DOTALL | re.MULTILINE)


def commands(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    """(full name, command) of a command and everything below it, in the order of the help."""
    yield name, command
    if isinstance(command, click.Group):
        for child in command.list_commands(click.Context(command)):
            yield from commands(command.commands[child], f"{name} {child}")


def document() -> str:
    """The whole page."""
    page = TARGET.read_text()
    variables = ", ".join(f"`{env_name(name)}`" for name in (*OPTIONS, "no_store"))
    wrapped = fill(f"Variables: {variables}.", HEAD_WIDTH, break_long_words=False, break_on_hyphens=False)
    before, after = VARIABLES.split(page[: page.index("\n## apcbatch\n")])
    parts = [f"{before}{wrapped}{after}"]
    for name, command in commands(cli, "apcbatch"):
        settings = {"help_option_names": ["-h", "--help"], **command.context_settings}
        context = click.Context(command, info_name=name, terminal_width=WIDTH, **settings)
        parts.append(f"## {name}\n\n```text\n{command.get_help(context).rstrip()}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    TARGET.write_text(document())
