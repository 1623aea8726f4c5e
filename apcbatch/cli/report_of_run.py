"""`run --report FILE`: the page of a run that has just ended, however it ended.

Must not know: options. Invariant: the run's exit code is its own, whatever becomes of the page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from apcbatch.cli.streams import say
from apcbatch.data.files import reason
from apcbatch.errors import StoppedError, UsageError
from apcbatch.job.signals import Interrupted, Signals

if TYPE_CHECKING:
    from apcbatch.job.run import Job


def run_with_report(job: Job, path: str, flag: str) -> int:
    """Do the job, then write its page; the job's exit code. UsageError for a path that no page may replace, before any
    work. A job that ends before its first request leaves no page; a second signal ends the process at once."""
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
    """Write the page, or say why it is not written. A signal leaves it, and not what the run has made."""
    from apcbatch.report.document import make_document
    from apcbatch.report.out_file import find_out
    from apcbatch.report.report_file import check_report, shown_bytes, write_report

    try:
        with Signals(job.continue_command):
            check_report(flag, path)  # another program may have written there meanwhile
            size = write_report(path, make_document([find_out(job.output)]))
    except Interrupted:
        say(f"warning: the report {path} was not written: it was interrupted")
    except UsageError as error:
        say(f"warning: {error}")
    except Exception as error:  # the answers are safe, and the exit code is theirs
        say(f"warning: the report {path} was not written: {reason(error)}")
    else:
        say(f"report: {path} ({shown_bytes(size)})")
