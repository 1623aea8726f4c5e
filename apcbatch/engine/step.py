"""Run one pass: pack chunks into a batch, run the model, and return each sampling sequence's logits and likeliest
token, and the scores of scored prompts."""

from __future__ import annotations

import math
from operator import is_
from struct import Struct
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from apcbatch.engine.pool import PageArray
from apcbatch.engine.sampler import GreedyTokens, greedy
from apcbatch.engine.scoring import score_rows
from apcbatch.engine.sequence import Chunk, Keep, Sequence
from apcbatch.kernels.ragged import Ragged
from apcbatch.layout import PAGE_TOKENS
from apcbatch.model.batch import Batch
from apcbatch.model.causal_lm import CausalLM
from apcbatch.model.host_copies import Fetch
from apcbatch.model.pipeline import Model
from apcbatch.model.pipeline_arena import Arena
from apcbatch.types import Scores


class Row(NamedTuple):
    """Row of a pass's logits: its number, its likeliest token (NOT_FINITE if a logit of the row is NaN or infinite),
    and that token's log-probability (NaN if not requested)."""

    number: int
    likeliest: int
    logprob: float


Known: TypeAlias = tuple[list[int], list[float] | None]  # the result of GreedyTokens.read, already on the host


class Pass:
    """Pass in flight over `chunks`.

    before: pass in flight whose sampled tokens are the input of these chunks; None if the host knows the input. logits:
    (r, vocabulary) float32 once the pass was read, a row for each sampling chunk and one more for each of its drafted
    tokens; on the host if a request needs them, else valid until the next pass begins. scores: those of each chunk that
    has scored tokens; None if one is not finite. States, KV and snapshots are in the arena's slots.
    """

    def __init__(
        self, model: Model, arena: Arena, decodes: DecodeBatches, chunks: list[Chunk], before: Pass | None = None
    ) -> None:
        self.chunks = chunks
        self._arena = arena
        self._due: list[tuple[int, Chunk]] = []  # first row of the logits, and its chunk
        row = 0
        for chunk in chunks:
            if chunk.samples:
                self._due.append((row, chunk))
                row += 1 + len(chunk.draft)
        self._error: Exception | None = None
        try:
            self.logits, hidden, self._choice = run_pass(model, decodes, chunks, before)
            self.scores = self._score(model, hidden)
            needed = any([chunk.sequence.needs_logits for _, chunk in self._due])
            self._logits = Fetch(self.logits) if needed else None
            if isinstance(self._choice, GreedyTokens):
                self._sent = model.send_back(self._choice.tokens)
            self._keeping = [chunk for chunk in chunks if chunk.keep]
            self._finite: list[Fetch] = []
            if self._keeping:
                self._finite = [Fetch(flags) for flags in arena.finite([c.keep[-1].slot for c in self._keeping])]
        except Exception as error:  # a failed pass fails its own requests only
            self._error = error

    @property
    def unread(self) -> tuple[torch.Tensor, dict[Sequence, int]]:
        """Likeliest tokens (rows,) int64 on the first layer's device, and the first row of each sampling sequence."""
        choice = self._choice
        tokens = self._sent.receive() if isinstance(choice, GreedyTokens) else torch.tensor(choice[0])
        return tokens, {chunk.sequence: row for row, chunk in self._due}

    @property
    def failed(self) -> bool:
        """Whether the launch of this pass raised an exception; `read` raises it."""
        return self._error is not None

    def read(self) -> list[tuple[Chunk, list[Row]]]:
        """Wait for the pass. Return each sampling chunk with its rows of logits: the row after its last known token,
        then the row after each drafted one. Raises the exception of a failed pass."""
        if self._error is not None:
            raise self._error
        choice = self._choice
        tokens, logprobs = choice.read() if isinstance(choice, GreedyTokens) else choice
        if self._logits is not None:
            self.logits = self._logits.read()
        if logprobs is None:
            logprobs = [math.nan] * len(tokens)
        rows = list(map(Row, range(len(tokens)), tokens, logprobs))
        return [(chunk, rows[row : row + 1 + len(chunk.draft)]) for row, chunk in self._due]

    def not_finite(self) -> list[Chunk]:
        """Return the chunks that kept a snapshot with NaN or infinity. Call it after `read`. NaN propagates, so
        checking a chunk's last snapshot is enough."""
        if not self._keeping:
            return []
        flags = [part.read().tolist() for part in self._finite]
        wrong = [not all(parts) for parts in zip(*flags, strict=True)]
        return [chunk for chunk, is_wrong in zip(self._keeping, wrong, strict=bool(flags)) if is_wrong]

    def finite_keeps(self, chunk: Chunk) -> list[Keep]:
        """Return the snapshots that a chunk kept within its prompt and whose states are finite. Call it after
        `read`."""
        keeps = [keep for keep in chunk.keep if keep.position <= chunk.sequence.num_prompt]
        flags = [part.tolist() for part in self._arena.finite([keep.slot for keep in keeps])]
        return [keep for keep, *parts in zip(keeps, *flags, strict=True) if all(parts)]

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

    def remove(self, sequence: Sequence) -> list[Chunk]:
        """Remove a sequence that ended before this pass. Return its chunks, at most one."""
        removed = [chunk for chunk in self.chunks if chunk.sequence is sequence]
        self.chunks = [chunk for chunk in self.chunks if chunk.sequence is not sequence]
        self._due = [(row, chunk) for row, chunk in self._due if chunk.sequence is not sequence]
        return removed


