"""`apcbatch tune-block-size`: recommend a block size, from the plan and a measurement on this machine."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

import click

from apcbatch import config, resolution
from apcbatch.cli.options import (
    ANYWHERE,
    BLOCK_SIZES,
    OUTPUT,
    USUAL_SIZES,
    Count,
    GroupedCommand,
    GroupedOption,
    config_file_option,
    config_options,
    given_flags,
    json_option,
    read_block_sizes,
)
from apcbatch.cli.streams import say
from apcbatch.cli.terminal import echo, echo_json, json_document, survey_with_bar, terminal_width, warn, write_output
from apcbatch.errors import UsageError

if TYPE_CHECKING:
    from apcbatch.data.input.inputs import Inputs
    from apcbatch.tuning.choice import Tuning

OPTION_NAMES = (
    "model", "adapter", "dtype", "weights", "device", "gpus", "format", *config.COLUMN_OPTIONS, "ignore_columns",
    "turns", "limit", "window_tokens", "order", "max_request_tokens", "system_prompt", "chat_template",
    "template_kwargs", "template_date", "policy", "min_gain_tokens", "store", "store_size", "pool_size",
    "max_batch_tokens", "max_running",
)  # fmt: skip
STDIN = STDOUT = "-"

EPILOG = """\b
Examples:
  apcbatch tune-block-size chats.jsonl
  apcbatch tune-block-size chats.jsonl --candidates 96,544 --policy all
  apcbatch tune-block-size chats.jsonl --store ~/states --write tuned.yaml
  apcbatch tune-block-size chats.jsonl --verify 3 --json tuned.json
  apcbatch run chats.jsonl -o answers.jsonl --config tuned.yaml
"""


@click.command("tune-block-size", cls=GroupedCommand, epilog=EPILOG, short_help="Find the best block size for INPUT.")
@click.argument("inputs", metavar="INPUT...", type=ANYWHERE, nargs=-1, required=True)
@config_options(OPTION_NAMES)
@click.option(
    "--candidates", metavar="N,N,...", multiple=True, cls=GroupedOption, group="Reuse",
    help=f"Block sizes to compare besides {USUAL_SIZES}; may be given more than once.",
)  # fmt: skip
@click.option(
    "--verify", metavar="N", type=Count(min=0), default=0, cls=GroupedOption, group="Output",
    help="Run the best N for real, with one new token a request, and compare with the prediction.",
)  # fmt: skip
@click.option(
    "--write", "yaml_path", metavar="FILE", type=OUTPUT, cls=GroupedOption, group="Output",
    help="Write the choice to FILE as YAML for --config.",
)  # fmt: skip
@json_option
@config_file_option
@click.pass_context
def tune_block_size(ctx: click.Context, /, inputs: tuple[str, ...], **options: Any) -> None:
    """Find the block size with which a run of INPUT takes the least time on this machine.

    Plans INPUT for every candidate, measures for a few seconds what prefill, snapshots, restores and writes
    cost here with this model, and predicts the seconds of each. Under `planned` each restores the same, and
    the block size is what later runs find in a --store. Restored tokens are exactly those that `run`
    reports with the same options; seconds are an estimate, which --verify puts to the test. Writes to disk
    count where --store is given; the folder itself is not touched, and taken to be empty: what it holds already
    makes a run restore more.
    """
    resolved = resolution.load(given_flags(ctx), options["config_file"])
    given = ",".join(options["candidates"])
    sizes = {*BLOCK_SIZES, *(read_block_sizes("--candidates", given, "96,544") if options["candidates"] else ())}
    if options["verify"] and STDIN in inputs:
        raise UsageError("--verify reads INPUT once more for each run, and - can be read once; give a file")
    from apcbatch.data.input.inputs import find_inputs
    from apcbatch.job.output_paths import check_outputs
    from apcbatch.job.planning import with_recorded_gain
    from apcbatch.model.own_dtype import with_own_dtype
    from apcbatch.tuning.choice import check
    from apcbatch.tuning.documents import tuning_document, tuning_yaml
    from apcbatch.tuning.text import tuning_lines

    check(resolved)
    resolved = with_recorded_gain(with_own_dtype(resolved, warn))
    names = {"--write": "yaml_path", "--json": "json_path"}
    paths = {flag: options[name] for flag, name in names.items() if options[name] not in (None, STDOUT)}
    if options["yaml_path"] == STDOUT:
        raise UsageError("--write needs a file; only --json goes to standard output")
    found = find_inputs(inputs, warn)
    check_outputs(resolved, found.files, {"--config": resolution.config_path(options["config_file"])}, paths)
    tuning = _find(resolved, found, sizes, options["verify"])
    document = json_document(tuning_document(tuning, resolved))
    outputs = {"--json": document, "--write": tuning_yaml(tuning, resolved).encode()}
    for flag, path in paths.items():
        write_output(flag, path, outputs[flag])
    if options["json_path"] == STDOUT:
        echo_json(document)
    else:
        for line in tuning_lines(tuning, resolved, terminal_width(sys.stdout)):
            echo(line)
    _say_what_is_next(ctx.obj.program, inputs, options, tuning, resolved)


def _say_what_is_next(
    program: list[str], inputs: tuple[str, ...], options: dict[str, Any], tuning: Tuning, resolved: config.Config
) -> None:
    """Print the names of the written files on stderr; with --write, also print the command that runs INPUT with the
    chosen settings.

    `run` takes only one configuration file. If --config was given, the command uses that file and passes the chosen
    settings as flags; otherwise it uses the file of --write.
    """
    from apcbatch.job.continuation import command_line, command_words
    from apcbatch.job.output_paths import default_output

    written, earlier = options["yaml_path"], resolution.config_path(options["config_file"])
    if options["json_path"] not in (None, STDOUT):
        say(f"wrote {options['json_path']}")
    if written is None:
        return
    choice = {
        "policy": resolved.policy,
        "block_size": tuning.recommended.block_size,
        "min_gain_tokens": tuning.min_gain_tokens,
    }
    say(f"wrote {written} ({', '.join(f'{name} {value}' for name, value in choice.items())}); to run with the choice:")
    flags = [word for name, value in choice.items() for word in (config.flag_name(name), str(value))] if earlier else []
    origins = {**resolved.origins, **dict.fromkeys((*choice, "limit"), "default")}  # command_words leaves these out
    try:
        output = default_output(inputs)
    except UsageError:
        output = "answers.jsonl"
    given = dataclasses.replace(resolved, origins=origins)
    say(command_line(command_words(program, inputs, output, earlier or written, given, flags)))


def _find(resolved: config.Config, inputs: Inputs, sizes: set[int], num_real_runs: int) -> Tuning:
    """Survey INPUT, forecast the reuse, measure this machine, predict the run times of the candidates, and choose.
    num_real_runs: number of best candidates to run for real before the choice. Progress goes to stderr."""
    from apcbatch.tuning.choice import conclude
    from apcbatch.tuning.prediction import Passes, of_run, predict

    passes = Passes(resolved)
    surveyed = survey_with_bar(resolved, inputs, of_run(resolved, sizes, passes))
    from apcbatch.tuning.measurement import measure

    say("measuring prefill, snapshots, restores and writes")
    measured = measure(resolved, surveyed.footprint, warn)
    candidates = predict(resolved, surveyed.forecast, passes, measured)
    if num_real_runs:
        from apcbatch.tuning.verification import verify

        say(f"running the best {min(num_real_runs, len(candidates))} for real")
        candidates = verify(resolved, inputs, candidates, num_real_runs, warn)
    return conclude(resolved, surveyed.forecast, measured, candidates)
