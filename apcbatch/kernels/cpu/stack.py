"""A model's whole pass on the CPU in one call: embedding, layers, final norm, head.

Must not know: models, requests. Invariant: the bits are those of the parts called one after the other. What never
changes is checked once, when a FusedStack is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from apcbatch import _C
from apcbatch.kernels.arguments import address, num_threads, require_indices, require_parameter, require_slots
from apcbatch.kernels.cpu.attention import PAGE_TOKENS, require_sequences
from apcbatch.kernels.cpu.attention_mixer import FusedAttention
from apcbatch.kernels.cpu.feed_forward import FusedMixture, FusedMlp
from apcbatch.kernels.cpu.linear import PackedLinear
from apcbatch.kernels.cpu.mixer import FusedMixer
from apcbatch.kernels.cpu.residual import norm_plan
from apcbatch.kernels.layer import PreNorm
from apcbatch.kernels.ops import FeedForward, Pages, StackLayer
from apcbatch.kernels.ragged import Ragged


class FusedStack:
    """See apcbatch.kernels.ops.PassStack. Raises ValueError where shapes do not fit."""

    def __init__(
        self, layers: Sequence[StackLayer], norm: PreNorm, head: PackedLinear, embedding: torch.Tensor | None
    ) -> None:
        self._vocabulary, self._hidden, self._dtype = head.out_features, head.in_features, head.dtype
        if embedding is not None:
            require_parameter(embedding, "embedding", (self._vocabulary, self._hidden), self._dtype)
        self._kept_alive = list(layers), norm, head, embedding  # the plan holds their addresses
        self._logits = torch.empty(0, self._vocabulary, dtype=torch.float32)
        attentions = [layer.mixer for layer in layers if isinstance(layer.mixer, FusedAttention)]
        mixers = [layer.mixer for layer in layers if isinstance(layer.mixer, FusedMixer)]
        self._num_pages = min((one.num_pages for one in attentions), default=0)
        self._has_pages = bool(attentions)
        self._num_slots = min((one.num_slots for one in mixers), default=0)
        parts = [(layer.mixer.plan, *_plans(layer.feed_forward)) for layer in layers]
        self._plan = _C.Stack(parts, norm_plan(norm, self._hidden), head.plan, address(embedding))

    def __call__(
        self,
        tokens: torch.Tensor,
        ragged: Ragged,
        pages: Pages,
        logits_rows: torch.Tensor,
        hidden_rows: torch.Tensor | None = None,
        on_layer: Callable[[], None] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See PassStack. The logits are those of the last call alone."""
        t, r = ragged.num_tokens, logits_rows.numel()
        tokens = require_indices(tokens, "tokens", (t,), self._vocabulary)
        logits_rows = require_indices(logits_rows, "logits_rows", (r,), t)
        if self._num_slots:
            require_slots(ragged.max_slot, self._num_slots)
        pages, where = self._where(ragged, pages)
        logits = self._rows(r)
        hidden, wanted = None, (0, 0, 0)
        if hidden_rows is not None:
            hidden_rows = require_indices(hidden_rows, "hidden_rows", (hidden_rows.numel(),), t)
            hidden = torch.empty(hidden_rows.numel(), self._hidden, dtype=self._dtype)
            wanted = hidden_rows.numel(), hidden_rows.data_ptr(), hidden.data_ptr()
        self._plan.run(
            tokens.data_ptr(),
            ragged.params,
            where,
            (r, logits_rows.data_ptr(), logits.data_ptr()),
            wanted,
            on_layer,
            num_threads(),
        )
        return logits, hidden

    def _rows(self, count: int) -> torch.Tensor:
        """Room for so many rows of logits, used again: new memory of that size would have to be cleared each time."""
        if len(self._logits) < count:
            self._logits = torch.empty(count, self._vocabulary, dtype=torch.float32)
        return self._logits[:count]

    def _where(self, ragged: Ragged, pages: Pages) -> tuple[Pages, _C.Pages]:
        """The pages, to be kept alive, and as the compiled module takes them."""
        if not self._has_pages:
            return pages, (0, 0, 0, 0)
        t = ragged.num_tokens
        slots = require_indices(pages.token_slots, "token_slots", (t,), self._num_pages * PAGE_TOKENS)
        table, _, context = require_sequences(t, self._num_pages, pages.page_table, ragged.cu_seqlens, pages.context)
        return Pages(table, context, slots), (table.data_ptr(), table.shape[1], context.data_ptr(), slots.data_ptr())


def _plans(part: FeedForward | None) -> tuple[_C.PreNorm | None, _C.Mlp | _C.Mixture | None]:
    """A feed-forward part's norm, and what it computes."""
    if part is None:
        return None, None
    assert isinstance(part, (FusedMlp, FusedMixture)), "a part of another backend"
    return part.plans
