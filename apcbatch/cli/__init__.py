"""Command line. `main` imports the rest when it is called, so importing this package costs nothing."""

from __future__ import annotations

import signal


def main() -> int:
    """Run the command line of this process and return its exit code. Afterwards, signals are ignored."""
    code = 130
    try:
        from apcbatch.cli.program import main as run_command_line

        code = run_command_line()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return code
