"""A model on a CUDA device: decode passes of Mamba layers are replayed as CUDA graphs, others are launched op by op.

Must not know: requests. A graph is captured when a size of batch first comes up: sizes are powers of two, the rest of a
batch is filled up with sequences that read and write no state.
"""

from __future__ import annotations

from typing import Any

import torch

from apcbatch.kernels.device_batch import DeviceBatch
from apcbatch.kernels.ragged import Ragged
from apcbatch.model.batch import Batch
from apcbatch.model.causal_lm import CausalLM

LARGEST_GRAPH = 256  # sequences


class GraphedLM:
    """`forward(batch)` like CausalLM's, for batches made on the host; the logits are those of the last call alone."""

    def __init__(self, model: CausalLM, device: torch.device) -> None:
        self.fingerprint = model.fingerprint
        self._model, self._device = model, device
        self._graphs: dict[int, _DecodeGraph] = {}
        self._memory: Any = None  # shared by all graphs: only one runs at a time

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits (rows, vocabulary) float32 on the device."""
        b = batch.ragged.num_sequences
        if not (self._model.captures and _is_decode(batch) and b <= LARGEST_GRAPH):
            return self._model.forward(batch.on(self._device))
        size = _power_of_two(b)
        graph = self._graphs.get(size)
        if graph is None:
            graph = self._graphs[size] = _DecodeGraph(self._model, size, self._device, self._memory)
            self._memory = graph.memory
        return graph.replay(batch)


class _DecodeGraph:
    """One token of each of `size` sequences; the graph begins by fetching the tokens and slots from pinned memory."""

    def __init__(self, model: CausalLM, size: int, device: torch.device, memory: Any) -> None:
        self._batch = _empty_batch(size).on(device)
        ragged: object = self._batch.ragged
        assert isinstance(ragged, DeviceBatch)
        self._slots = ragged.slots
        self._staged = torch.full((3, size), -1, pin_memory=True)  # tokens, initial and final slots
        self._staged[0] = 0
        self._fetched = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._run = model.decode if size <= model.most_decoded else model.forward
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):  # the libraries choose and allocate outside the graph
            self._pass()
        torch.cuda.current_stream(device).wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=memory):
            self._logits = self._pass()
        self.memory = self._graph.pool()

    def _pass(self) -> torch.Tensor:
        self._batch.token_ids.copy_(self._staged[0], non_blocking=True)
        self._slots.copy_(self._staged[1:], non_blocking=True)
        return self._run(self._batch)

    def replay(self, batch: Batch) -> torch.Tensor:
        """The batch's logits; they are overwritten by the next replay."""
        b, ragged = batch.ragged.num_sequences, batch.ragged
        self._fetched.synchronize()  # by the replay before
        self._staged[0, :b] = batch.token_ids
        self._staged[1, :b], self._staged[2, :b] = ragged.initial_slots, ragged.final_slots
        self._staged[1:, b:] = -1  # sequences without states
        self._graph.replay()
        self._fetched.record()
        return self._logits[:b]


def _is_decode(batch: Batch) -> bool:
    """Whether every sequence has one token, wants its logits and keeps no snapshot."""
    ragged = batch.ragged
    b = ragged.num_sequences
    return ragged.num_tokens == b == batch.logits_rows.numel() and not ragged.snapshot_slots.numel()


def _empty_batch(size: int) -> Batch:
    """One token of each of `size` sequences without states."""
    return Batch(
        token_ids=torch.zeros(size, dtype=torch.int64),
        ragged=Ragged.create(torch.arange(size + 1)),
        logits_rows=torch.arange(size),
        page_table=torch.zeros((size, 0), dtype=torch.int64),
        context=torch.zeros(size, dtype=torch.int64),
        token_slots=torch.full((size,), -1),
    )


def _power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`, 1 or more."""
    return 1 << (count - 1).bit_length()
