"""A model on a CUDA device: decode passes are replayed as CUDA graphs, others are launched op by op.

One graph is captured per batch size and page-table width, on first use. Both are powers of two; a smaller batch is
padded with sequences that read and write no state and no page.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from apcbatch.kernels.cuda.batch import batch_on
from apcbatch.kernels.ragged import Ragged
from apcbatch.model.batch import Batch
from apcbatch.model.causal_lm import CausalLM
from apcbatch.model.peer_transfer import Sent

LARGEST_GRAPH = 256  # sequences, and rows of the previous pass's sampled tokens
NARROWEST_TABLE = 16  # pages per sequence, for models with attention
LARGEST_TABLE = 1 << 16  # pages of all sequences: attention's workspace grows with it


class GraphedLM:
    """`forward(batch)` like CausalLM's, for batches made on the host. The logits are overwritten by the next call; work
    queued on the same stream before that call may still read them. passes: maximum number of passes in flight before
    the host waits for the oldest."""

    def __init__(self, model: CausalLM, device: torch.device, passes: int = 1) -> None:
        self.fingerprint, self.backend = model.fingerprint, model.backend
        self.numerics, self.weights_digest = model.numerics, model.weights_digest
        self._model, self._device, self._passes = model, device, passes
        self._has_pages = model.has_pages
        self._graphs: dict[tuple[int, int], _DecodeGraph] = {}
        self._memory: Any = None  # shared by all graphs: only one runs at a time

    @torch.inference_mode()
    def forward(self, batch: Batch, entering: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits (rows, vocabulary) float32 on the device; for a stage other than the last, the residual stream.
        entering: on the device; see CausalLM."""
        size, columns = self._graph_of(batch)
        chosen = 0 if batch.chosen is None else batch.chosen.numel()
        if (
            not _is_decode(batch) or size > self._most_captured or size * columns > LARGEST_TABLE
            or chosen > LARGEST_GRAPH
        ):  # fmt: skip
            return self._model.forward(batch.on(self._device), entering)
        graph = self._graphs.get((size, columns))
        if graph is None:
            graph = _DecodeGraph(self._model, size, columns, self._device, self._memory, self._passes)
            self._graphs[size, columns] = graph
            self._memory = graph.memory
        made = graph.replay(batch, entering)
        return made if self._model.is_last else made.clone()  # it is still read while the next replay runs

    def forward_scored(self, batch: Batch, entering: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """See CausalLM. Runs without a graph, as such a pass contains prompts."""
        return self._model.forward_scored(batch.on(self._device), entering)

    def head(self, normed: torch.Tensor) -> torch.Tensor:
        """See CausalLM."""
        return self._model.head(normed)

    def send_back(self, tokens: torch.Tensor) -> Sent:
        """See CausalLM."""
        return self._model.send_back(tokens)

    @property
    def _most_captured(self) -> int:
        return min(LARGEST_GRAPH, self._model.most_captured)

    def _graph_of(self, batch: Batch) -> tuple[int, int]:
        """Return the key of the graph for this decode pass: (sequences, pages of each sequence)."""
        size = _power_of_two(batch.ragged.num_sequences)
        if not self._has_pages:
            return size, 0
        return size, max(NARROWEST_TABLE, _power_of_two(batch.page_table.shape[1]))


class _DecodeGraph:
    """One token of each of `size` sequences of at most `columns` pages. Tokens, slots and pages are staged in pinned
    memory; up to `passes` replays may be queued before the host waits for the first."""

    def __init__(
        self, model: CausalLM, size: int, columns: int, device: torch.device, memory: Any, passes: int
    ) -> None:
        self._staged = deque(_Staged(size, columns) for _ in range(passes))
        self._lists = _Lists(size, columns, device=device)
        self._chosen = torch.zeros(LARGEST_GRAPH, dtype=torch.int64, device=device)
        self._batch, self._device = self._lists.batch(device, self._chosen), device
        hidden = model.config.hidden_size
        self._entering = None if model.is_first else torch.zeros((size, hidden), device=device)
        self._model = model
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):  # warm-up: libraries select kernels and allocate outside the graph
            self._pass()
        torch.cuda.current_stream(device).wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        # thread_local: other threads copy snapshots during the capture, and those copies must not be captured.
        with torch.cuda.graph(self._graph, pool=memory, stream=side, capture_error_mode="thread_local"):
            self._made = self._pass()
        self.memory = self._graph.pool()

    def _pass(self) -> torch.Tensor:
        batch_on(self._device, self._batch.ragged).slots.copy_(self._lists.slots)
        entering = None if self._entering is None else self._entering.clone()  # the pass changes it in place
        return self._model.forward(self._batch, entering)

    def replay(self, batch: Batch, entering: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits or residual stream of the batch; overwritten by the next replay."""
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
        return self._made[: batch.ragged.num_sequences]


class _Staged:
    """Pinned memory for the lists of one replay. fetched: event, recorded once the device has copied them."""

    def __init__(self, size: int, columns: int) -> None:
        self.lists = _Lists(size, columns, pin_memory=True)
        self.fetched = torch.cuda.Event()  # type: ignore[no-untyped-call]


class _Lists:
    """The inputs that change from pass to pass, in one allocation: the number of sequences, and for each sequence its
    token, initial and final slot, context length, KV slot of the token, and pages."""

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
        """Copy a batch's lists, on the host; padding sequences get no state, no context and no page."""
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

    def batch(self, device: torch.device, chosen: torch.Tensor) -> Batch:
        """Return the decode pass over these lists on the device. chosen: the tokens sampled by the previous pass."""
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


def _is_decode(batch: Batch) -> bool:
    """Return whether every sequence has one token, wants its logits and keeps no snapshot."""
    ragged = batch.ragged
    b = ragged.num_sequences
    return ragged.num_tokens == b == batch.logits_rows.numel() and not ragged.snapshot_slots.numel()


def _power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least `count`, 1 or more."""
    return 1 << (count - 1).bit_length()
