"""The command line. `main` is imported when it is called, so that importing this package costs nothing."""

from __future__ import annotations

import signal


def main() -> int:
    """Run the process's command line and return its exit code; after it a signal changes nothing any more."""
    code = 130
    try:
        from apcbatch.cli.program import main as run_command_line

        code = run_command_line()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return code
