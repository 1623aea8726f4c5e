"""`apcbatch bench`: measure a model on this machine, kernel by kernel and end to end."""

from __future__ import annotations

from typing import Any

import click

from apcbatch import resolution
from apcbatch.bench import GROUPS
from apcbatch.cli.options import ANYWHERE, GroupedCommand, GroupedOption, config_options, given_flags
from apcbatch.cli.terminal import echo, echo_json

EPILOG = """\b
Examples:
  apcbatch bench
  apcbatch bench --model ./my-mamba --dtype bfloat16 --only kernels
  apcbatch bench --input chats.jsonl --limit 4 --max-tokens 16
  apcbatch bench | tail -n 1 | jq .figures
"""


@click.command(cls=GroupedCommand, epilog=EPILOG, short_help="Measure kernels, prefill, decode and restores.")
@config_options(("model", "dtype", "limit", "max_tokens"))
@click.option(
    "--input", metavar="FILE", type=ANYWHERE, cls=GroupedOption, group="Input",
    help="Conversations for the figures of whole runs; without them these are left out.",
)  # fmt: skip
@click.option(
    "--only", metavar="GROUP", multiple=True, type=click.Choice(GROUPS), cls=GroupedOption, group="Output",
    help=f"Measure only this group: {', '.join(GROUPS)}; may be given more than once.",
)  # fmt: skip
@click.pass_context
def bench(ctx: click.Context, /, input: str | None, only: tuple[str, ...], **options: Any) -> None:
    """Measure the kernels, prefill, decode, snapshots and restores of a model on this machine.

    Kernels are compared with the machine's own limits; a pass is broken down by part; with --input, whole runs
    are measured cold, warm from disk and warm from RAM. Nothing is drafted but in the figures of decode passes by
    their rows. Figures are medians; the last line is one JSON document with all of them. Run it on an idle machine.
    """
    resolved = resolution.load(given_flags(ctx), None)
    import orjson

    from apcbatch.bench.document import measure

    document = measure(resolved, echo, only or GROUPS, input)
    echo_json(orjson.dumps(document))
