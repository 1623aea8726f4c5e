"""A first pass whose answer means nothing: what a device sets up at its first pass with prompts, libraries and kernels,
is there when the first request comes.

Must not know: requests of a run. It costs no more than that pass would: half a second, whoever comes first.
"""

from __future__ import annotations

import numpy as np

from apcbatch.engine.decode_batch import DecodeBatches
from apcbatch.engine.runner import Chunk, Pass
from apcbatch.engine.sequence import Sequence
from apcbatch.layout import PAGE_TOKENS
from apcbatch.model.spread import Model
from apcbatch.model.spread_arena import Arena
from apcbatch.types import Request

MOST_TOKENS = 1024


def warm_up(model: Model, arena: Arena, max_batch_tokens: int, num_pages: int | None) -> None:
    """Run it, in slot 0 and in the first pages, while nobody has them. max_batch_tokens: of any pass. num_pages: that
    there are; None for a model without attention. What fails here is left to the passes that follow."""
    count = min(max_batch_tokens, MOST_TOKENS, MOST_TOKENS if num_pages is None else num_pages * PAGE_TOKENS)
    if count < 1:
        return
    request = Request("", [0] * count, max_tokens=1)
    sequence = Sequence(request, np.zeros(count, np.int32), count, count, count + 1, slot=0)
    if num_pages is not None:
        sequence.pages = np.arange(-(-count // PAGE_TOKENS))
    current = Pass(model, arena, DecodeBatches(), [Chunk(sequence, 0, count)])
    if not current.failed:
        current.read()
