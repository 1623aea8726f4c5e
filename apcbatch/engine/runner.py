"""One pass: packs the chunks of a step into a batch, runs the model, and hands back the logits of the sequences that
are due a token, the likeliest token of each, and what the model says of the prompts that are scored.

Must not know: why these chunks were chosen, what becomes of the snapshots.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch

from apcbatch.engine.decode_batch import DecodeBatches, is_decode
from apcbatch.engine.sampler import Choice, greedy
from apcbatch.engine.scoring import score_rows
from apcbatch.engine.sequence import Sequence
from apcbatch.kernels.ragged import Ragged
from apcbatch.layout import PAGE_TOKENS
from apcbatch.model.batch import Batch
from apcbatch.model.causal_lm import CausalLM
from apcbatch.model.fetch import Fetch
from apcbatch.model.spread import Model
from apcbatch.model.spread_arena import Arena
from apcbatch.types import Scores

Known: TypeAlias = tuple[list[int], list[float] | None]  # what a Choice gives, where it is there at once


@dataclass(slots=True)
class Keep:
    """A snapshot to be written by the pass: after `position` tokens of the sequence, into a reserved slot."""

    position: int
    key: bytes
    slot: int


@dataclass(slots=True, eq=False)
class Chunk:
    """`count` tokens of one sequence from position `begin` on, and the snapshots to take among them (ascending)."""

    sequence: Sequence
    begin: int
    count: int
    keep: list[Keep] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The position that the sequence has reached after the pass."""
        return self.begin + self.count

    @property
    def samples(self) -> bool:
        """Whether the pass yields the sequence's next token."""
        return self.end >= self.sequence.num_tokens and self.sequence.limit > self.sequence.num_prompt

    @property
    def scored(self) -> range:
        """The positions of the chunk after which a token of the prompt comes that is scored."""
        sequence = self.sequence
        if sequence.scores is None:
            return range(0)
        return range(max(self.begin, sequence.score_begin), min(self.end, sequence.num_prompt - 1))


class Pass:
    """A pass that was begun: what the model computes from `chunks` may still be on its way.

    before: the pass whose last tokens are the chunks' own and were not read when this one began. logits: (chunks that
    sample, vocabulary) float32 once the pass was read; on the host where a request needs them, else until the next pass
    begins. States, KV and snapshots are in the arena's slots.
    """

    def __init__(
        self, model: Model, arena: Arena, decodes: DecodeBatches, chunks: list[Chunk], before: Pass | None = None
    ) -> None:
        self.chunks = chunks
        self._arena = arena
        self._due = list(enumerate([chunk for chunk in chunks if chunk.samples]))
        self._error: Exception | None = None
        try:
            self.logits, hidden, self._choice = run_pass(model, decodes, chunks, before)
            self._scores = self._score(model, hidden)
            needed = any([chunk.sequence.needs_logits for _, chunk in self._due])
            self._logits = Fetch(self.logits) if needed else None
            if isinstance(self._choice, Choice):
                self._sent = model.send_back(self._choice.tokens)
            self._keeping = [chunk for chunk in chunks if chunk.keep]
            self._finite: list[Fetch] = []
            if self._keeping:
                self._finite = [Fetch(flags) for flags in arena.finite([c.keep[-1].slot for c in self._keeping])]
        except Exception as error:  # the one place around requests: a failed pass costs its own requests only
            self._error = error

    @property
    def unread(self) -> tuple[torch.Tensor, dict[Sequence, int]]:
        """The tokens (rows,) int64 where the model begins, and the row of each sequence."""
        choice = self._choice
        tokens = self._sent.receive() if isinstance(choice, Choice) else torch.tensor(choice[0])
        return tokens, {chunk.sequence: row for row, chunk in self._due}

    @property
    def failed(self) -> bool:
        """Whether it was not even begun; `read` says why."""
        return self._error is not None

    def read(self) -> list[tuple[Chunk, int, int, float]]:
        """Wait for the pass: each chunk that samples, its row of the logits, the likeliest token and its
        log-probability, NaN if nobody asked for any. Raises what the pass raised."""
        if self._error is not None:
            raise self._error
        choice = self._choice
        tokens, logprobs = choice.read() if isinstance(choice, Choice) else choice
        if self._logits is not None:
            self.logits = self._logits.read()
        return [(chunk, row, tokens[row], logprobs[row] if logprobs else math.nan) for row, chunk in self._due]

    def not_finite(self) -> list[Chunk]:
        """The chunks that keep a state which is not finite, once the pass was read. What is not finite stays so: the
        last state of a chunk tells for all of them."""
        if not self._keeping:
            return []
        flags = [part.read().tolist() for part in self._finite]
        wrong = [not all(parts) for parts in zip(*flags, strict=True)]
        return [chunk for chunk, is_wrong in zip(self._keeping, wrong, strict=bool(flags)) if is_wrong]

    def sound(self, chunk: Chunk) -> list[Keep]:
        """The snapshots of a chunk's prompt whose states are finite, once the pass was read."""
        keeps = [keep for keep in chunk.keep if keep.position <= chunk.sequence.num_prompt]
        flags = [part.tolist() for part in self._arena.finite([keep.slot for keep in keeps])]
        return [keep for keep, *parts in zip(keeps, *flags, strict=True) if all(parts)]

    def scores(self) -> list[tuple[Chunk, Scores | None]]:
        """Each chunk with scored tokens, and their scores; None where numbers are not finite."""
        return self._scores

    def _score(self, model: Model, hidden: torch.Tensor | None) -> list[tuple[Chunk, Scores | None]]:
        if hidden is None:
            return []
        found, row = [], 0
        for chunk in self.chunks:
            scored, sequence = chunk.scored, chunk.sequence
            if scored:
                targets = sequence.tokens[scored.start + 1 : scored.stop + 1]
                rows = hidden[row : row + len(scored)]
                found.append((chunk, score_rows(model, rows, targets, scored.start + 1, sequence.request.score_top)))
                row += len(scored)
        return found

    def leave_out(self, sequence: Sequence) -> list[Chunk]:
        """The sequence has ended before this pass: what was computed for it means nothing. Returns its chunk, if there
        is one."""
        left_out = [chunk for chunk in self.chunks if chunk.sequence is sequence]
        self.chunks = [chunk for chunk in self.chunks if chunk.sequence is not sequence]
        self._due = [(row, chunk) for row, chunk in self._due if chunk.sequence is not sequence]
        return left_out


