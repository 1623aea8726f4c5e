"""Command line. `main` imports the rest only when it is called, so importing this package is fast."""

from __future__ import annotations

import signal


def main() -> int:
    """Run the command line of this process and return its exit code. Afterwards, SIGINT is ignored."""
    code = 130
    try:
        from apcbatch.cli.program import main as run_command_line

        code = run_command_line()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return code
