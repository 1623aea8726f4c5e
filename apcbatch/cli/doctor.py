"""`apcbatch doctor`: check that everything a run needs is there."""

from __future__ import annotations

from typing import Any

import click

from apcbatch import resolution
from apcbatch.cli.options import GroupedCommand, config_options, given_flags
from apcbatch.cli.terminal import echo_row
from apcbatch.errors import EXIT_OK, EXIT_STOPPED

EPILOG = """\b
Examples:
  apcbatch doctor
  apcbatch doctor --model ./my-mamba --max-running 64
  apcbatch doctor --store ~/states
  apcbatch doctor --model ./my-jamba --gpus 2
  apcbatch doctor --tools my_tools:Shop
"""


@click.command(cls=GroupedCommand, epilog=EPILOG, short_help="Check Python, torch, kernels, model and store.")
@config_options(
    ("model", "adapter", "dtype", "weights", "device", "gpus", "store", "pool_size", "max_running", "template_date")
    + ("tools",)
)
@click.pass_context
def doctor(ctx: click.Context, /, **options: Any) -> int:
    """Check Python, torch, the compiled kernels, the model, its memory and chat template, and the store: one line each.

    A line that fails ends with the fix, and the exit status is 1. WARN is what spoils most runs and fails none,
    such as a model without a chat template.
    """
    resolved = resolution.load(given_flags(ctx), None)
    from apcbatch.job.doctor import examine

    failed = False
    for finding in examine(resolved):
        verdict = "WARN" if finding.is_warning else "ok" if finding.ok else "FAIL"
        echo_row(f"{verdict:<5} {finding.name:<10} {finding.text}", 17, verdict)
        failed |= not finding.ok
    return EXIT_STOPPED if failed else EXIT_OK
