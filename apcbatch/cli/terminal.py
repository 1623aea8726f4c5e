"""What several commands print in the same way: warnings, the bar while INPUT is read, JSON for people, a named file.

Must not know: options, what a document says. Heavy modules are imported only where they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from apcbatch.errors import UsageError

if TYPE_CHECKING:
    from apcbatch.config import Config
    from apcbatch.data.inputs import Inputs
    from apcbatch.tuning.survey import Survey


def warn(sentence: str) -> None:
    """One warning on standard error."""
    click.echo(f"warning: {sentence}", err=True)


def survey_with_bar(config: Config, inputs: Inputs) -> Survey:
    """The survey of INPUT, with a bar on standard error while its lines are read."""
    from tqdm import tqdm

    from apcbatch.tuning.survey import survey

    with tqdm(desc="reading", unit=" lines", leave=False, disable=None) as bar:

        def advance() -> None:
            bar.update()

        return survey(config, inputs, warn, advance)


def json_document(document: dict[str, Any]) -> bytes:
    """One JSON document, indented, with a newline at its end."""
    import orjson

    return orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def write_output(flag: str, path: str, data: bytes) -> None:
    """Write the file that an option names, completely or not at all; `-` is standard output."""
    from apcbatch.job.disk import Disk, write_file

    if path == "-":
        click.echo(data.decode(), nl=False)
        return
    try:
        write_file(path, [data], Disk())
    except OSError as error:
        raise UsageError(f"{flag} {path} cannot be written: {error.strerror}") from None
