"""One pass: packs the chunks of a step into a batch, runs the model, hands back the logits of the sequences that are
due a token.

Must not know: why these chunks were chosen, what becomes of the snapshots.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from apcbatch.engine.sequence import Sequence
from apcbatch.kernels.ragged import Ragged
from apcbatch.layout import PAGE_TOKENS
from apcbatch.model.batch import Batch
from apcbatch.model.causal_lm import CausalLM
from apcbatch.model.graphs import GraphedLM


@dataclass(slots=True)
class Keep:
    """A snapshot to be written by the pass: after `position` tokens of the sequence, into a reserved slot."""

    position: int
    key: bytes
    slot: int


@dataclass(slots=True)
class Chunk:
    """The next `count` tokens of one sequence, and the snapshots to take among them (ascending)."""

    sequence: Sequence
    count: int
    keep: list[Keep] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The position that the sequence has reached after the pass."""
        return self.sequence.computed + self.count

    @property
    def samples(self) -> bool:
        """Whether the pass yields the sequence's next token."""
        return self.end == self.sequence.num_tokens


def run_pass(model: CausalLM | GraphedLM, chunks: list[Chunk]) -> torch.Tensor:
    """Logits (chunks that sample, vocabulary) float32; states, KV and snapshots are in their slots."""
    return model.forward(make_batch(chunks))


def make_batch(chunks: list[Chunk]) -> Batch:
    """The packed tensors of a step."""
    counts = np.array([chunk.count for chunk in chunks], np.int64)
    computed = np.array([chunk.sequence.computed for chunk in chunks], np.int64)
    ends = np.cumsum(counts)
    tokens = np.concatenate([c.sequence.tokens[c.sequence.computed : c.end] for c in chunks]).astype(np.int64)
    owner = np.repeat(np.arange(len(chunks)), counts)
    positions = np.arange(ends[-1]) + (computed - ends + counts)[owner]
    page_table = _page_table(chunks)
    slots = page_table[owner, positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
    rows = ends[[i for i, chunk in enumerate(chunks) if chunk.samples]] - 1
    return Batch(
        token_ids=torch.from_numpy(tokens),
        ragged=_ragged(chunks, counts),
        logits_rows=torch.from_numpy(rows),
        page_table=torch.from_numpy(page_table),
        context=torch.from_numpy(computed),
        token_slots=torch.from_numpy(slots),
    )


def _page_table(chunks: list[Chunk]) -> np.ndarray:
    """(sequences, most pages of any) int64; zeros where a model has no attention."""
    width = max((-(-chunk.end // PAGE_TOKENS) for chunk in chunks), default=0)
    table = np.zeros((len(chunks), width), np.int64)
    for row, chunk in enumerate(chunks):
        if len(chunk.sequence.pages):
            table[row, : len(chunk.sequence.pages)] = chunk.sequence.pages
    return table


def _ragged(chunks: list[Chunk], counts: np.ndarray) -> Ragged:
    initial = [
        c.sequence.start.slot if c.sequence.start else c.sequence.slot if c.sequence.computed else -1
        for c in chunks
    ]
    keeps = [keep for chunk in chunks for keep in chunk.keep]
    relative = [keep.position - chunk.sequence.computed for chunk in chunks for keep in chunk.keep]
    return Ragged.create(
        cu_seqlens=_offsets(counts),
        initial_slots=_int64(initial),
        final_slots=_int64([chunk.sequence.slot for chunk in chunks]),
        snapshot_cu=_offsets(np.array([len(chunk.keep) for chunk in chunks], np.int64)),
        snapshot_positions=_int64(relative),
        snapshot_slots=_int64([keep.slot for keep in keeps]),
    )


def _offsets(counts: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]))


def _int64(values: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(values, np.int64))