def run_pass(
    model: Model, decodes: DecodeBatches, chunks: list[Chunk], before: Pass | None = None
) -> tuple[torch.Tensor, torch.Tensor | None, Choice | Known]:
    """Logits (chunks that sample, vocabulary) float32, what the head makes the logits of scored tokens from: (tokens,
    hidden), None where nothing is scored, and the likeliest tokens. States, KV and snapshots are in their slots."""
    batch = decodes.batch(chunks) if before is None and is_decode(chunks) else make_batch(chunks, before)
    if isinstance(model, CausalLM) and model.runs_whole:
        passed = model.passed(batch)
        return passed.logits, passed.hidden, (passed.likeliest, passed.logprobs)
    hidden = None
    if batch.scored_rows is None:
        logits = model.forward(batch)
    else:
        logits, hidden = model.forward_scored(batch)
    return logits, hidden, greedy(model.backend, logits, batch.with_logprobs)


def make_batch(chunks: list[Chunk], before: Pass | None = None) -> Batch:
    """The packed tensors of a step; a token that is not known yet is one that the pass before chooses."""
    counts = np.array([chunk.count for chunk in chunks], np.int64)
    begins = np.array([chunk.begin for chunk in chunks], np.int64)
    ends = np.cumsum(counts)
    chosen, tokens = _tokens(chunks, before)
    owner = np.repeat(np.arange(len(chunks)), counts)
    positions = np.arange(ends[-1]) + (begins - ends + counts)[owner]
    page_table = _page_table(chunks)
    slots = page_table[owner, positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
    sampled = [i for i, chunk in enumerate(chunks) if chunk.samples]
    scored = [
        np.arange(len(chunk.scored)) + chunk.scored.start + end - chunk.end
        for chunk, end in zip(chunks, ends, strict=True)
        if chunk.scored
    ]
    return Batch(
        token_ids=torch.from_numpy(tokens),
        ragged=_ragged(chunks, counts),
        logits_rows=torch.from_numpy(ends[sampled] - 1),
        page_table=torch.from_numpy(page_table),
        context=torch.from_numpy(begins),
        token_slots=torch.from_numpy(slots),
        chosen=chosen,
        scored_rows=torch.from_numpy(np.concatenate(scored)) if scored else None,
        with_logprobs=any(chunks[i].sequence.request.logprobs for i in sampled),
    )


def _tokens(chunks: list[Chunk], before: Pass | None) -> tuple[torch.Tensor | None, np.ndarray]:
    """(what the pass before chooses, the tokens as Batch has them)."""
    if before is None:
        known = [chunk.sequence.tokens[chunk.begin : chunk.end] for chunk in chunks]
        return None, np.concatenate(known).astype(np.int64)
    chosen, rows = before.unread
    return chosen, np.array([-1 - rows[chunk.sequence] for chunk in chunks], np.int64)


def _page_table(chunks: list[Chunk]) -> np.ndarray:
    """(sequences, most pages of any) int64; all zeros for a model without attention."""
    width = max((-(-chunk.end // PAGE_TOKENS) for chunk in chunks), default=0)
    table = np.zeros((len(chunks), width), np.int64)
    for row, chunk in enumerate(chunks):
        if len(chunk.sequence.pages):
            table[row, : len(chunk.sequence.pages)] = chunk.sequence.pages
    return table


def _ragged(chunks: list[Chunk], counts: np.ndarray) -> Ragged:
    initial = [_initial_slot(chunk) for chunk in chunks]
    keeps = [keep for chunk in chunks for keep in chunk.keep]
    relative = [keep.position - chunk.begin for chunk in chunks for keep in chunk.keep]
    return Ragged.create(
        cu_seqlens=_offsets(counts),
        initial_slots=_int64(initial),
        final_slots=_int64([chunk.sequence.slot for chunk in chunks]),
        snapshot_cu=_offsets(np.array([len(chunk.keep) for chunk in chunks], np.int64)),
        snapshot_positions=_int64(relative),
        snapshot_slots=_int64([keep.slot for keep in keeps]),
    )


def _initial_slot(chunk: Chunk) -> int:
    """Where the state is that a chunk begins with, -1 for zeros: what its sequence starts from, until a pass has it in
    its own slot, which may not have been read."""
    sequence = chunk.sequence
    if sequence.start is not None and chunk.begin == sequence.computed:
        return sequence.start.slot
    return sequence.slot if chunk.begin else -1


def _offsets(counts: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]))


def _int64(values: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(values, np.int64))
