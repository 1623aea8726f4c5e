"""The arena of states: every live state and every snapshot of a run, in one allocation per kind.

Must not know: requests, keys, who owns a slot. The memory is reserved, not touched: a page of it becomes resident when
a kernel first writes there, a huge page where the system has them, so that states are read and written with few misses
of the TLB.
"""

from __future__ import annotations

import math
import mmap

import torch

from apcbatch.model.finite import finite_rows
from apcbatch.model.hf_config import ModelConfig

PAGE_TOKENS = 64


class StateArena:
    """ssm: (num_slots, mamba layers, d_state, d_inner) float32. conv: (num_slots, mamba layers, d_conv - 1, d_inner) in
    the activations' dtype, oldest token first. kv: (attention layers, 2, num_pages, PAGE_TOKENS, kv heads, head_dim) in
    the activations' dtype, keys then values."""

    def __init__(
        self, config: ModelConfig, num_slots: int, num_pages: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        layers = config.num_mamba_layers
        self.device = device
        self.ssm = _reserved((num_slots, layers, config.d_state, config.d_inner), torch.float32, device)
        self.conv = _reserved((num_slots, layers, config.d_conv - 1, config.d_inner), dtype, device)
        heads, head_dim = config.num_key_value_heads, config.head_dim
        pages = (config.num_attention_layers, 2, num_pages, PAGE_TOKENS, heads, head_dim)
        self.kv = _reserved(pages, dtype, device)

    def is_finite(self, slot: int) -> bool:
        """Whether a slot's state holds neither NaN nor infinity."""
        return all(bool(finite_rows(part[slot].view(1, -1))) for part in (self.ssm, self.conv))

    def host_slot(self, slot: int, *, copied: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """(ssm, conv) of a slot where the host can reach them: the slot itself or, for an arena on a CUDA device,
        pinned memory, with a copy of the slot if `copied`. `fill_slot` brings what was written there into the slot."""
        ssm, conv = self.ssm[slot], self.conv[slot]
        if not ssm.is_cuda:
            return ssm, conv
        pinned = [torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in (ssm, conv)]
        if copied:
            pinned[0].copy_(ssm)
            pinned[1].copy_(conv)
        return pinned[0], pinned[1]

    def fill_slot(self, slot: int, ssm: torch.Tensor, conv: torch.Tensor) -> None:
        """Write a slot's state; nothing is to be done where they are the slot itself."""
        if ssm.data_ptr() != self.ssm[slot].data_ptr():
            self.ssm[slot].copy_(ssm)
            self.conv[slot].copy_(conv)

    def gather_kv(self, pages: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """The KV of tokens begin..end of the sequence whose page list is `pages` (n,) int64, as a new tensor
        (attention layers, 2, end - begin, kv heads, head_dim)."""
        first = begin // PAGE_TOKENS
        kept = self.kv[:, :, pages[first : -(-end // PAGE_TOKENS)].to(self.device)].flatten(2, 3)
        return kept[:, :, begin - first * PAGE_TOKENS : end - first * PAGE_TOKENS].contiguous()

    def scatter_kv(self, pages: torch.Tensor, begin: int, kv: torch.Tensor) -> None:
        """Write kv (attention layers, 2, tokens, kv heads, head_dim) as the tokens from `begin` on."""
        positions = torch.arange(begin, begin + kv.shape[2])
        slots = pages[positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
        self.kv.flatten(2, 3).index_copy_(2, slots.to(self.device), kv.to(self.device))

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page of every attention layer."""
        self.kv[:, :, target].copy_(self.kv[:, :, source])


def _reserved(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that was not written to. OSError where the system has none, torch.OutOfMemoryError for a CUDA device."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not num_bytes:
        return torch.empty(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def slot_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one state slot: the recurrent states and the convolution tails of all layers."""
    per_layer = 4 * config.d_state + dtype.itemsize * (config.d_conv - 1)
    return config.num_mamba_layers * config.d_inner * per_layer


def page_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one KV page over all attention layers; 0 for a model without attention."""
    per_token = 2 * config.num_key_value_heads * config.head_dim * dtype.itemsize
    return config.num_attention_layers * PAGE_TOKENS * per_token
