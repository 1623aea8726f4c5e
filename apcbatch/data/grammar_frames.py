"""What the process that tries grammars and its parent say to each other, and the bounds that both keep to.

Must not know: the library, processes. A request is a length and `marshal` data from the parent: first the number of
tokens and the names of the special ones, then formats and texts. An answer, one per request, is a letter, a length and
UTF-8.
"""

from __future__ import annotations

import struct
from typing import Any

CPU_SECONDS = 2  # of one grammar
MEMORY_BYTES = 1 << 30  # of addresses, Python itself included
STACK_BYTES = 4 << 20  # half of what the run's own thread has
REASON_CHARACTERS = 500

# What the library counts, so that one token of one answer, and what an answer has kept, are bounded: the same work for
# the same grammar and tokens, whatever else runs. The lexer's states take 1 to 2 KB each.
LIMITS: dict[str, Any] = {
    "max_lexer_states": 20_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "verbose_errors": False,
}

REQUEST_HEAD, ANSWER_HEAD = struct.Struct("<Q"), struct.Struct("<cI")
# What an answer's letter says of its text: the grammar as the library reads it; why it cannot be used.
DONE, REFUSED = b"d", b"r"
