"""The bounds of a grammar: where it is tried for the first time, and where answers are held to it.

Must not know: the library, processes.
"""

from __future__ import annotations

from typing import Any

CPU_SECONDS = 2  # of one grammar
MEMORY_BYTES = 1 << 30  # of addresses, Python itself included
STACK_BYTES = 4 << 20  # half of what the run's own thread has

# What the library counts, so that one token of one answer, and what an answer has kept, are bounded: the same work for
# the same grammar and tokens, whatever else runs. The lexer's states take 1 to 2 KB each.
LIMITS: dict[str, Any] = {
    "max_lexer_states": 20_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "verbose_errors": False,
}