def run_pass(
    model: Model, decodes: DecodeBatches, chunks: list[Chunk], before: Pass | None = None
) -> tuple[torch.Tensor, torch.Tensor | None, GreedyTokens | Known]:
    """Run a pass. Return logits (r, vocabulary) float32, as in Pass; normed hidden states (scored tokens, h), None if
    no token is scored; the likeliest tokens. States, KV and snapshots are written to their slots."""
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
    """Return the packed tensors of a pass. before: as in Pass; the batch then refers to rows of its tokens."""
    counts = np.array([chunk.num_rows for chunk in chunks], np.int64)
    begins = np.array([chunk.begin for chunk in chunks], np.int64)
    ends = np.cumsum(counts)
    chosen, tokens = _tokens(chunks, before)
    owner = np.repeat(np.arange(len(chunks)), counts)
    positions = np.arange(ends[-1]) + (begins - ends + counts)[owner]
    page_table = _page_table(chunks)
    slots = page_table[owner, positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
    sampled = [i for i, chunk in enumerate(chunks) if chunk.samples]
    logits_rows = [np.arange(ends[i] - 1 - len(chunks[i].draft), ends[i]) for i in sampled]
    scored = [
        np.arange(len(chunk.scored)) + chunk.scored.start + end - chunk.num_rows - chunk.begin
        for chunk, end in zip(chunks, ends, strict=True)
        if chunk.scored
    ]
    return Batch(
        token_ids=torch.from_numpy(tokens),
        ragged=_ragged(chunks, counts),
        logits_rows=torch.from_numpy(np.concatenate(logits_rows) if sampled else np.empty(0, np.int64)),
        page_table=torch.from_numpy(page_table),
        context=torch.from_numpy(begins),
        token_slots=torch.from_numpy(slots),
        chosen=chosen,
        scored_rows=torch.from_numpy(np.concatenate(scored)) if scored else None,
        with_logprobs=any(chunks[i].sequence.request.logprobs for i in sampled),
        kept_rows=_kept_rows(chunks, ends),
    )


def _kept_rows(chunks: list[Chunk], ends: np.ndarray) -> torch.Tensor | None:
    """Return the rows whose inputs are kept for a replay; None for none. ends: end offset of each chunk's rows."""
    kept = [np.arange(end - chunk.num_rows, end) for chunk, end in zip(chunks, ends, strict=True) if chunk.keeps_inputs]
    return torch.from_numpy(np.concatenate(kept)) if kept else None


def _tokens(chunks: list[Chunk], before: Pass | None) -> tuple[torch.Tensor | None, np.ndarray]:
    """Return (chosen, token_ids) as in Batch. chosen: the unread tokens of the earlier pass; None without one."""
    if before is None:
        parts: list[np.ndarray | list[int]] = []
        for chunk in chunks:
            parts.append(chunk.sequence.tokens[chunk.begin : chunk.begin + chunk.count])
            if chunk.draft:
                parts.append(chunk.draft)
        return None, np.concatenate(parts).astype(np.int64)
    chosen, rows = before.unread
    return chosen, np.array([-1 - rows[chunk.sequence] for chunk in chunks], np.int64)


def _page_table(chunks: list[Chunk]) -> np.ndarray:
    """Return the page numbers of each sequence, padded with 0: (sequences, maximum pages) int64. All are 0 for a model
    without attention."""
    width = max((-(-(chunk.begin + chunk.num_rows) // PAGE_TOKENS) for chunk in chunks), default=0)
    width = max([width, *(len(chunk.sequence.pages) for chunk in chunks)])  # more after a rejected draft
    table = np.zeros((len(chunks), width), np.int64)
    for row, chunk in enumerate(chunks):
        if len(chunk.sequence.pages):
            table[row, : len(chunk.sequence.pages)] = chunk.sequence.pages
    return table


def _ragged(chunks: list[Chunk], counts: np.ndarray) -> Ragged:
    initial = [_initial_slot(chunk) for chunk in chunks]
    kept = [[(keep.position - chunk.begin, keep.slot) for keep in chunk.keep] for chunk in chunks]
    for chunk, own in zip(chunks, kept, strict=True):
        own += enumerate(chunk.draft_slots, chunk.count)
    relative, slots = [position for own in kept for position, _ in own], [slot for own in kept for _, slot in own]
    return Ragged.create(
        cu_seqlens=_offsets(counts),
        initial_slots=_int64(initial),
        final_slots=_int64([-1 if chunk.keeps_inputs else chunk.sequence.slot for chunk in chunks]),
        snapshot_cu=_offsets(np.array([len(own) for own in kept], np.int64)),
        snapshot_positions=_int64(relative),
        snapshot_slots=_int64(slots),
    )


def _initial_slot(chunk: Chunk) -> int:
    """Return the slot of a chunk's initial state: for the first chunk after a restore, the snapshot's slot; otherwise
    the sequence's own slot; -1 (a state of zeros) at position 0."""
    sequence = chunk.sequence
    if sequence.start is not None and chunk.begin == sequence.computed:
        return sequence.start.slot
    return sequence.slot if chunk.begin else -1


def _offsets(counts: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]))


def _int64(values: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(values, np.int64))


def is_decode(chunks: list[Chunk]) -> bool:
    """Return whether each chunk decodes a single token, without drafts, and keeps no snapshot."""
    for chunk in chunks:
        sequence = chunk.sequence
        if chunk.num_rows != 1 or chunk.keep or not sequence.num_prompt <= chunk.begin >= sequence.num_tokens - 1:
            return False
    return True


class DecodeBatches:
    """Builder of decode batches. While the sequences keep their slots and pages, it reuses the tensors of the last
    batch, so a batch is valid until the next one is built."""

    def __init__(self) -> None:
        self._slots: tuple[list[int], list[int]] = [], []
        self._pages: list[PageArray] = []
        self._batch: Batch | None = None

    def batch(self, chunks: list[Chunk]) -> Batch:
        """Return the batch of chunks that `is_decode` accepts, at least one. Their input tokens must be on the
        host."""
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
        """Return a batch with these slots and pages; `batch` fills in the values of each pass."""
        memory = np.zeros((3, len(pages)), np.int64)
        token_ids, context, token_slots = torch.from_numpy(memory).unbind()
        table = np.zeros((len(pages), max(map(len, pages))), np.int64)  # a model without attention has no columns
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
