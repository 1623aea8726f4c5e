"""Check the arguments of the row-wise ops for all devices: norms, gated product, sampling from logits, paged attention.

Each function takes an op's tensors. It returns the arguments in the order of the CPU's compiled module, with tensors as
views, and new tensors for the results. It raises ValueError if an argument does not fit. codes: dtype -> code of the
device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from apcbatch import _C
from apcbatch.kernels.arguments import (
    DTYPE_CODES,
    address,
    dtype_code,
    float_vector,
    require_alike,
    require_matrix,
    require_one_dtype,
    require_parameter,
    view,
    where,
)

Codes = Mapping[torch.dtype, int]
PAGE_TOKENS: int = _C.PAGE_TOKENS


class NormArguments(NamedTuple):
    """Checked arguments of `rms_norm`, of t rows and h columns. delta: added to x in place before the norm, if given.
    weight: address, 0 for ones."""

    t: int
    h: int
    x: _C.View
    delta: _C.View | None
    weight: int
    eps: float
    y: _C.View


def norm_arguments(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype,
    codes: Codes = DTYPE_CODES,
) -> tuple[NormArguments, torch.Tensor, torch.Tensor | None]:
    """Check the arguments of `rms_norm`, or of `add_rms_norm_` if delta is given. Returns them, the result y, and the
    weight as float32, which the caller keeps alive until the kernel has been launched."""
    if delta is None:
        require_matrix(x, "x")
    else:
        _require_sums(x, delta)
    t, h = x.shape
    if weight is not None:
        weight = float_vector(weight, "weight", h, x, "x")
    y = torch.empty((t, h), dtype=out_dtype, device=x.device)
    addend = None if delta is None else view(delta, "delta", codes)
    views = view(x, "x", codes), addend, address(weight), eps, view(y, "out_dtype", codes)
    return NormArguments(t, h, *views), y, weight


def gated_arguments(
    gate: torch.Tensor, up: torch.Tensor, codes: Codes = DTYPE_CODES
) -> tuple[tuple[int, int, _C.View, _C.View, _C.View], torch.Tensor]:
    """Check the arguments of `silu_mul`. Returns (t, f, gate, up, y) and the tensor y."""
    require_matrix(gate, "gate")
    require_alike(up, "up", gate, "gate")
    require_one_dtype(gate, "gate", up, "up")
    t, f = gate.shape
    y = torch.empty((t, f), dtype=gate.dtype, device=gate.device)
    return (t, f, view(gate, "gate", codes), view(up, "up", codes), view(y, "y", codes)), y


def topk_arguments(
    logits: torch.Tensor, k: int, most_columns: int | None = None
) -> tuple[tuple[int, int, int, _C.View, int, int], tuple[torch.Tensor, torch.Tensor]]:
    """Check the arguments of `softmax_topk`. Returns (t, n, k, logits, weights, indices) and the tensors weights and
    indices, (t, k) each. most_columns: the device's maximum n; None: no limit."""
    _require_logits(logits)
    t, n = logits.shape
    if not 1 <= k <= n:
        raise ValueError(f"k must lie in 1 to {n}, the columns of logits; it is {k}")
    if most_columns is not None and n > most_columns:
        raise ValueError(f"logits must have at most {most_columns} columns{where(logits.device)}; they have {n}")
    weights = torch.empty((t, k), dtype=torch.float32, device=logits.device)
    indices = torch.empty((t, k), dtype=torch.int64, device=logits.device)
    return (t, n, k, view(logits, "logits"), weights.data_ptr(), indices.data_ptr()), (weights, indices)


class LogprobArguments(NamedTuple):
    """Checked arguments of `logprob`, of t rows and v columns. choose: write each row's likeliest token to `tokens`; if
    false, read the token from there. tokens, logprobs: addresses; logprobs 0: compute no log-probabilities."""

    t: int
    v: int
    logits: _C.View
    choose: bool
    tokens: int
    logprobs: int


def argmax_arguments(logits: torch.Tensor) -> tuple[LogprobArguments, torch.Tensor]:
    """Check the arguments of `argmax`. Returns them and the result: tokens (t,) int64."""
    _require_logits(logits)
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    return _logprob_arguments(logits, True, tokens, None), tokens


def greedy_arguments(logits: torch.Tensor) -> tuple[LogprobArguments, torch.Tensor, torch.Tensor]:
    """Check the arguments of `greedy`. Returns them and the results: tokens (t,) int64, logprobs (t,) float32."""
    _require_logits(logits)
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    logprobs = _logprobs_of(logits)
    return _logprob_arguments(logits, True, tokens, logprobs), tokens, logprobs


def token_logprob_arguments(logits: torch.Tensor, token: int) -> tuple[LogprobArguments, torch.Tensor, torch.Tensor]:
    """Check the arguments of `token_logprob`. Returns them, the token (1,) int64, which the caller keeps alive until
    the kernel has been launched, and the result: logprobs (1,) float32."""
    if logits.dim() != 1:
        raise ValueError(f"logits must be one row; its shape is {tuple(logits.shape)}")
    if not 0 <= token < logits.numel():
        raise ValueError(f"token must lie in [0, {logits.numel()}); it is {token}")
    row = logits.unsqueeze(0)
    _require_logits(row)
    tokens, logprobs = torch.tensor([token], device=logits.device), _logprobs_of(row)
    return _logprob_arguments(row, False, tokens, logprobs), tokens, logprobs


