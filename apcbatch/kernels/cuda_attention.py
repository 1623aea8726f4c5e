"""Attention over a paged KV cache on a CUDA device: the same arguments and results as apcbatch.kernels.attention.

Must not know: who owns a page, models. Invariant: a query's bits depend on its absolute position and on the keys and
values up to it, never on the piece or the batch that it comes in.
"""

from __future__ import annotations

import torch

from apcbatch.kernels.attention import PAGE_TOKENS
from apcbatch.kernels.cuda import DTYPE_CODES, extension


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    token_slots: torch.Tensor,
) -> None:
    """See apcbatch.kernels.attention; all of one dtype."""
    _require_cache(k, k_cache, v_cache)
    t, kv_heads, head_dim = k.shape
    if v.shape != k.shape or v.dtype != k.dtype or token_slots.shape != (t,):
        raise ValueError(f"v must be like k, {tuple(k.shape)} {k.dtype}, and token_slots ({t},)")
    extension().write_kv(
        t,
        kv_heads * head_dim,
        k.data_ptr(),
        k.stride(0),
        v.data_ptr(),
        v.stride(0),
        DTYPE_CODES[k.dtype],
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        token_slots.data_ptr(),
        torch.cuda.current_stream().cuda_stream,
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
    """See apcbatch.kernels.attention; all of one dtype, and the numbers in page_table, cu_seqlens and context are
    relied upon: they lie on the device."""
    _require_cache(q, k_cache, v_cache)
    t, heads, head_dim = q.shape
    kv_heads, b, columns = k_cache.shape[2], context.numel(), page_table.shape[1]
    if heads % kv_heads or head_dim > extension().MOST_HEAD_DIM:
        raise ValueError(
            f"q must have a multiple of {kv_heads} heads of at most {extension().MOST_HEAD_DIM}; it has {heads} of "
            f"{head_dim}"
        )
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
        q.stride(0),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        DTYPE_CODES[q.dtype],
        page_table.data_ptr(),
        columns,
        cu_seqlens.data_ptr(),
        context.data_ptr(),
        out.data_ptr(),
        t - b + 1,
        max_context,
        0 if parts is None else parts.data_ptr(),
        torch.cuda.current_stream().cuda_stream,
    )
    return out


def _require_cache(x: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    if (
        x.dim() != 3 or k_cache.shape != v_cache.shape or k_cache.shape[1] != PAGE_TOKENS
        or k_cache.shape[3] != x.shape[2] or not (k_cache.is_contiguous() and v_cache.is_contiguous())
        or len({x.dtype, k_cache.dtype, v_cache.dtype}) != 1 or x.dtype not in DTYPE_CODES
        or x.stride()[1:] != (x.shape[2], 1)
    ):  # fmt: skip
        raise ValueError(
            f"the cache must be two contiguous (pages, {PAGE_TOKENS}, kv_heads, {x.shape[-1]}) {x.dtype}, and a "
            f"token's heads contiguous; they are {tuple(k_cache.shape)} and {tuple(v_cache.shape)} {k_cache.dtype}, "
            f"and strides {x.stride()}"
        )
