"""`apcbatch plan`: forecast the reuse of a run, without running it."""

from __future__ import annotations

import sys
from typing import Any

import click

from apcbatch import resolution
from apcbatch.cli.options import (
    ANYWHERE,
    BLOCK_SIZES,
    USUAL_SIZES,
    GroupedCommand,
    GroupedOption,
    config_file_option,
    config_options,
    given_flags,
    json_option,
    read_block_sizes,
)
from apcbatch.cli.terminal import echo, json_document, survey_with_bar, terminal_width, warn, write_output
from apcbatch.config import COLUMN_OPTIONS
from apcbatch.draft_sources import draft_sources
from apcbatch.types import POLICIES

OPTION_NAMES = (
    "model", "adapter", "dtype", "weights", "device", "gpus", "format", *COLUMN_OPTIONS, "ignore_columns", "turns",
    "tools", "samples", "limit", "window_tokens", "order", "max_tokens", "max_request_tokens", "system_prompt",
    "chat_template", "template_kwargs", "template_date", "block_size", "min_gain_tokens", "store",
    "store_size", "pool_size", "draft", "draft_memory", "max_batch_tokens", "max_running",
)  # fmt: skip
TABLES = sorted(set(POLICIES) - {"none"})

EPILOG = """\b
Examples:
  apcbatch plan chats.jsonl
  apcbatch plan chats.jsonl --model ./my-mamba
  apcbatch plan chats.jsonl --block-sizes 1,64,544 --order file
  apcbatch plan chats.jsonl --policy last --json plan.json
  apcbatch plan chats.jsonl --json - | jq '.candidates[].hit_rate'
"""


@click.command(cls=GroupedCommand, epilog=EPILOG, short_help="Tell what a run would reuse, without weights.")
@click.argument("inputs", metavar="INPUT...", type=ANYWHERE, nargs=-1, required=True)
@config_options(OPTION_NAMES)
@click.option(
    "--block-sizes", metavar="N,N,...", cls=GroupedOption, group="Reuse",
    help=f"Grids to compare; --block-size is among them always.  [default: {USUAL_SIZES}]",
)  # fmt: skip
@click.option(
    "--policy", "table", type=click.Choice(TABLES), default="planned", show_default=True, cls=GroupedOption,
    group="Output", help="The policy whose memory and --json are given; the table shows all.",
)  # fmt: skip
@json_option
@config_file_option
@click.pass_context
def plan(ctx: click.Context, /, inputs: tuple[str, ...], **options: Any) -> None:
    """Tell what a run of INPUT would reuse, on every grid and under every policy.

    INPUT is read, rendered and tokenised as `run` does it; of the model only its configuration and its
    tokenizer are needed. Columns: hit rate (the restored share of all prompt tokens), missed (covered by an
    earlier request and not found), the snapshots kept in the run, those of them that are read, those kept for
    future runs alone, what a store would hold afterwards, and the most snapshots live at once with one
    request after the other. Under `planned` the grid decides only what is kept for future runs. Of a --store,
    only what reading a snapshot costs is read; a run with one that holds snapshots already restores more.

    Below stand the memory that a run of this INPUT takes under --policy, by its causes, and the most that any
    run with these options may take: on a GPU, which holds its arena from the beginning, that of the card, and
    what is free there.
    """
    resolved = resolution.load(given_flags(ctx), options["config_file"])
    given = options["block_sizes"]
    sizes = BLOCK_SIZES if given is None else read_block_sizes("--block-sizes", given, "1,64,544")
    from apcbatch.data.input.inputs import find_inputs
    from apcbatch.job.output_paths import check_outputs
    from apcbatch.job.planning import with_recorded_gain
    from apcbatch.model.adapter import about_weights
    from apcbatch.model.locate import locate_model
    from apcbatch.model.own_dtype import with_own_dtype

    resolved = with_recorded_gain(with_own_dtype(resolved, warn))
    sentences = list(about_weights(locate_model(resolved.model), resolved))
    found = find_inputs(inputs, warn)
    read = {"--config": resolution.config_path(options["config_file"])}
    check_outputs(resolved, found.files, read, {"--json": options["json_path"]})
    from apcbatch.tuning.documents import forecast_document
    from apcbatch.tuning.occupancy import MemoryForecast, Occupancy, memory_limit
    from apcbatch.tuning.prediction import of_policies
    from apcbatch.tuning.survey import RecordedAnswers
    from apcbatch.tuning.text import forecast_lines

    limit = memory_limit(resolved)
    answers = RecordedAnswers()
    occupancy = Occupancy(resolved, options["table"], lambda: answers.mean_tokens(resolved))
    forecaster = of_policies(resolved, {*sizes, resolved.block_size}, occupancy)
    surveyed = survey_with_bar(resolved, found, forecaster, answers if draft_sources(resolved) else None)
    memory = MemoryForecast(surveyed.memory, occupancy.use(surveyed.forecast, surveyed.footprint), limit)
    if options["json_path"] != "-":
        for line in forecast_lines(surveyed, resolved, terminal_width(sys.stdout), memory):
            echo(line)
        for sentence in sentences:
            echo(f"Model: {sentence}")
    if options["json_path"] is not None:
        document = forecast_document(surveyed.forecast, options["table"], resolved, memory)
        write_output("--json", options["json_path"], json_document(document))
