"""The packed batch of a pass. It is made on the host; a model on another device copies it to that device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from apcbatch.kernels.cuda.batch import batch_on, uploaded
from apcbatch.kernels.ragged import Ragged


@dataclass(frozen=True)
class Batch:
    """b sequences packed token-major into t tokens.

    token_ids (t,) int64; -1 - r stands for the token in row r of `chosen` (rows,) int64, sampled by the previous pass.
    ragged: offsets, and the state slots to read, write and snapshot into. logits_rows (r,) int64: the tokens whose
    logits are computed. For attention layers: page_table (b, pages) int64, context (b,) int64, the number of tokens
    cached before this chunk, token_slots (t,) int64, page x PAGE_TOKENS + offset of each token, or -1 to write no KV
    for it. scored_rows (s,) int64: the tokens whose normed hidden states are returned, or None. with_logprobs: whether
    the log-probability of the likeliest token is computed for each of logits_rows. kept_rows (m,) int64: the tokens
    whose inputs are kept for CausalLM.replay, or None. present: (1,) int64, number of real tokens, which come first;
    the others are padding. None: all tokens are real.
    """

    token_ids: torch.Tensor
    ragged: Ragged
    logits_rows: torch.Tensor
    page_table: torch.Tensor
    context: torch.Tensor
    token_slots: torch.Tensor
    present: torch.Tensor | None = None
    chosen: torch.Tensor | None = None
    scored_rows: torch.Tensor | None = None
    with_logprobs: bool = False
    kept_rows: torch.Tensor | None = None

    @property
    def tokens(self) -> torch.Tensor:
        """Token ids (t,) int64, with references into `chosen` replaced; 0 for a reference to a row whose logits had NaN
        or infinity."""
        if self.chosen is None:
            return self.token_ids
        taken = self.chosen[self.token_ids.bitwise_not().clamp_min(0)].clamp_min(0)
        return taken.where(self.token_ids < 0, self.token_ids)

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """Token offsets of the sequences, (b + 1,) int64, on the device of token_ids."""
        device = self.token_ids.device
        return self.ragged.cu_seqlens if device.type == "cpu" else batch_on(device, self.ragged).cu_seqlens

    @cached_property
    def positions(self) -> torch.Tensor:
        """Absolute position of each token, (t,) int64, computed once for the sub-blocks of a pass."""
        offsets, t = self.cu_seqlens, self.token_ids.numel()
        first = (self.context - offsets[:-1]).repeat_interleave(offsets.diff(), output_size=t)
        return first + torch.arange(t, device=first.device)

    def on(self, device: torch.device) -> Batch:
        """Return a copy on a CUDA device. The ragged stays on the host, and caches its copy on the device."""
        names = ["token_ids", "logits_rows", "page_table", "context", "token_slots"]
        names += [] if self.scored_rows is None else ["scored_rows"]
        lists = [getattr(self, name) for name in names]
        memory = uploaded(torch.cat([part.flatten() for part in lists]), device)  # in one transfer
        parts = torch.split(memory, [part.numel() for part in lists])
        tensors = {name: part.view(of.shape) for name, part, of in zip(names, parts, lists, strict=True)}
        batch_on(device, self.ragged)
        return Batch(ragged=self.ragged, chosen=self.chosen, with_logprobs=self.with_logprobs, **tensors)