def token_logprobs_arguments(logits: torch.Tensor, tokens: torch.Tensor) -> tuple[LogprobArguments, torch.Tensor]:
    """Check the arguments of `token_logprobs`. Returns them and the result: logprobs (t,) float32."""
    _require_logits(logits)
    t, v = logits.shape
    require_parameter(tokens, "tokens", (t,), torch.int64, logits.device)
    if t and not 0 <= int(tokens.min()) <= int(tokens.max()) < v:
        raise ValueError(f"tokens must lie in [0, {v}); they are {int(tokens.min())} to {int(tokens.max())}")
    logprobs = _logprobs_of(logits)
    return _logprob_arguments(logits, False, tokens, logprobs), logprobs


def _logprob_arguments(
    logits: torch.Tensor, choose: bool, tokens: torch.Tensor, logprobs: torch.Tensor | None
) -> LogprobArguments:
    t, v = logits.shape
    return LogprobArguments(t, v, view(logits, "logits"), choose, tokens.data_ptr(), address(logprobs))


def _logprobs_of(logits: torch.Tensor) -> torch.Tensor:
    return torch.empty(len(logits), dtype=torch.float32, device=logits.device)


def kv_arguments(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, codes: Codes = DTYPE_CODES
) -> tuple[int, int, _C.View, _C.View, _C.View, _C.View]:
    """Check the arguments of `write_kv`. Returns (t, row, k, v, k_cache, v_cache); row: elements of a token's row,
    kv_heads x head_dim."""
    caches = cache_views(k_cache, v_cache, codes)
    require_alike(v, "v", k, "k")
    if k.shape[1:] != k_cache.shape[2:]:
        raise ValueError(
            f"k and v must be (tokens, {k_cache.shape[2]}, {k_cache.shape[3]}) like a page's rows; "
            f"they are {tuple(k.shape)}"
        )
    require_one_dtype(k, "k", v, "v")
    t, kv_heads, head_dim = k.shape
    return t, kv_heads * head_dim, view(k, "k", codes), view(v, "v", codes), *caches


class AttentionArguments(NamedTuple):
    """Checked arguments of `paged_attention`, without page_table, cu_seqlens and context, which only the CPU checks."""

    q: _C.View
    k_cache: _C.View
    v_cache: _C.View
    out: _C.View
    heads: int
    kv_heads: int
    head_dim: int


def attention_arguments(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, codes: Codes = DTYPE_CODES
) -> tuple[AttentionArguments, torch.Tensor]:
    """Check the tensors of `paged_attention`. Returns its arguments and the result, (t, heads, head_dim) in q's
    dtype."""
    caches = cache_views(k_cache, v_cache, codes)
    kv_heads, head_dim = k_cache.shape[2:]
    if q.dim() != 3 or q.shape[2] != head_dim or q.shape[1] % kv_heads != 0 or q.shape[1] == 0:
        raise ValueError(
            f"q must be (tokens, a multiple of {kv_heads} heads, {head_dim}), as the cache has {kv_heads} "
            f"kv heads of {head_dim}; it is {tuple(q.shape)}"
        )
    heads, queries = q.shape[1], view(q, "q", codes)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    result = out.data_ptr(), heads * head_dim, queries[2]
    return AttentionArguments(queries, *caches, result, heads, kv_heads, head_dim), out


def cache_views(k_cache: torch.Tensor, v_cache: torch.Tensor, codes: Codes = DTYPE_CODES) -> tuple[_C.View, _C.View]:
    """Return views of both caches, with stride 0. Raises ValueError unless both are contiguous (pages, PAGE_TOKENS,
    kv_heads, head_dim), of one dtype."""
    require_alike(v_cache, "v_cache", k_cache, "k_cache")
    if k_cache.dim() != 4 or k_cache.shape[1] != PAGE_TOKENS:
        raise ValueError(f"the cache must be (pages, {PAGE_TOKENS}, kv_heads, head_dim); it is {tuple(k_cache.shape)}")
    if k_cache.shape[2] == 0 or k_cache.shape[3] == 0:
        raise ValueError(
            f"the cache must have at least one kv head of at least one column; it is {tuple(k_cache.shape)}"
        )
    require_one_dtype(k_cache, "k_cache", v_cache, "v_cache")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("k_cache and v_cache must be contiguous; allocate one pair a layer")
    code = dtype_code(k_cache, "k_cache", codes)
    return (k_cache.data_ptr(), 0, code), (v_cache.data_ptr(), 0, code)


def _require_sums(residual: torch.Tensor, delta: torch.Tensor) -> None:
    """Raise ValueError unless delta can be added to the residual in place: both matrices of one shape, the residual
    float32 with rows that do not overlap."""
    require_matrix(residual, "residual")
    require_alike(delta, "delta", residual, "residual")
    if residual.dtype != torch.float32:
        raise ValueError(f"residual must be float32, in which it is summed; it is {residual.dtype}")
    if residual.shape[0] > 1 and residual.stride(0) < residual.shape[1]:
        raise ValueError(
            f"the residual's rows must not overlap, as they are written; its strides are {residual.stride()} for "
            f"the shape {tuple(residual.shape)}"
        )


def _require_logits(logits: torch.Tensor) -> None:
    """Raise ValueError unless the logits are a float32 matrix with at least one column."""
    require_matrix(logits, "logits")
    if logits.dtype != torch.float32:
        raise ValueError(f"logits must be float32; they are {logits.dtype}")
    if logits.shape[1] == 0:
        raise ValueError("logits must have at least one column; they have none")
