"""The packed batch of a decode pass: one known token of each sequence, no snapshots, the logits of all.

Must not know: why these chunks were chosen, models. It says what `make_batch` says of such chunks, in a fraction of the
time: a decode pass of a small model takes a few milliseconds, and what the host does before it was last done a pass
ago, so that none of it is in the processor's caches.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from operator import is_
from struct import Struct
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
    for chunk in chunks:
        sequence = chunk.sequence
        if chunk.count != 1 or chunk.keep or not sequence.num_prompt <= chunk.begin >= sequence.num_tokens - 1:
            return False
    return True


class DecodeBatches:
    """Makes the batches of decode passes. As long as the sequences have the slots and pages that they had in the last
    one, its tensors are taken again, with other numbers in them: so a batch holds until the next one is made."""

    def __init__(self) -> None:
        self._slots: tuple[list[int], list[int]] = [], []
        self._pages: list[PageArray] = []
        self._batch: Batch | None = None

    def batch(self, chunks: Several[Chunk]) -> Batch:
        """The batch of chunks that `is_decode` takes, at least one, whose tokens are all known."""
        sequences = [chunk.sequence for chunk in chunks]
        begins = [chunk.begin for chunk in chunks]
        slots = [one.start.slot if one.start else one.slot for one in sequences], [one.slot for one in sequences]
        pages = [one.pages for one in sequences]
        with_logprobs = any([one.request.logprobs for one in sequences])
        batch = self._batch
        if (
            batch is None
            or slots != self._slots
            or not all(map(is_, pages, self._pages))
            or batch.with_logprobs != with_logprobs
        ):
            batch = self._begin(slots, pages, with_logprobs)
        tokens = [one.tokens[begin] for one, begin in zip(sequences, begins, strict=True)]
        places = begins
        if len(pages[0]):
            places = [
                own[begin // PAGE_TOKENS] * PAGE_TOKENS + begin % PAGE_TOKENS
                for own, begin in zip(pages, begins, strict=True)
            ]
        self._numbers.pack_into(self._memory, 0, *tokens, *begins, *places)
        return batch

    def _begin(self, slots: tuple[list[int], list[int]], pages: list[PageArray], with_logprobs: bool) -> Batch:
        """A batch of sequences that have these slots and pages; the numbers that every pass changes are yet to come."""
        memory = np.zeros((3, len(pages)), np.int64)
        token_ids, context, token_slots = torch.from_numpy(memory).unbind()
        table = np.zeros((len(pages), max(map(len, pages))), np.int64)  # no columns for a model without attention
        for row, own in zip(table, pages, strict=True):
            row[: len(own)] = own
        batch = Batch(
            token_ids=token_ids,
            ragged=Ragged.of_decode(*slots),
            logits_rows=Ragged.rows(len(pages)),
            page_table=torch.from_numpy(table),
            context=context,
            token_slots=token_slots,
            with_logprobs=with_logprobs,
        )
        self._batch, self._slots, self._pages = batch, slots, pages
        self._memory, self._numbers = memory.data, Struct(f"{memory.size}q")
        return batch
