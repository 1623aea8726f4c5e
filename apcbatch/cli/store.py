"""`apcbatch store`: inspect, check and prune a store folder."""

from __future__ import annotations

import os
import re
import time
from typing import TYPE_CHECKING, Any

import click

from apcbatch.cli.options import LOCAL, OrderedGroup
from apcbatch.cli.terminal import echo, echo_json, echo_row, warn
from apcbatch.display import counted
from apcbatch.errors import EXIT_OK, EXIT_STOPPED
from apcbatch.model.locate import name_of
from apcbatch.option_values import parse_size, rounded_size

if TYPE_CHECKING:
    from apcbatch.store import Store

AGE_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

EPILOG = """\b
Examples:
  apcbatch store stat ~/states
  apcbatch store check ~/states
  apcbatch store prune ~/states --older-than 30d
"""
STAT_EPILOG = """\b
Examples:
  apcbatch store stat ~/states
  apcbatch store stat ~/states --json | jq .models
"""
CHECK_EPILOG = """\b
Examples:
  apcbatch store check ~/states
"""
PRUNE_EPILOG = """\b
Examples:
  apcbatch store prune ~/states --size 5GiB
  apcbatch store prune ~/states --older-than 30d
  apcbatch store prune ~/states --model my-mamba
"""


@click.group(cls=OrderedGroup, epilog=EPILOG, short_help="Look into a store folder, check it, prune it.")
def store() -> None:
    """Look into a store folder, check it, prune it. Runs may use the store at the same time."""


@store.command(epilog=STAT_EPILOG, short_help="Print how many snapshots DIR holds, and their size.")
@click.argument("folder", metavar="DIR", type=LOCAL)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def stat(folder: str, as_json: bool) -> None:
    """Print how many snapshots DIR holds, their size, and the same for each model."""
    with _open(folder, read_only=True) as opened:
        stats = opened.stats()
    if as_json:
        import dataclasses

        import orjson

        path = os.fsencode(stats.path).decode("utf-8", "replace")  # bytes that are not UTF-8 are replaced
        document = dataclasses.asdict(stats) | {"path": path}
        echo_json(orjson.dumps(document))
        return
    stranded = f", {stats.num_stranded} of them stranded" if stats.num_stranded else ""
    echo_row(
        f"{_printable(stats.path)}: {counted(stats.entries, 'snapshot')}{stranded}, {rounded_size(stats.num_bytes)}", 2
    )
    for model in stats.models:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(model.last_used)) if model.last_used else "never"
        echo_row(
            f"  {model.fingerprint[:12]}  {counted(model.entries, 'snapshot'):>18}"
            f"  {rounded_size(model.num_bytes):>10}  up to {counted(model.longest_position, 'token')}"
            f"  restored {counted(model.uses, 'time')}  last used {used}  {_printable(model.name)}",
            4,
        )


@store.command(epilog=CHECK_EPILOG)
@click.argument("folder", metavar="DIR", type=LOCAL)
def check(folder: str) -> int:
    """Verify every snapshot in DIR byte by byte, and put the index right.

    Each fault is a line; bad files are removed. Exit status 1 where there was a fault.
    """
    with _open(folder, maintenance=True) as opened:
        report = opened.check()
    for fault in report.faults:
        echo(_printable(fault))
    click.echo(
        f"{counted(report.num_verified, 'whole snapshot')} ({rounded_size(report.num_bytes)}), "
        f"{counted(len(report.faults), 'fault')}; {counted(report.num_files_removed, 'file')} and "
        f"{counted(report.num_rows_dropped, 'index row')} removed, {counted(report.num_adopted, 'row')} added, "
        f"{counted(report.num_stranded, 'snapshot')} stranded"
    )
    return EXIT_STOPPED if report.faults else EXIT_OK


@store.command(epilog=PRUNE_EPILOG)
@click.argument("folder", metavar="DIR", type=LOCAL)
@click.option("--size", metavar="SIZE", help="Drop the least valuable until the store has this size at most.")
@click.option("--older-than", metavar="AGE", help="Drop what was not used for so long: 90m, 12h, 30d, 8w.")
@click.option(
    "--model", metavar="NAME",
    help="Drop one model's only: its name (a folder's last component) or the start of its fingerprint.",
)  # fmt: skip
def prune(folder: str, size: str | None, older_than: str | None, model: str | None) -> None:
    """Drop snapshots from DIR by size, by age or by model."""
    if size is None and older_than is None and model is None:
        raise click.UsageError("nothing says what to drop; give --size, --older-than or --model")
    size_bytes = None if size is None else parse_size(size)
    if size is not None and size_bytes is None:
        raise click.UsageError(f"--size is {size!r}; expected a size such as 5GiB")
    age_s = None if older_than is None else _parse_age(older_than)
    with _open(folder, maintenance=True) as opened:
        report = opened.prune(size_bytes, age_s, None if model is None else name_of(model))
    click.echo(
        f"{counted(report.num_removed, 'snapshot')} ({rounded_size(report.num_bytes_removed)}) dropped; "
        f"{report.num_left} ({rounded_size(report.num_bytes_left)}) are left"
    )


def _open(folder: str, **options: Any) -> Store:
    from apcbatch.store import Store

    return Store.open(folder, warn=warn, **options)


def _printable(text: str) -> str:
    """Return a text or a path on one line, with `?` for each character that is not printable."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _parse_age(text: str) -> float:
    """Return the seconds of an age such as `90m`, `12h` or `30d`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip().lower())
    if match is None:
        raise click.UsageError(f"--older-than is {text!r}; expected an age such as 90m, 12h or 30d")
    return float(match[1]) * AGE_UNITS_S[match[2]]
