"""Run `apcbatch`: register the commands, and turn every error into a sentence and an exit code."""

from __future__ import annotations

import io
import sys
import traceback
from collections.abc import Sequence

import click

from apcbatch import config, resolution
from apcbatch.cli.convert import convert
from apcbatch.cli.doctor import doctor
from apcbatch.cli.merge import merge
from apcbatch.cli.options import OrderedGroup
from apcbatch.cli.plan import plan
from apcbatch.cli.report import report
from apcbatch.cli.run import run
from apcbatch.cli.show import show
from apcbatch.cli.store import store
from apcbatch.cli.streams import (
    Invocation,
    check_arguments,
    check_current_folder,
    escape_unencodable,
    flush_output,
    kept_signals,
    say,
    take_standard_descriptors,
)
from apcbatch.cli.tune import tune_block_size
from apcbatch.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_STOPPED, EXIT_USAGE, ApcbatchError
from apcbatch.job.signals import Interrupted
from apcbatch.process import settle_allocator, settle_leaving
from apcbatch.version import VERSION

EPILOG = """\b
Examples:
  apcbatch run chats.jsonl
  apcbatch run chats.jsonl --store ~/states --model ./my-mamba
  apcbatch report answers.jsonl
  apcbatch store stat ~/states
  apcbatch doctor

`apcbatch COMMAND --help` shows a command's options and examples; `apcbatch run -h` the ten to begin with.
"""


@click.group(
    cls=OrderedGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
    epilog=EPILOG,
)
@click.version_option(VERSION, "--version", message="apcbatch %(version)s")
def cli() -> None:
    """Offline batch inference for agentic multi-turn workloads on recurrent and hybrid models.

    Prefixes that requests share are computed once: their states are kept in memory and, with --store, on
    disk.
    """
    check_current_folder()


for command in (run, merge, show, plan, tune_block_size, report, store, doctor, convert):
    cli.add_command(command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; the process's own arguments by default."""
    take_standard_descriptors()
    escape_unencodable()
    settle_allocator()
    invocation = Invocation()
    with kept_signals():
        code = _run(arguments, invocation)
        code = flush_output(code)
        if code not in (EXIT_OK, EXIT_USAGE) and invocation.last_line is not None:
            say(invocation.last_line(code))
    if arguments is None:
        settle_leaving()
    return code


def _run(arguments: Sequence[str] | None, invocation: Invocation) -> int:
    try:
        check_arguments(sys.argv[1:] if arguments is None else arguments)
        result = cli.main(arguments, prog_name="apcbatch", standalone_mode=False, obj=invocation)
        return result if isinstance(result, int) else EXIT_OK
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(shown)
        say(shown.getvalue().rstrip("\n"))
        return EXIT_USAGE
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except Interrupted as error:
        return error.exit_code
    except ApcbatchError as error:
        say(f"apcbatch: {error}")
        return error.exit_code
    except BrokenPipeError:
        return EXIT_STOPPED
    except OSError as error:
        say(f"apcbatch: {error.filename or 'an output'} cannot be used: {error.strerror or error}")
        return EXIT_STOPPED
    except Exception as error:  # a fault of this program: one sentence instead of a traceback
        if resolution.debug_wanted():
            traceback.print_exc()
        say(f"apcbatch: internal error: {error!r}; set {config.ENV_DEBUG}=1 to see where")
        return EXIT_STOPPED
