"""`apcbatch run`: answer the requests of INPUT in OUT, and write a report with --report.

Invariant: once the run has begun, its exit code does not depend on the report.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from apcbatch import config, resolution
from apcbatch.cli.options import (
    ANYWHERE,
    OUTPUT_ANYWHERE,
    GroupedCommand,
    GroupedOption,
    config_file_option,
    config_options,
    given_flags,
    short_help_option,
)
from apcbatch.cli.streams import Invocation, say
from apcbatch.cli.terminal import echo
from apcbatch.display import json_escaped
from apcbatch.errors import ModelError, StoppedError, UsageError
from apcbatch.option_values import format_size

if TYPE_CHECKING:
    from apcbatch.job.job import Job

EPILOG = """\b
Examples:
  apcbatch run chats.jsonl
  apcbatch run chats.jsonl --resume
  apcbatch run chats.jsonl -o answers.jsonl
  apcbatch run chats.jsonl -o answers.jsonl --resume
  apcbatch run chats.jsonl -o answers.jsonl --report report.html
  apcbatch run a.jsonl b.jsonl.gz 'shards/*.parquet' -o answers.jsonl.gz
  apcbatch run s3://bucket/shards/ -o s3://bucket/answers.jsonl
  apcbatch run chats.jsonl.gz --store ~/states --max-tokens 256
  apcbatch run requests.jsonl --format batch --model ./my-mamba
  apcbatch run chats.jsonl -o part.2.jsonl --shard 2/8
  apcbatch run hf:org/name:train -o answers.jsonl --limit 100 --turns last
  cat chats.jsonl | apcbatch run - -o - -q | jq .response.body.choices
  apcbatch run --config nightly.yaml --show-config
"""

FIRST_OPTIONS = (
    "output", "model", "turns", "limit", "max_tokens", "temperature", "store", "resume", "overwrite", "report",
)  # fmt: skip
FIRST_EPILOG = """\b
Examples:
  apcbatch run chats.jsonl
  apcbatch run chats.jsonl --model ./my-mamba --max-tokens 256
  apcbatch run chats.jsonl -o answers.jsonl --resume

