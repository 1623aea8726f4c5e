"""`run --report FILE`: write the report after the run, however it ended.

Invariant: the run's exit code never depends on the report.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from apcbatch.cli.streams import say
from apcbatch.data.input.files import reason
from apcbatch.errors import StoppedError, UsageError
from apcbatch.job.signals import Interrupted, Signals

if TYPE_CHECKING:
    from apcbatch.job.run import Job


def run_with_report(job: Job, path: str, flag: str) -> int:
    """Run the job, then write its report; return the job's exit code. A file that no report may replace is a UsageError
    before the run begins. A job that ends before its first request gets no report. A second signal ends the process at
    once."""
    from apcbatch.report.report_file import check_report

    check_report(flag, path)
    try:
        code = job.run()
    except StoppedError:
        _write(job, path, flag)
        raise
    _write(job, path, flag)
    return code


def _write(job: Job, path: str, flag: str) -> None:
    """Write the report, or print why it is not written. A signal ends only the report; the run's output is complete."""
    from apcbatch.report.document import make_document
    from apcbatch.report.out_file import find_out
    from apcbatch.report.report_file import check_report, shown_bytes, write_report

    try:
        with Signals(job.continue_command):
            check_report(flag, path)  # again: another program may have written to it during the run
            size = write_report(path, make_document([find_out(job.output)]))
    except Interrupted:
        say(f"warning: the report {path} was not written: it was interrupted")
    except UsageError as error:
        say(f"warning: {error}")
    except Exception as error:  # the answers are written, so the exit code stays the job's
        say(f"warning: the report {path} was not written: {reason(error)}")
    else:
        say(f"report: {path} ({shown_bytes(size)})")
