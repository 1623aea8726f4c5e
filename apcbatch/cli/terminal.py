"""Print the terminal output that commands share: warnings, rows, the progress bar of reading INPUT, JSON, output files.

Heavy modules are imported only where they are used.
"""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Any, TextIO

import click

from apcbatch.display import Paint, json_escaped, visible, wrap
from apcbatch.errors import UsageError
from apcbatch.resolution import colour_wanted

if TYPE_CHECKING:
    from apcbatch.config import Config
    from apcbatch.data.input.inputs import Inputs
    from apcbatch.tuning.forecast import MakeForecaster
    from apcbatch.tuning.survey import RecordedAnswers, Survey

VERDICT_STYLES = {"ok": "green", "WARN": "yellow", "FAIL": "red"}


def echo(text: str, err: bool = False) -> None:
    """Print a text on standard output, or standard error, with control characters escaped."""
    click.echo(visible(text, "\n"), err=err)


def echo_json(data: bytes) -> None:
    """Print JSON on standard output, with control characters as JSON escapes."""
    click.echo(json_escaped(data.decode()), nl=not data.endswith(b"\n"))


def warn(sentence: str) -> None:
    """Print one warning on standard error."""
    echo(f"warning: {sentence}", err=True)


def terminal_width(stream: TextIO | None) -> int | None:
    """Return the columns of a stream's terminal; None if the stream is no terminal."""
    return shutil.get_terminal_size().columns if stream is not None and stream.isatty() else None


def echo_row(text: str, indent: int, verdict: str = "") -> None:
    """Print one row on standard output. On a terminal it is folded at the width, further lines are indented, and a
    leading verdict (`ok`, `WARN`, `FAIL`) is coloured."""
    width = terminal_width(sys.stdout)
    text = visible(text, "\n")
    lines = wrap(text, width, " " * min(indent, (width or 0) // 3))
    paint = Paint(sys.stdout, colour_wanted())
    if verdict:
        lines[0] = paint(verdict, VERDICT_STYLES.get(verdict, "red")) + lines[0][len(verdict) :]
    for line in lines:
        click.echo(line, color=True)


def survey_with_bar(
    config: Config, inputs: Inputs, make_forecaster: MakeForecaster, answers: RecordedAnswers | None = None
) -> Survey:
    """Survey INPUT, with a progress bar on standard error. answers: see survey()."""
    from tqdm import tqdm

    from apcbatch.tuning.survey import survey

    with tqdm(desc="reading", unit=" lines", leave=False, disable=None) as bar:

        def advance() -> None:
            bar.update()

        return survey(config, inputs, make_forecaster, warn, advance, answers)


def json_document(document: dict[str, Any]) -> bytes:
    """Serialise a JSON document, indented, with a newline at its end."""
    import orjson

    return orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def write_output(flag: str, path: str, data: bytes) -> None:
    """Write the file named by an option, atomically; `-` is standard output."""
    from apcbatch.job.disk import Disk, write_file

    if path == "-":
        echo_json(data)
        return
    try:
        write_file(path, [data], Disk())
    except OSError as error:
        raise UsageError(f"{flag} {path} cannot be written: {error.strerror}") from None
