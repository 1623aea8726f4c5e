"""Attention over a paged KV cache on a CUDA device: the same arguments and results as apcbatch.kernels.cpu.attention.

Must not know: who owns a page, models. Invariant: a query's bits depend on its absolute position and on the keys and
values up to it, never on the piece or the batch that it comes in.
"""

from __future__ import annotations

import torch

from apcbatch.kernels.arguments import (
    dtype_code,
    require_cache,
    require_kv,
    require_one_dtype,
    require_queries,
    row_stride,
)
from apcbatch.kernels.cpu.attention import PAGE_TOKENS
from apcbatch.kernels.cuda.extension import DTYPE_CODES, current_stream, extension


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    token_slots: torch.Tensor,
) -> None:
    """See apcbatch.kernels.cpu.attention; all of one dtype."""
    require_cache(k_cache, v_cache, PAGE_TOKENS)
    require_kv(k, v, k_cache)
    require_one_dtype(k, "k", k_cache, "k_cache")
    t, kv_heads, head_dim = k.shape
    if token_slots.shape != (t,):
        raise ValueError(f"token_slots must be ({t},), a place for each token; it is {tuple(token_slots.shape)}")
    extension().write_kv(
        t,
        kv_heads * head_dim,
        k.data_ptr(),
        row_stride(k, "k"),
        v.data_ptr(),
        row_stride(v, "v"),
        dtype_code(k, "k", DTYPE_CODES),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        token_slots.data_ptr(),
        current_stream(),
    )


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    context: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """See apcbatch.kernels.cpu.attention; all of one dtype, and the numbers in page_table, cu_seqlens and context are
    relied upon: they lie on the device."""
    require_cache(k_cache, v_cache, PAGE_TOKENS)
    require_queries(q, k_cache)
    require_one_dtype(q, "q", k_cache, "k_cache")
    t, heads, head_dim = q.shape
    kv_heads, b, columns = k_cache.shape[2], context.numel(), page_table.shape[1]
    if head_dim > extension().MOST_HEAD_DIM:
        raise ValueError(f"q must have heads of at most {extension().MOST_HEAD_DIM} columns; they have {head_dim}")
    out = torch.empty((t, heads, head_dim), dtype=q.dtype, device=q.device)
    max_context = columns * PAGE_TOKENS
    parts = None
    if t == b and heads // kv_heads <= extension().MOST_SPLIT_HEADS:  # one new token each
        splits = -(-max_context // extension().SPLIT_TOKENS)
        parts = torch.empty((b, heads, splits, head_dim + 2), dtype=torch.float32, device=q.device)
    extension().paged_attention(
        b,
        heads,
        kv_heads,
        head_dim,
        scale,
        q.data_ptr(),
        row_stride(q, "q"),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        dtype_code(q, "q", DTYPE_CODES),
        page_table.data_ptr(),
        columns,
        cu_seqlens.data_ptr(),
        context.data_ptr(),
        out.data_ptr(),
        t - b + 1,
        max_context,
        0 if parts is None else parts.data_ptr(),
        current_stream(),
    )
    return out
