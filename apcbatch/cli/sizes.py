"""Lists of block sizes in a command line: `1,64,544`.

Must not know: which commands take them.
"""

from __future__ import annotations

from apcbatch.config import MOST_TOKENS
from apcbatch.errors import UsageError
from apcbatch.tuning.grids import BLOCK_SIZES
from apcbatch.values import brief

USUAL_SIZES = ",".join(map(str, BLOCK_SIZES))


def read_block_sizes(flag: str, text: str, example: str) -> list[int]:
    """The sizes that a flag lists, in tokens; UsageError with the example if they are no such list."""
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = [0]
    if not 1 <= min(sizes) <= max(sizes) <= MOST_TOKENS:
        raise UsageError(f"{flag} is {brief(text)}; expected integers from 1 with commas between, such as {example}")
    return sizes
