"""The packed batch of a decode pass: one known token of each sequence, no snapshots, the logits of all.

Must not know: why these chunks were chosen, models. It says what `make_batch` says of such chunks, in a fraction of the
time: a decode pass of a small model takes a few milliseconds, and the lists are short.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import TYPE_CHECKING

import numpy as np
import torch

from apcbatch.engine.pages import PageArray
from apcbatch.kernels.ragged import Ragged
from apcbatch.layout import PAGE_TOKENS
from apcbatch.model.batch import Batch

if TYPE_CHECKING:
    from apcbatch.engine.runner import Chunk


def is_decode(chunks: Several[Chunk]) -> bool:
    """Whether each chunk is the one token that was chosen last, and keeps no snapshot."""
    return all(
        chunk.count == 1 and not chunk.keep and chunk.begin >= chunk.sequence.num_prompt and chunk.samples
        for chunk in chunks
    )


def decode_batch(chunks: Several[Chunk]) -> Batch:
    """The batch of chunks that `is_decode` takes, whose tokens are all known."""
    sequences = [chunk.sequence for chunk in chunks]
    begins = [chunk.begin for chunk in chunks]
    final = [sequence.slot for sequence in sequences]
    initial = [sequence.start.slot if sequence.start else sequence.slot for sequence in sequences]
    tokens = [sequence.tokens[begin] for sequence, begin in zip(sequences, begins, strict=True)]
    page_table, places = _pages([sequence.pages for sequence in sequences], begins)
    numbers = torch.from_numpy(np.array([*tokens, *initial, *final, *begins, *places], np.int64))
    token_ids, initial_slots, final_slots, context, token_slots = numbers.view(5, len(chunks)).unbind()
    return Batch(
        token_ids=token_ids,
        ragged=Ragged.of_decode(initial_slots, final_slots, initial, final),
        logits_rows=Ragged.rows(len(chunks)),
        page_table=page_table,
        context=context,
        token_slots=token_slots,
    )


def _pages(pages: list[PageArray], begins: list[int]) -> tuple[torch.Tensor, list[int]]:
    """(the page table, where each token's keys and values go); no columns for a model without attention."""
    if not len(pages[0]):
        return torch.empty((len(pages), 0), dtype=torch.int64), begins
    table = np.zeros((len(pages), max(map(len, pages))), np.int64)
    places = []
    for row, own, begin in zip(table, pages, begins, strict=True):
        row[: len(own)] = own
        places.append(own[begin // PAGE_TOKENS] * PAGE_TOKENS + begin % PAGE_TOKENS)
    return torch.from_numpy(table), places
