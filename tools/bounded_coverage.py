"""A plugin of coverage for processes that forbid themselves to write files, as apcbatch/data/helper_child.py does.

The soft limit stands while the process works; the hard one is left as it was, so that the record can be written at the
end. Named in coverage.rc and mutants/cover.rc, and imported by every process that is measured.
"""

from __future__ import annotations

import atexit
import resource
from typing import Any


def coverage_init(registry: Any, options: dict[str, Any]) -> None:
    """Called by coverage as a process begins."""
    set_limit = resource.setrlimit

    def setrlimit(kind: int, limits: tuple[int, int]) -> None:
        if kind == resource.RLIMIT_FSIZE:
            hard = resource.getrlimit(kind)[1]
            limits = (limits[0], hard)
            atexit.register(set_limit, kind, (hard, hard))  # before coverage's own, which came first
        set_limit(kind, limits)

    resource.setrlimit = setrlimit