`apcbatch run --help` shows all options, and what INPUT, OUT and the exit status are.
"""


@click.command(
    cls=GroupedCommand,
    epilog=EPILOG,
    short_help="Answer every request of INPUT: the job.",
    context_settings={"help_option_names": ["--help"]},
)
@click.argument("inputs", metavar="INPUT...", type=ANYWHERE, nargs=-1)
@short_help_option(FIRST_OPTIONS, FIRST_EPILOG)
@click.option(
    "-o", "--output", metavar="OUT", type=OUTPUT_ANYWHERE, cls=GroupedOption, group="Output",
    help="Write one JSON line a request to OUT; - is standard output.  [default: NAME.answers.jsonl]",
)  # fmt: skip
@config_options(config.OPTIONS)
@config_file_option
@click.option(
    "--show-config", is_flag=True, cls=GroupedOption, group="Configuration",
    help="Print each option with where its value comes from, and stop.",
)  # fmt: skip
@click.pass_context
def run(ctx: click.Context, /, inputs: tuple[str, ...], output: str | None, **options: Any) -> int:
    """Answer every request of INPUT, a file of conversations or of OpenAI Batch requests, in OUT.

    INPUT is JSON lines, a JSON document or array, or a parquet or arrow table: a file, - for stdin, a folder
    of such files, a folder written by `save_to_disk`, a pattern in quotes, an address (s3://...), or a dataset
    as hf:org/name[:split]. Compressed files are detected by their content. Several inputs are read in the given
    order, with continuous line numbers. A line is a conversation (`messages`, `sharegpt`) or a request of the
    OpenAI Batch API. Each line is answered with a result or an error record. --resume continues a stopped run.

    Without -o, OUT is NAME.answers.jsonl in the current folder: the name of INPUT without its suffixes. An
    OUT that exists is continued with --resume or replaced with --overwrite, and otherwise left alone. An OUT
    in .gz or .zst is compressed, and one with an address uploaded, when the run ends.

    Exit status: 0 all requests succeeded, 1 stopped early, 2 usage, 3 some requests are error records, 130
    interrupted, 143 terminated. After 1, 3, 130 and 143 the last line on stderr is the command that
    continues, or, after 3, that nothing is left to do because every error would recur.
    """
    resolved = resolution.load(given_flags(ctx), options["config_file"])
    from apcbatch.job.job import Job

    if options["show_config"]:
        if resolved.resume and (inputs or output):
            resolved = Job(resolved, inputs, output, ()).config
        echo(show(_with_model_defaults(resolved)))
        return 0
    if not inputs:
        raise click.MissingParameter(ctx=ctx, param_hint="'INPUT'", param_type="argument")
    invocation: Invocation = ctx.obj
    job = Job(resolved, inputs, output, invocation.program, options["config_file"])
    invocation.last_line = job.last_line
    if resolved.report is None:
        return job.run()
    return _run_with_report(job, resolved.report, resolved.origins["report"])


def _run_with_report(job: Job, path: str, flag: str) -> int:
    """Run the job, then write its report; return the job's exit code. Raises UsageError before the run begins if the
    report may not replace the file. There is no report if the job raises any error but StoppedError, or after a second
    signal."""
    from apcbatch.report.report_file import check_report

    check_report(flag, path)
    try:
        code = job.run()
    except StoppedError:
        _write_report(job, path, flag)
        raise
    _write_report(job, path, flag)
    return code


def _write_report(job: Job, path: str, flag: str) -> None:
    """Write the report, or print why it is not written. A signal ends only the report; the run's output is complete."""
    from apcbatch.data.input.files import reason
    from apcbatch.job.out_file import find_out
    from apcbatch.job.signals import Interrupted, Signals
    from apcbatch.report.report_file import check_report, make_document, shown_bytes, write_report

    try:
        with Signals(job.continue_command):
            check_report(flag, path)  # again: another program may have written to it during the run
            size = write_report(path, make_document([find_out(job.output)]))
    except Interrupted:
        say(f"warning: the report {path} was not written: it was interrupted")
    except UsageError as error:
        say(f"warning: {error}")
    except Exception as error:  # the answers are written, so the exit code stays the job's
        say(f"warning: the report {path} was not written: {reason(error)}")
    else:
        say(f"report: {path} ({shown_bytes(size)})")


def _with_model_defaults(resolved: config.Config) -> config.Config:
    """Add the checkpoint's own dtype and, with --generation-config auto, the defaults of its generation_config.json.
    Without the latter, the model need not be there."""
    from apcbatch.data.generation_config import with_model_defaults
    from apcbatch.model.locate import locate_model
    from apcbatch.model.own_dtype import with_own_dtype

    try:
        return with_own_dtype(with_model_defaults(resolved, locate_model(resolved.model)))
    except ModelError:
        if resolved.generation_config == "auto":
            raise
        return resolved


def show(resolved: config.Config) -> str:
    """Return each option as a YAML line, with the origin of its value in a comment."""
    import yaml

    lines = []
    for name, value in resolved.values().items():
        if config.OPTIONS[name].kind == "size" and value is not None:
            value = format_size(value)
        if isinstance(value, list):
            scalar = json_escaped(json.dumps(value, ensure_ascii=False))  # JSON is YAML on one line
        else:
            is_printable = not isinstance(value, str) or value.isprintable()
            scalar = yaml.safe_dump(value, width=float("inf"), allow_unicode=is_printable).splitlines()[0]
        hidden = " (a secret, not shown)" * (value is None and getattr(resolved, name) is not None)
        lines.append((f"{name}: {scalar}", resolved.origins[name] + hidden))
    width = max(len(line) for line, _ in lines)
    return "\n".join(f"{line:<{width}}  # {origin}" for line, origin in lines)
