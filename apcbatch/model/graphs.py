"""A model on a CUDA device: decode passes are replayed as CUDA graphs, others are launched op by op.

A graph is captured on first use for each shape: (sequences, pages per sequence) of a decode pass, and (rows, sequences,
pages per sequence) of a pass that verifies drafts. The sizes are rounded up; a smaller batch is padded with sequences
that read and write no state and no page.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any

import numpy as np
import torch

from apcbatch.kernels.cuda.batch import MOST_CAPTURED, DeviceBatch, batch_on
from apcbatch.kernels.cuda.extension import own_stream
from apcbatch.kernels.ragged import Ragged
from apcbatch.model.batch import Batch
from apcbatch.model.causal_lm import CausalLM
from apcbatch.model.peer_transfer import Sent

NARROWEST_TABLE = 16  # pages per sequence, for models with attention
# Rows of a captured pass with drafts, and the eighths of them that may be sequences: few shapes, since a capture takes
# as long as several passes.
DRAFT_ROWS = (4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
DRAFT_EIGHTHS = (1, 3, 5, 7)
LARGEST_TABLE = 1 << 16  # maximum entries of a captured page table: attention's workspace grows with them
_CAPTURE = Lock()  # torch supports one capture at a time in a process


class GraphedLM:
    """CausalLM on a CUDA device: `forward(batch)` is CausalLM's, for batches made on the host. The next call overwrites
    the logits; work queued on the same stream before that call still reads them unchanged. passes: maximum queued
    replays of a graph whose inputs are not yet copied to the device; the host waits before it queues another."""

    def __init__(self, model: CausalLM, device: torch.device, passes: int = 1) -> None:
        self.fingerprint, self.backend = model.fingerprint, model.backend
        self.numerics, self.weights_digest = model.numerics, model.weights_digest
        self._model, self._device, self._passes = model, device, passes
        self._has_pages = model.has_pages
        self._graphs: dict[tuple[int, int, int], _Graph] = {}  # by rows, sequences, pages of each sequence
        self._memory: Any = None  # shared by all graphs: only one runs at a time
        self._logits: torch.Tensor | None = None  # shared by all graphs of as many rows or fewer

    @torch.inference_mode()
    def forward(self, batch: Batch, entering: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits (rows, vocabulary) float32 on the device; a stage other than the last returns the residual
        stream. entering: see CausalLM; on the device."""
        rows, size, columns = key = self._graph_of(batch)
        chosen = 0 if batch.chosen is None else batch.chosen.numel()
        is_draft = rows > size
        if (
            not (is_draft or _is_decode(batch)) or not self._model.can_capture or rows > MOST_CAPTURED
            or chosen > MOST_CAPTURED or size * columns > LARGEST_TABLE
        ):  # fmt: skip
            return self._model.forward(batch.on(self._device), entering)
        graph = self._graphs.get(key)
        if graph is None:
            make = partial(_DraftLists, rows, size, columns) if is_draft else partial(_Lists, size, columns)
            graph = _Graph(self._model, make, self._device, self._memory, self._passes, self._logits_of(rows))
            self._graphs[key] = graph
            self._memory = graph.memory
        made = graph.replay(batch, entering)
        return made if self._model.is_last else made.clone()  # it is still read while the next replay runs

    def forward_scored(self, batch: Batch, entering: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """See CausalLM. Runs without a graph, since a scored pass contains prompts."""
        return self._model.forward_scored(batch.on(self._device), entering)

    def head(self, normed: torch.Tensor) -> torch.Tensor:
        return self._model.head(normed)

    def send_back(self, tokens: torch.Tensor) -> Sent:
        return self._model.send_back(tokens)

    @property
    def num_graphs(self) -> int:
        """Number of CUDA graphs captured so far."""
        return len(self._graphs)

    def _logits_of(self, rows: int) -> torch.Tensor | None:
        """Return memory for a graph's logits; None for a stage without a head. The sizes are powers of two: all graphs
        together hold less than four times the rows of the largest one."""
        if not self._model.is_last:
            return None
        if self._logits is None or len(self._logits) < rows:
            size = _power_of_two(rows), self._model.config.vocab_size
            self._logits = torch.empty(size, dtype=torch.float32, device=self._device)
        return self._logits[:rows]

    def _graph_of(self, batch: Batch) -> tuple[int, int, int]:
        """Return the key of the graph for this pass: (rows, sequences, pages of each sequence). Rows and sequences are
        equal in a pass without drafts."""
        size = rows = _power_of_two(batch.ragged.num_sequences)
        if _verifies_drafts(batch) and self._model.is_first and self._model.is_last:
            rows, size = _draft_shape(batch.ragged) or (rows, size)
        if not self._has_pages:
            return rows, size, 0
        return rows, size, max(NARROWEST_TABLE, _power_of_two(batch.page_table.shape[1]))


class _Graph:
    """CUDA graph of a pass that reads its inputs from the lists of `make_lists`, on the device. A replay writes its
    batch to a pinned buffer, and copies the buffer to these lists. There are `passes` buffers, used in turn. Before it
    reuses a buffer, the host waits until the buffer's last copy has ended. logits: memory for the result, (rows,
    vocabulary) float32, which other graphs may write to as well; None for a stage without a head."""

    def __init__(
        self,
        model: CausalLM,
        make_lists: Callable[..., _Lists],
        device: torch.device,
        memory: Any,
        passes: int,
        logits: torch.Tensor | None,
    ) -> None:
        self._staged = deque(_Staged(make_lists(pin_memory=True)) for _ in range(passes))
        self._lists = make_lists(device=device)
        self._chosen = torch.zeros(MOST_CAPTURED, dtype=torch.int64, device=device)
        self._batch, self._device = self._lists.batch(device, self._chosen), device
        rows, hidden = self._lists.token_ids.numel(), model.config.hidden_size
        self._entering = None if model.is_first else torch.zeros((rows, hidden), device=device)
        self._model = model
        self._graph = torch.cuda.CUDAGraph()
        with _capturing(device) as side:
            self._pass()  # warm-up: libraries select kernels and allocate outside the graph
            # thread_local: other threads copy snapshots meanwhile, on other streams.
            with torch.cuda.graph(self._graph, pool=memory, stream=side, capture_error_mode="thread_local"):
                made = self._pass()
                # logits of its own would keep their part of the shared memory
                self._made = made if logits is None else logits.copy_(made)
        self.memory = self._graph.pool()

    def _pass(self) -> torch.Tensor:
        self._lists.copy_to(batch_on(self._device, self._batch.ragged))
        entering = None if self._entering is None else self._entering.clone()  # the pass changes it in place
        return self._model.forward(self._batch, entering)

    def replay(self, batch: Batch, entering: torch.Tensor | None = None) -> torch.Tensor:
        """Queue a replay for the batch. Return its logits or residual stream, which the next replay overwrites."""
        staged = self._staged[0]
        self._staged.rotate(-1)
        staged.fetched.synchronize()
        staged.lists.fill(batch)
        self._lists.memory.copy_(staged.lists.memory, non_blocking=True)
        staged.fetched.record()
        if self._entering is not None and entering is not None:
            self._entering[: len(entering)].copy_(entering)
        if batch.chosen is not None:
            self._chosen[: batch.chosen.numel()].copy_(batch.chosen)
        self._graph.replay()
        return self._made[: batch.ragged.num_tokens]


@contextmanager
def _capturing(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """Submit the block's work to the device's stream for captures: after work submitted to the current stream before,
    and before work submitted to it later. Disables garbage collection meanwhile, since destroying a graph, such as that
    of a dropped engine, makes a capture fail."""
    current, side = torch.cuda.current_stream(device), own_stream(device, "capture")
    with _CAPTURE:
        collects = gc.isenabled()
        gc.disable()
        try:
            side.wait_stream(current)
            with torch.cuda.stream(side):  # restores the current stream also if the capture fails
                yield side
            current.wait_stream(side)
        finally:
            if collects:
                gc.enable()


class _Staged:
    """Pinned buffer for the lists of one replay. fetched: event after the last copy of the lists to the device."""

    def __init__(self, lists: _Lists) -> None:
        self.lists = lists
        self.fetched = torch.cuda.Event()  # type: ignore[no-untyped-call]


class _Lists:
    """Inputs of a decode pass that change from pass to pass, in one int64 allocation: the number of real sequences;
    then for each of `size` sequences its token, initial slot, final slot, context length, the token's KV slot, and
    `columns` pages."""

    def __init__(
        self, size: int, columns: int, device: torch.device | None = None, *, pin_memory: bool = False
    ) -> None:
        numbers = 1 + (5 + columns) * size
        self.memory = torch.full((numbers,), -1, dtype=torch.int64, device=device, pin_memory=pin_memory)
        self.present, rest = self.memory[:1], self.memory[1:]
        self._each = each = rest[: 5 * size].view(5, size)
        self.token_ids, self.slots, self.context, self.token_slots = each[0], each[1:3], each[3], each[4]
        self.page_table = rest[5 * size :].view(size, columns)
        for part in (self.present, self.token_ids, self.page_table):
            part.zero_()

    def fill(self, batch: Batch) -> None:
        """Write a batch into these lists, which are on the host. Padding sequences get -1 as state slots, context and
        KV slots, so that they read and write no state and no page."""
        b, ragged = batch.ragged.num_sequences, batch.ragged
        each, table = self._each.numpy(), self.page_table.numpy()  # NumPy assigns in a tenth of torch's time
        self.memory.numpy()[0] = b
        each[0, :b] = batch.token_ids.numpy()
        each[1, :b], each[2, :b] = ragged.initial_slots.numpy(), ragged.final_slots.numpy()
        each[1:3, b:] = -1
        if table.shape[1]:
            each[3, :b], each[4, :b] = batch.context.numpy(), batch.token_slots.numpy()
            each[3:, b:] = -1
            table[:b, : batch.page_table.shape[1]] = batch.page_table.numpy()

    def copy_to(self, batch: DeviceBatch) -> None:
        """Copy the state slots into the DeviceBatch of the graph."""
        batch.slots.copy_(self.slots)

    def batch(self, device: torch.device, chosen: torch.Tensor) -> Batch:
        """Return the Batch of a decode pass that reads its inputs from these lists on the device. chosen: tokens that
        the previous pass sampled, as in Batch."""
        size = self.token_ids.numel()
        on_host = Batch(
            token_ids=torch.zeros(size, dtype=torch.int64),
            ragged=Ragged.create(torch.arange(size + 1)),
            logits_rows=torch.arange(size),
            page_table=torch.zeros((size, 0), dtype=torch.int64),
            context=torch.zeros(size, dtype=torch.int64),
            token_slots=torch.full((size,), -1),
        ).on(device)
        return Batch(
            token_ids=self.token_ids,
            ragged=on_host.ragged,
            logits_rows=on_host.logits_rows,
            page_table=self.page_table,
            context=self.context,
            token_slots=self.token_slots,
            present=self.present,
            chosen=chosen,
        )


class _DraftLists(_Lists):
    """Inputs of a pass that verifies drafts, padded to `rows` tokens in `size` sequences of any lengths, with at most
    rows - size snapshots. The padding sequences share the padding tokens evenly."""

    def __init__(
        self, rows: int, size: int, columns: int, device: torch.device | None = None, *, pin_memory: bool = False
    ) -> None:
        self._ragged_sizes = (size + 1, size, size, size + 1, rows - size, rows - size, size)  # as DeviceBatch.lists
        sizes = (1, rows, rows, size, sum(self._ragged_sizes), size * columns)
        self.memory = torch.zeros(sum(sizes), dtype=torch.int64, device=device, pin_memory=pin_memory)
        parts = torch.split(self.memory, list(sizes))
        self.present, self.token_ids, self.token_slots, self.context, self._ragged, pages = parts
        self.page_table = pages.view(size, columns)
        self._parts = torch.split(self._ragged, list(self._ragged_sizes))
        cu_seqlens, initial, final, _, _, _, order = self._parts  # padding only, until `fill`
        cu_seqlens[:size].copy_(torch.arange(size))
        cu_seqlens[size] = rows
        order.copy_(torch.arange(size))
        for part in (self.token_slots, self.context, initial, final):
            part.fill_(-1)

    def fill(self, batch: Batch) -> None:
        ragged = batch.ragged
        b, t, k = ragged.num_sequences, ragged.num_tokens, ragged.snapshot_slots.numel()
        rows, size = self.token_ids.numel(), self.context.numel()
        self.present.numpy()[0] = t
        for own, given, rest in (
            (self.token_ids, batch.token_ids, 0),
            (self.token_slots, batch.token_slots, -1),
            (self.context, batch.context, -1),
        ):
            own.numpy()[: given.numel()] = given.numpy()
            own.numpy()[given.numel() :] = rest
        cu_seqlens, initial, final, snapshot_cu, positions, slots, order = (part.numpy() for part in self._parts)
        cu_seqlens[: b + 1] = ragged.cu_seqlens.numpy()
        cu_seqlens[b:] = t + np.arange(size - b + 1) * (rows - t) // max(1, size - b)
        initial[:b], final[:b] = ragged.initial_slots.numpy(), ragged.final_slots.numpy()
        initial[b:] = final[b:] = -1
        order[:] = np.argsort(cu_seqlens[:-1] - cu_seqlens[1:], kind="stable")  # the longest first
        snapshot_cu[: b + 1], snapshot_cu[b + 1 :] = ragged.snapshot_cu.numpy(), k
        positions[:k], slots[:k] = ragged.snapshot_positions.numpy(), ragged.snapshot_slots.numpy()
        table = self.page_table.numpy()
        if table.shape[1]:
            table[:b, : batch.page_table.shape[1]] = batch.page_table.numpy()

    def copy_to(self, batch: DeviceBatch) -> None:
        """Copy offsets, state slots and snapshots into the DeviceBatch of the graph."""
        batch.lists.copy_(self._ragged)

    def batch(self, device: torch.device, chosen: torch.Tensor) -> Batch:
        """Return the Batch of a pass that verifies drafts and reads its inputs from these lists on the device. chosen:
        unused, since the host knows all tokens of such a pass."""
        rows, size = self.token_ids.numel(), self.context.numel()
        longest = rows - size + 1
        ragged = Ragged.create(torch.cat([torch.zeros(1, dtype=torch.int64), torch.arange(size) + longest]))
        ragged.on(device, partial(DeviceBatch, most_snapshots=rows - size, present=self.present))
        return Batch(
            token_ids=self.token_ids,
            ragged=ragged,
            logits_rows=torch.arange(rows, device=device),
            page_table=self.page_table,
            context=self.context,
            token_slots=self.token_slots,
            present=self.present,
        )


def _verifies_drafts(batch: Batch) -> bool:
    """Return whether a batch verifies drafts: it needs the logits of all tokens, has a sequence of several tokens, and
    takes no token from the previous pass on the device."""
    tokens = batch.ragged.num_tokens
    return batch.ragged.num_sequences < tokens == batch.logits_rows.numel() and batch.chosen is None


def _is_decode(batch: Batch) -> bool:
    """Return whether a batch has one token per sequence, needs the logits of all tokens, and keeps no snapshot."""
    ragged = batch.ragged
    b = ragged.num_sequences
    return ragged.num_tokens == b == batch.logits_rows.numel() and not ragged.snapshot_slots.numel()


def _draft_shape(ragged: Ragged) -> tuple[int, int] | None:
    """Return (rows, sequences) of the smallest graph for a pass with drafts, or None if no graph fits. Each padding
    sequence must get at least one padding token, and each padding token a sequence."""
    b, t, k = ragged.num_sequences, ragged.num_tokens, ragged.snapshot_slots.numel()
    for rows in DRAFT_ROWS:
        for eighths in DRAFT_EIGHTHS:
            size = max(2, rows * eighths // 8)
            sequences, tokens = size - b, rows - t  # padding
            if k <= rows - size and (0 < sequences <= tokens or sequences == tokens == 0):
                return rows, size
    return None


def _power_of_two(count: int) -> int:
    """Round `count`, at least 1, up to a power of two."""
    return 1 << (count - 1).bit_length()
