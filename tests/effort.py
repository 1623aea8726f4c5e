"""How much each property test tries: `pytest --effort N`, 1 in `make test` and 10 in `make test-all`."""

from __future__ import annotations

import os

VARIABLE = "TEST_EFFORT"  # set by tests/conftest.py before any test is collected, and inherited by child processes


def tries(full: int) -> int:
    """How many draws to try: `full` of them at effort 10, in proportion below (at least one) and above."""
    return max(1, full * int(os.environ.get(VARIABLE, "1")) // 10)
