"""`apcbatch merge`: join the OUTs of all shards of a run."""

from __future__ import annotations

from collections import Counter
from typing import Any

import click

from apcbatch import resolution
from apcbatch.cli.options import ANYWHERE, OUTPUT, GroupedCommand, GroupedOption, given_flags
from apcbatch.cli.streams import say
from apcbatch.cli.terminal import echo
from apcbatch.display import counted
from apcbatch.errors import EXIT_OK, EXIT_REQUEST_ERRORS

EPILOG = """\b
Examples:
  apcbatch merge part.1.jsonl part.2.jsonl part.3.jsonl -o answers.jsonl
  apcbatch merge part.*.jsonl -o answers.jsonl.gz --overwrite
"""


@click.command(cls=GroupedCommand, epilog=EPILOG, short_help="Join the OUTs of all shards of a run.")
@click.argument("outs", metavar="OUT...", type=ANYWHERE, nargs=-1, required=True)
@click.option(
    "-o", "--output", metavar="ALL", type=OUTPUT, required=True, cls=GroupedOption, group="Output",
    help="Write the lines of all OUTs to ALL.",
)  # fmt: skip
@click.option("--overwrite", is_flag=True, cls=GroupedOption, group="Output", help="Replace ALL.")
@click.pass_context
def merge(ctx: click.Context, /, outs: tuple[str, ...], output: str, overwrite: bool, **options: Any) -> int:
    """Join the OUTs of all shards of a run (`run --shard I/N`) to ALL, as one process would have written it.

    Every request of INPUT must be there once, and all OUTs must come of the same INPUT, options, model and
    arithmetic, by OUT.run.json. ALL has their lines, shard by shard, and ALL.run.json: `run --resume`, `report`
    and `--draft-from` take ALL as any OUT. It appears whole, or not at all.

    Exit status: 0 all requests succeeded, 2 usage, shards or requests that are missing, OUTs of different runs,
    3 some requests are error records.
    """
    resolved = resolution.load(given_flags(ctx), None)
    from apcbatch.job.continuation import command_line, nothing_left
    from apcbatch.job.merge import check_all, merge, read_parts
    from apcbatch.job.out_file import find_out
    from apcbatch.job.output import output_for
    from apcbatch.job.output_paths import check_outputs
    from apcbatch.job.runfile import run_file_path

    files, place = [find_out(name) for name in outs], output_for(output)
    read: dict[str, str | None] = {}
    for number, file in enumerate(files, start=1):
        read |= {f"OUT {number}": file.lines, f"OUT {number}.run.json": run_file_path(file.target)}
    written = {"ALL": place.target, "ALL.run.json": run_file_path(place.target)}
    check_outputs(resolved, (), read, written | ({"ALL.part": place.lines} if place.packing else {}))
    check_all(place, overwrite)
    parts = read_parts(files)
    num_requests, errors = merge(parts, place)
    by_code = Counter(code for code, _ in errors.elements())
    shards, failed = counted(len(parts), "shard"), counted(errors.total(), "error")
    echo(f"{place.shown}: {counted(num_requests, 'request')} of {shards}, {failed}")
    if not errors:
        return EXIT_OK
    if any(retryable for _, retryable in errors):
        limit = parts[0].facts["config"].get("limit")
        limited = [] if limit is None else ["--limit", str(limit)]
        command = command_line(["apcbatch", "run", "INPUT", "-o", place.shown, *limited, "--retry-errors"])
        say(f"some of the errors may not come again: {command}")
    else:
        say(nothing_left(place.shown, by_code))
    return EXIT_REQUEST_ERRORS
