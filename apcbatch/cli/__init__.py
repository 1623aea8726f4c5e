"""The command line. `main` is imported when it is called, so that importing this package costs nothing."""

from __future__ import annotations


def main() -> int:
    """Run the process's command line and return its exit code."""
    from apcbatch.cli.program import main as run_command_line

    return run_command_line()
