"""A model's whole pass on the CPU in one call: embedding, layers, final norm, head, argmax.

Invariant: the bits equal those of running the ops one by one. Weights and states are checked once, when a FusedStack is
made; the tensors of a pass are checked when they change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import NamedTuple, TypeAlias

import torch

from apcbatch import _C
from apcbatch.kernels.arguments import PAGE_TOKENS, address, require_indices, require_parameter, require_slots
from apcbatch.kernels.backend import Pages, Passed, StackEntry
from apcbatch.kernels.cpu.linear import PackedLinear
from apcbatch.kernels.cpu.ops import require_sequences
from apcbatch.kernels.cpu.sub_block import norm_plan
from apcbatch.kernels.layer import PreNorm
from apcbatch.kernels.processor import num_threads
from apcbatch.kernels.ragged import Ragged


class FusedStack:
    """A whole pass in one call. layers: sub-blocks of each layer (StackSubBlock). norm, head, embedding,
    embedding_scale: see BackendOf.pass_stack. Raises ValueError if a shape or a dtype does not fit."""

    def __init__(
        self,
        layers: Sequence[Sequence[StackEntry]],
        norm: PreNorm,
        head: PackedLinear,
        embedding: torch.Tensor | None,
        embedding_scale: float = 1.0,
    ) -> None:
        self._vocabulary, self._hidden, self._dtype = head.out_features, head.in_features, head.dtype
        if embedding is not None:
            require_parameter(embedding, "embedding", (self._vocabulary, self._hidden), self._dtype)
        self._kept_alive = list(layers), norm, head, embedding  # the plan holds their addresses
        self._logits = torch.empty(0, self._vocabulary, dtype=torch.float32)
        parts = [entry.part for layer in layers for entry in layer]
        self._num_slots = min((part.num_slots for part in parts if part.num_slots is not None), default=0)
        self._num_pages = min((part.num_pages for part in parts if part.num_pages is not None), default=0)
        self._has_pages = any(part.num_pages is not None for part in parts)
        plans = [[(entry.part.plan, entry.is_beside) for entry in layer] for layer in layers]
        self._plan = _C.Stack(plans, norm_plan(norm, self._hidden), head.plan, address(embedding), embedding_scale)
        self._checked: _CheckedPass | None = None

    def __call__(
        self,
        tokens: torch.Tensor,
        ragged: Ragged,
        pages: Pages,
        logits_rows: torch.Tensor,
        hidden_rows: torch.Tensor | None = None,
        with_logprobs: bool = False,
        kept_rows: torch.Tensor | None = None,
        on_layer: Callable[[], None] | None = None,
    ) -> Passed:
        """Run a pass over the tokens. The next call overwrites the tensors returned. Raises ValueError for arguments
        that do not fit.

        tokens: (t,) int64 ids. The rows are indices in t: logits_rows: (r,) int64, to compute logits for. hidden_rows:
        (s,) int64, to return hidden states for. kept_rows: (m,) int64, whose recurrence inputs are kept for `replay`;
        they replace those kept before. with_logprobs: also return the log-probabilities of the likeliest tokens.
        on_layer: called before each layer. A call with the same tensor objects as the last one skips the checks of
        shapes and dtypes; the compiled module checks the values in every call.
        """
        inputs = (tokens, ragged, *pages, logits_rows, hidden_rows, with_logprobs, kept_rows)
        checked = self._checked
        if checked is None or not all(map(is_, inputs, checked.inputs)):
            checked = self._checked = self._check(inputs)
        chosen = self._plan.run(checked.plan, on_layer, num_threads())
        if chosen is None:
            self._check(inputs)  # raises for what was refused, such as a token, row or page out of range
            raise AssertionError("the compiled module refused the numbers of a pass that is sound")
        return Passed(checked.logits, checked.hidden, chosen[0], chosen[1] if with_logprobs else None)

    def replay(self, replays: Sequence[tuple[int, int, int]]) -> None:
        """Advance states by tokens whose inputs the last pass kept. The states then have the bits of a pass over these
        tokens.

        replays: (state slot, index in kept_rows of the first token, number of tokens) each. Slots must be distinct (not
        checked). Raises ValueError for rows that the last pass did not keep, and if the rows do not ascend or overlap.
        """
        require_slots(max((slot for slot, _, _ in replays), default=-1), self._num_slots)
        self._plan.replay(list(replays), num_threads())

    def _check(self, inputs: _Inputs) -> _CheckedPass:
        """Check all tensors of a pass and allocate its results. Raises ValueError."""
        tokens, ragged, page_table, context, token_slots, logits_rows, hidden_rows, with_logprobs, kept_rows = inputs
        t, r = ragged.num_tokens, logits_rows.numel()
        tokens = require_indices(tokens, "tokens", (t,), self._vocabulary)
        logits_rows = require_indices(logits_rows, "logits_rows", (r,), t)
        if self._num_slots:
            require_slots(ragged.max_slot, self._num_slots)
        where: _C.Pages = (0, 0, 0, 0, 0)
        if self._has_pages:
            token_slots = require_indices(token_slots, "token_slots", (t,), self._num_pages * PAGE_TOKENS)
            page_table, _, context = require_sequences(t, self._num_pages, page_table, ragged.cu_seqlens, context)
            columns = page_table.shape[1]
            where = page_table.data_ptr(), columns, context.data_ptr(), token_slots.data_ptr(), self._num_pages
        if len(self._logits) < r:
            self._logits = torch.empty(r, self._vocabulary, dtype=torch.float32)
        logits = self._logits[:r]  # reused: the system would have to clear new memory of this size in each pass
        hidden, wanted = None, (0, 0, 0)
        if hidden_rows is not None:
            hidden_rows = require_indices(hidden_rows, "hidden_rows", (hidden_rows.numel(),), t)
            hidden = torch.empty(hidden_rows.numel(), self._hidden, dtype=self._dtype)
            wanted = hidden_rows.numel(), hidden_rows.data_ptr(), hidden.data_ptr()
        kept = (0, 0)
        if kept_rows is not None:
            kept_rows = require_indices(kept_rows, "kept_rows", (kept_rows.numel(),), t)
            kept = kept_rows.numel(), kept_rows.data_ptr()
        for_logits = r, logits_rows.data_ptr(), logits.data_ptr()
        plan = _C.Pass(tokens.data_ptr(), ragged.params, where, for_logits, wanted, with_logprobs, kept)
        # Compare later inputs with the contiguous tensors: a caller's tensor that was copied here must be copied again.
        seen = (tokens, ragged, page_table, context, token_slots, logits_rows, hidden_rows, with_logprobs, kept_rows)
        return _CheckedPass(seen, plan, logits, hidden)


_Inputs: TypeAlias = tuple[
    torch.Tensor,
    Ragged,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor | None,
    bool,
    torch.Tensor | None,
]


class _CheckedPass(NamedTuple):
    """Checked inputs of a pass, its plan and its result tensors. inputs: kept alive, as the plan holds their
    addresses."""

    inputs: _Inputs
    plan: _C.Pass
    logits: torch.Tensor
    hidden: torch.Tensor | None
