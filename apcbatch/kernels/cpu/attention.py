"""Attention over a paged KV cache on the CPU: write keys and values to pages, then attend over them.

Invariant: a query's result depends on its absolute position and on the keys and values up to it, never on its chunk or
batch. Its sum is split at page boundaries only. Formula: Vaswani et al., arXiv 1706.03762, equation 1, causal, with
the grouped heads of Ainslie et al., arXiv 2305.13245.
"""

from __future__ import annotations

import torch

from apcbatch import _C
from apcbatch.kernels.arguments import num_threads, require_cpu, require_indices
from apcbatch.kernels.row_arguments import PAGE_TOKENS, attention_arguments, kv_arguments


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    token_slots: torch.Tensor,
) -> None:
    """Write keys and values to the cache, rounded if its dtype is narrower. Raises ValueError.

    k, v: (t, kv_heads, head_dim) float32 or bfloat16, any token stride. k_cache, v_cache: (pages, PAGE_TOKENS,
    kv_heads, head_dim) contiguous. token_slots: (t,) int64, page x PAGE_TOKENS + offset of each token, all different.
    """
    require_cpu(k_cache, "k_cache")
    require_cpu(k, "k")
    arguments = kv_arguments(k, v, k_cache, v_cache)
    token_slots = require_indices(token_slots, "token_slots", (k.shape[0],), k_cache.shape[0] * PAGE_TOKENS)
    _C.write_kv(*arguments, token_slots.data_ptr(), num_threads())


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    context: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Compute causal attention of the new tokens of b sequences over all tokens of these sequences so far.

    q: (t, heads, head_dim) float32 or bfloat16, any token stride; heads is a multiple of the cache's kv_heads.
    k_cache, v_cache: (pages, PAGE_TOKENS, kv_heads, head_dim) contiguous, with the new tokens' rows already written.
    page_table: (b, max_pages) int64; row i lists the pages of sequence i in order; entries past its last page are not
    read. cu_seqlens: (b + 1,) int64, offsets of the sequences in t. context: (b,) int64, tokens cached before the new
    ones. scale: factor of the scores q k^T. Returns (t, heads, head_dim) in q's dtype. Raises ValueError.
    """
    require_cpu(k_cache, "k_cache")
    require_cpu(q, "q")
    (queries, keys, values, result, heads, kv_heads, head_dim), out = attention_arguments(q, k_cache, v_cache)
    sequences = require_sequences(q.shape[0], k_cache.shape[0], page_table, cu_seqlens, context)
    where = _addresses(*sequences)
    _C.paged_attention(queries, keys, values, result, where, heads, kv_heads, head_dim, scale, num_threads())
    return out


def require_sequences(
    t: int, pages: int, page_table: torch.Tensor, cu_seqlens: torch.Tensor, context: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return page_table, cu_seqlens and context, made contiguous. Raises ValueError unless `paged_attention` can take
    them. t: number of tokens. pages: number of pages in the cache."""
    b = context.numel()
    columns = page_table.shape[-1] if page_table.dim() else 0
    for name, tensor, shape in (
        ("cu_seqlens", cu_seqlens, (b + 1,)),
        ("context", context, (b,)),
        ("page_table", page_table, (b, columns)),
    ):
        if tensor.dtype != torch.int64 or tensor.shape != shape or not tensor.is_cpu:
            raise ValueError(
                f"{name} must be int64 of shape {shape} on the CPU; it is {tensor.dtype} of shape "
                f"{tuple(tensor.shape)} on {tensor.device}"
            )
    page_table, cu_seqlens, context = page_table.contiguous(), cu_seqlens.contiguous(), context.contiguous()
    fault = _C.check_sequences(_addresses(page_table, cu_seqlens, context), t, pages)
    if fault:
        raise ValueError(_fault_sentence(fault, t, pages, page_table, cu_seqlens, context))
    return page_table, cu_seqlens, context


def _addresses(page_table: torch.Tensor, cu_seqlens: torch.Tensor, context: torch.Tensor) -> _C.Sequences:
    b, columns = page_table.shape
    return b, page_table.data_ptr(), columns, cu_seqlens.data_ptr(), context.data_ptr()


def _fault_sentence(
    fault: int, t: int, pages: int, page_table: torch.Tensor, cu_seqlens: torch.Tensor, context: torch.Tensor
) -> str:
    """Return the error message of a SequenceFault (csrc/attention.h): an invalid offset, context, width or page."""
    return (
        "",
        f"cu_seqlens must ascend from 0 to the {t} tokens of q; it is {cu_seqlens.tolist()}",
        f"context must not be negative; it is {context.tolist()}",
        f"page_table must have a column for each page of the longest sequence; it has {page_table.shape[1]} for "
        f"context {context.tolist()} and cu_seqlens {cu_seqlens.tolist()}",
        f"page_table must name pages in [0, {pages}) up to each sequence's end; it is {page_table.tolist()}",
    )[fault]
