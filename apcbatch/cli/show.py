"""`apcbatch show`: print one request as a run would make it, without computing anything."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from apcbatch import resolution
from apcbatch.cli.options import (
    ANYWHERE,
    Count,
    GroupedCommand,
    GroupedOption,
    config_file_option,
    config_options,
    given_flags,
)
from apcbatch.cli.terminal import echo, echo_json, json_document, terminal_width, warn
from apcbatch.config import OPTIONS
from apcbatch.errors import EXIT_OK, EXIT_REQUEST_ERRORS, UsageError

# OPTION_NAMES: the options that affect a request or its reuse.
NOT_OF_ONE_REQUEST = {"threads", "device", "gpus", "exact", "window_tokens", "score", "cache_salt"}
OPTION_NAMES = [
    name
    for name, spec in OPTIONS.items()
    if (spec.group in ("Model", "Input", "Generation", "Chat", "Reuse") and name not in NOT_OF_ONE_REQUEST)
    or name == "tools"
]

EPILOG = """\b
Examples:
  apcbatch show chats.jsonl
  apcbatch show chats.jsonl --line 12 --turn 3
  apcbatch show chats.jsonl --id 'c-7#3'
  apcbatch show requests.jsonl --line 40 --model ./my-mamba --block-size 256
  apcbatch show chats.jsonl --line 12 --json | jq '.shared'
  apcbatch show episodes.jsonl --episode task-7
"""


@click.command(cls=GroupedCommand, epilog=EPILOG, short_help="Look at one request of INPUT, without weights.")
@click.argument("inputs", metavar="INPUT...", type=ANYWHERE, nargs=-1, required=True)
@click.option(
    "--line", metavar="N", type=Count(min=1), cls=GroupedOption, group="Request",
    help="The line of INPUT, counted from 1; the first one that is not blank by default.",
)  # fmt: skip
@click.option(
    "--id", metavar="ID", cls=GroupedOption, group="Request",
    help="The line with this id, in place of --line; also a custom_id of OUT, ID#TURN.",
)  # fmt: skip
@click.option(
    "--turn", metavar="K", type=Count(min=1), cls=GroupedOption, group="Request",
    help="The assistant's turn, counted from 1; the last one of the line by default.",
)  # fmt: skip
@click.option(
    "--episode", metavar="ID", cls=GroupedOption, group="Request",
    help="Print the transcript of this live episode; INPUT is then an OUT.",
)  # fmt: skip
@config_options(OPTION_NAMES)
@click.option("--json", "as_json", is_flag=True, cls=GroupedOption, group="Output", help="Print one JSON object.")
@config_file_option
@click.pass_context
def show(ctx: click.Context, /, inputs: tuple[str, ...], **options: Any) -> int:
    """Look at one request of INPUT as `run` would make it, without weights.

    Prints the rendered prompt; its tokens with the boundaries of --block-size between them, and what the
    policy keeps; what it shares with earlier requests; its settings and where each comes from; and every
    reason for which it would be refused. INPUT is read up to the line alone, so a plan that knows later
    lines may keep more. Characters that a terminal would act on are shown as escapes.

    Exit status: 0 the request can be answered, 3 it would be an error record, 2 usage or no such line.
    """
    if options["episode"] is not None:
        for name in ("line", "id", "turn"):
            if options[name] is not None:
                raise UsageError(f"--episode prints every turn of an episode in OUT; leave --{name} out")
        return _show_episode(inputs, options["episode"], options["as_json"])
    resolved = resolution.load(given_flags(ctx), options["config_file"])
    from apcbatch.cli.inspection_text import inspection_lines
    from apcbatch.data.input.inputs import find_inputs
    from apcbatch.display import Paint
    from apcbatch.job.inspection import inspect
    from apcbatch.model.adapter import about_weights
    from apcbatch.model.locate import locate_model

    if options["line"] is not None and options["id"] is not None:
        raise UsageError("--line and --id exclude each other; give one of them")
    sentences = list(about_weights(locate_model(resolved.model), resolved))
    found = inspect(resolved, find_inputs(inputs, warn), options["line"], options["turn"], warn, options["id"])
    if options["as_json"]:
        echo_json(json_document(found.document()))
    else:
        for line in inspection_lines(found, terminal_width(sys.stdout), Paint(sys.stdout, resolution.colour_wanted())):
            click.echo(line, color=True)
        for sentence in sentences:
            echo(f"Model: {sentence}")
    return EXIT_REQUEST_ERRORS if found.error_code is not None else EXIT_OK


def _show_episode(outs: tuple[str, ...], name: str, as_json: bool) -> int:
    """Print what an OUT has of a live episode."""
    from apcbatch.job.live import read_episode
    from apcbatch.job.out_file import find_out

    if len(outs) != 1:
        raise UsageError("--episode reads one OUT; give that alone")
    try:
        messages, last = read_episode(name, (line for _, line in find_out(outs[0]).read()))
        ours, error, line = last["apcbatch"], last["error"], last["line"]
        is_whole = error is not None and bool(messages)
        lines = [] if is_whole else [f"line {line} of INPUT has the messages before these"]
        for message in messages:
            lines.append(f"{message['role']}: {message.get('content') or ''}".rstrip())
            calls = [call["function"] for call in message.get("tool_calls") or ()]
            lines += [f"  calls {call['name']}({call['arguments']})" for call in calls]
    except (AttributeError, LookupError, TypeError):
        raise UsageError(f"the records of episode {name!r} are not as this program writes them") from None
    end, score = ours.get("end"), ours.get("score")
    if as_json:
        echo_json(json_document({"episode": name, "line": line, "messages": messages, "end": end, "score": score}))
        return EXIT_OK
    lines.append(f"ended: {end}" if end is not None else "not finished")
    lines += [f"score: {json.dumps(score)}"] if score else []
    lines += [f"{error['code']}: {error['message']}"] if error is not None else []
    for one in lines:
        echo(one)
    return EXIT_OK
