"""Attention over a paged KV cache on a CUDA device. Arguments and results: apcbatch.kernels.cpu.attention.

Invariant: a query's bits depend on its absolute position and on the keys and values up to it, never on its chunk or
batch.
"""

from __future__ import annotations

import torch

from apcbatch.kernels.arguments import address, require_one_dtype
from apcbatch.kernels.cuda.extension import DTYPE_CODES, current_stream, extension
from apcbatch.kernels.row_arguments import PAGE_TOKENS, attention_arguments, kv_arguments


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    token_slots: torch.Tensor,
) -> None:
    """See apcbatch.kernels.cpu.attention. All tensors must have one dtype. The values of token_slots are not checked:
    they lie on the device."""
    t, row, (keys, k_stride, code), (values, v_stride, _), *caches = kv_arguments(k, v, k_cache, v_cache, DTYPE_CODES)
    require_one_dtype(k, "k", k_cache, "k_cache")
    if token_slots.shape != (t,):
        raise ValueError(f"token_slots must be ({t},), a place for each token; it is {tuple(token_slots.shape)}")
    places = *(cache[0] for cache in caches), token_slots.data_ptr()
    extension().write_kv(t, row, keys, k_stride, values, v_stride, code, *places, current_stream())


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    context: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """See apcbatch.kernels.cpu.attention. All tensors must have one dtype. The values of page_table, cu_seqlens and
    context are not checked: they lie on the device."""
    arguments, out = attention_arguments(q, k_cache, v_cache, DTYPE_CODES)
    require_one_dtype(q, "q", k_cache, "k_cache")
    heads, kv_heads, head_dim = arguments.heads, arguments.kv_heads, arguments.head_dim
    t, b, columns = len(q), context.numel(), page_table.shape[1]
    if head_dim > extension().MOST_HEAD_DIM:
        raise ValueError(f"q must have heads of at most {extension().MOST_HEAD_DIM} columns; they have {head_dim}")
    max_context = columns * PAGE_TOKENS
    parts = None
    if t == b and heads // kv_heads <= extension().MOST_SPLIT_HEADS:  # decode: one new token per sequence
        splits = -(-max_context // extension().SPLIT_TOKENS)
        parts = torch.empty((b, heads, splits, head_dim + 2), dtype=torch.float32, device=q.device)
    queries, q_stride, code = arguments.q
    extension().paged_attention(
        b,
        heads,
        kv_heads,
        head_dim,
        scale,
        queries,
        q_stride,
        arguments.k_cache[0],
        arguments.v_cache[0],
        code,
        page_table.data_ptr(),
        columns,
        cu_seqlens.data_ptr(),
        context.data_ptr(),
        arguments.out[0],
        t - b + 1,
        max_context,
        address(parts),
        current_stream(),
    )
    return out
