"""`apcbatch bench`: what this machine does with a model, kernel by kernel and end to end."""

from __future__ import annotations

from typing import Any

import click

from apcbatch import config
from apcbatch.cli.options import GroupedCommand, config_options, given_flags

EPILOG = """\b
Examples:
  apcbatch bench
  apcbatch bench --model ./my-mamba --dtype bfloat16
  apcbatch bench | tail -n 1 | jq .figures
"""


@click.command(cls=GroupedCommand, epilog=EPILOG, short_help="Measure kernels, prefill, decode and restores.")
@config_options(("model", "dtype"))
@click.pass_context
def bench(ctx: click.Context, /, **options: Any) -> None:
    """Measure the kernels, prefill, decode, snapshots and restores of a model on this machine.

    Figures are medians; the last line is one JSON document with all of them. Run it on an idle machine.
    """
    resolved = config.load(given_flags(ctx), None)
    import orjson

    from apcbatch.job.bench import measure

    document = measure(resolved, click.echo)
    click.echo(orjson.dumps(document).decode())
