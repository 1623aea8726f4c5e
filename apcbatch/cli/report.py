"""`apcbatch report`: show one or more runs as a page for the browser."""

from __future__ import annotations

from typing import Any

import click

from apcbatch import resolution
from apcbatch.address import output_place
from apcbatch.cli.options import ANYWHERE, LOCAL, OUTPUT, GroupedCommand, GroupedOption, config_options, given_flags
from apcbatch.cli.terminal import echo, warn
from apcbatch.errors import UsageError

MOST_OUTS = 8

EPILOG = """\b
Examples:
  apcbatch report answers.jsonl
  apcbatch report answers.jsonl -o report.html --tune tuned.json
  apcbatch report answers.jsonl --prompts chats.jsonl --model ./my-mamba
  apcbatch report warm.jsonl cold.jsonl -o report.html
"""


@click.command(cls=GroupedCommand, epilog=EPILOG, short_help="Show runs, and compare them, as a page for the browser.")
@click.argument("outs", metavar="OUT...", type=ANYWHERE, nargs=-1, required=True)
@click.option(
    "-o", "--output", metavar="FILE", type=OUTPUT, cls=GroupedOption, group="Output",
    help="Write the page to FILE.  [default: NAME.report.html]",
)  # fmt: skip
@click.option(
    "--overwrite", is_flag=True, cls=GroupedOption, group="Output",
    help="Replace FILE even if it is not a report.",
)  # fmt: skip
@click.option(
    "--tune", metavar="JSON", type=LOCAL, cls=GroupedOption, group="Report",
    help="Show the block-size curve of `tune-block-size --json` or `plan --json`.",
)  # fmt: skip
@click.option(
    "--prompts", metavar="INPUT", type=ANYWHERE, multiple=True, cls=GroupedOption, group="Report",
    help="Show prompts and their prefix tree too: the INPUT of the run, which is read again; repeat it for several "
    "inputs.",
)  # fmt: skip
@config_options(["model"])
@click.pass_context
def report(
    ctx: click.Context,
    /,
    outs: tuple[str, ...],
    output: str | None,
    overwrite: bool,
    tune: str | None,
    prompts: tuple[str, ...],
    **options: Any,
) -> None:
    """Show what a run did as one page for the browser, and compare it with other runs of the same requests.

    OUT is the file of answers of `run`, finished or not; up to 8 may be given. The page shows the verdict,
    where the prompt tokens went, the prefix tree, a timeline, every request with its answer, and what ran.
    With several OUTs each is compared with the first: whether the answers are the same bit for bit, tokens,
    seconds, misses, options. The times come from OUT.run.json; the tree is made of the prompts, if --prompts is
    given. The page is one file without any network access. It holds the answers: give it
    to those who may read OUT.

    Without -o, FILE is NAME.report.html in the current folder: the name of the first OUT without its suffixes. A
    report that is there is replaced; any other file needs --overwrite. --model matters for --prompts alone.

    Exit status: 0 the page is written, 2 usage or an OUT that cannot be read.
    """
    if len(outs) > MOST_OUTS:
        raise UsageError(f"{len(outs)} OUTs are given; one report shows {MOST_OUTS} at most")
    resolved = resolution.load(given_flags(ctx), None)
    from apcbatch.data.input.inputs import find_inputs
    from apcbatch.job.out_file import find_out
    from apcbatch.job.output_paths import check_outputs, odd_names, same_file
    from apcbatch.job.runfile import run_file_path
    from apcbatch.report.curve import read_curve
    from apcbatch.report.report_file import check_report, default_report, make_document, shown_bytes, write_report

    files = [find_out(name) for name in outs]
    for place, file in enumerate(files):
        if any(same_file(file.lines, other.lines) for other in files[:place]):
            raise UsageError(f"{file.name} is given twice; name each OUT once")
    path = output or output_place(default_report([file.target for file in files]))
    check_report("-o", path, overwrite)
    inputs = find_inputs(prompts, warn) if prompts else None
    read: dict[str, str | None] = {"--tune": tune}
    for place, file in enumerate(files, start=1):
        number = f" {place}" * (len(files) > 1)
        read |= {
            f"OUT{number}": file.lines,
            f"OUT{number} when it is complete": None if file.lines == file.target else file.target,
            f"OUT{number}.run.json": run_file_path(file.target),
        }
    check_outputs(resolved, inputs.files if inputs is not None else (), read, {"-o": path})
    for sentence in odd_names("", "-o", path):
        warn(sentence)
    curve = None if tune is None else read_curve(tune)
    reader = None
    if inputs is not None:
        from apcbatch.report.prompts import PromptReader

        reader = PromptReader(inputs, resolved.model, warn)
    document = make_document(files, curve, reader)
    for run in document["runs"]:
        if run["episodes"] is not None:
            echo(f"{run['name']}: {run['episodes']}")
        for note in run["notes"]:
            warn(f"{run['name']}: {note}")
    size = write_report(path, document)
    echo(f"{path} ({shown_bytes(size)})")
