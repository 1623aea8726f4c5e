"""`apcbatch`: the commands, and the one place where errors become sentences and exit codes."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence

import click

from apcbatch import config
from apcbatch.cli.bench import bench
from apcbatch.cli.doctor import doctor
from apcbatch.cli.options import OrderedGroup
from apcbatch.cli.plan import plan
from apcbatch.cli.run import run
from apcbatch.cli.session import Session
from apcbatch.cli.store import store
from apcbatch.cli.tune import tune_block_size
from apcbatch.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_STOPPED, EXIT_USAGE, ApcbatchError
from apcbatch.job.signals import Interrupted
from apcbatch.process import settle_allocator
from apcbatch.version import VERSION

EPILOG = """\b
Examples:
  apcbatch run chats.jsonl -o answers.jsonl
  apcbatch run chats.jsonl -o answers.jsonl --store ~/states --model ./my-mamba
  apcbatch store stat ~/states
  apcbatch doctor

`apcbatch COMMAND -h` shows a command's options and examples.
"""


@click.group(
    cls=OrderedGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EPILOG,
)
@click.version_option(VERSION, "--version", message="apcbatch %(version)s")
def cli() -> None:
    """Offline batch inference for agentic multi-turn workloads on Mamba and Jamba models.

    Prefixes that requests share are computed once: their states are kept in memory and, with --store, on
    disk.
    """


for command in (run, plan, tune_block_size, store, doctor, bench):
    cli.add_command(command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; the process's own arguments by default."""
    settle_allocator()
    session = Session()
    code = _run(arguments, session)
    if code not in (EXIT_OK, EXIT_USAGE) and session.continue_command is not None:
        _say(session.continue_command())
    return code


def _run(arguments: Sequence[str] | None, session: Session) -> int:
    try:
        result = cli.main(arguments, prog_name="apcbatch", standalone_mode=False, obj=session)
        return result if isinstance(result, int) else EXIT_OK
    except click.ClickException as error:
        error.show()
        return EXIT_USAGE
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except Interrupted as error:
        return error.exit_code
    except ApcbatchError as error:
        _say(f"apcbatch: {error}")
        return error.exit_code
    except BrokenPipeError:
        return EXIT_STOPPED
    except Exception as error:  # the one place around main
        if config.debug_wanted():
            traceback.print_exc()
        _say(f"apcbatch: internal error: {error!r}; set {config.ENV_DEBUG}=1 to see where")
        return EXIT_STOPPED


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)
