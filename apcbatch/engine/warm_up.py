"""A first pass whose answer means nothing: afterwards a device has the kernels of a pass with prompts, and memory for
any that comes.

Must not know: requests of a run. It is as large as a pass may be, so that later ones find their memory in its place
and ask the device for none.
"""

from __future__ import annotations

import numpy as np

from apcbatch.engine.runner import Chunk, Pass
from apcbatch.engine.sequence import Sequence
from apcbatch.layout import PAGE_TOKENS
from apcbatch.model.causal_lm import CausalLM
from apcbatch.model.graphs import GraphedLM
from apcbatch.types import Request

MOST_TOKENS = 8192


def warm_up(model: CausalLM | GraphedLM, max_batch_tokens: int, num_pages: int | None) -> None:
    """Run it, in slot 0 and in the first pages, while nobody has them. num_pages: that there are; None for a model
    without attention. What fails here is left to the passes that follow."""
    count = min(max_batch_tokens, MOST_TOKENS, MOST_TOKENS if num_pages is None else num_pages * PAGE_TOKENS)
    if count < 1:
        return
    request = Request("", [0] * count, max_tokens=1)
    sequence = Sequence(request, np.zeros(count, np.int32), count, count, count + 1, slot=0)
    if num_pages is not None:
        sequence.pages = np.arange(-(-count // PAGE_TOKENS))
    current = Pass(model, [Chunk(sequence, 0, count)])
    if not current.failed:
        current.read()
