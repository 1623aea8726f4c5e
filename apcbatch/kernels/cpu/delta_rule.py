"""Gated delta rule and gated norm on the CPU: the kernels of the delta net mixer, one call each.

apcbatch.kernels.reference computes both in plain PyTorch. Invariants: a row of delta_rule's result depends only on the
initial state and the tokens of its sequence up to that row, a row of gated_norm's only on that row; a snapshot is a
copy of the carry, not rounded, so cutting a sequence anywhere gives the same bits; in float32 every instruction set
gives the same bits. Both functions raise ValueError for arguments that do not fit.

Dimension letters: t tokens, Hk key heads of K columns, Hv value heads of V columns.
"""

from __future__ import annotations

import torch

from apcbatch import _C
from apcbatch.kernels.arguments import (
    FLOAT32,
    require_cpu,
    require_one_dtype,
    require_parameter,
    require_slots,
    slot_stride,
    view,
)
from apcbatch.kernels.processor import num_threads
from apcbatch.kernels.ragged import Ragged


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    A: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    ragged: Ragged,
) -> torch.Tensor:
    """Compute the gated delta rule in float32. For each token and value head, S_t = d S_(t-1) + k (beta (v -
    S_(t-1)^T (d k)))^T and o = S_t^T q, where q and k are normed to length 1 (1e-6 added to the sum of squares), q is
    then divided by sqrt(K), beta = sigmoid(b) and d = exp(A softplus(a + dt_bias)). Yang, Kautz and Hatamizadeh,
    arXiv 2412.06464, equation 10.

    q, k: (t, Hk, K). v: (t, Hv, V); value head h uses key head h // (Hv / Hk). b, a: (t, Hv). All five of one dtype,
    float32 or bfloat16, with any token stride. A: (Hv,) float32, -exp(A_log). dt_bias: (Hv,) float32. state:
    (num_slots, Hv, V / lanes, K, lanes) float32, any slot stride: S (K, V) of each value head, its columns in blocks of
    `lanes`. The slots that the batch names are read and written in place. Returns o, (t, Hv, V) float32, a transposed
    view of (Hv, t, V) contiguous.
    """
    _check_heads(q, k, v, ragged)
    (t, value_heads, value_dim), (key_heads, key_dim) = v.shape, q.shape[1:]
    for name, tensor in (("b", b), ("a", a)):
        if tuple(tensor.shape) != (t, value_heads):
            raise ValueError(f"{name} must be ({t}, {value_heads}), a value a head; it is {tuple(tensor.shape)}")
    for name, tensor in (("k", k), ("v", v), ("b", b), ("a", a)):
        require_cpu(tensor, name)
        require_one_dtype(q, "q", tensor, name)
    require_parameter(A, "A", (value_heads,), torch.float32)
    require_parameter(dt_bias, "dt_bias", (value_heads,), torch.float32)
    lanes = state.shape[-1]
    if lanes == 0 or value_dim % lanes:
        raise ValueError(f"state must have blocks that divide V {value_dim}; it is {tuple(state.shape)}")
    stride = slot_stride(state, (value_heads, value_dim // lanes, key_dim, lanes), torch.float32)
    require_slots(ragged.max_slot, state.shape[0])
    out = torch.empty(value_heads, t, value_dim, dtype=torch.float32)
    _C.delta_rule(
        ragged=ragged.params,
        q=view(q, "q"),
        k=view(k, "k"),
        v=view(v, "v"),
        b=view(b, "b"),
        a=view(a, "a"),
        A=A.data_ptr(),
        dt_bias=dt_bias.data_ptr(),
        state=(state.data_ptr(), stride, FLOAT32),
        out=view(out, "out"),
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        lanes=lanes,
        num_threads=num_threads(),
    )
    return out.transpose(0, 1)


def _check_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ragged: Ragged) -> None:
    """Raise ValueError unless the shapes of q, k and v fit each other and the batch."""
    require_cpu(q, "q")
    shapes = [tuple(tensor.shape) for tensor in (q, k, v)]
    if any(len(shape) != 3 or shape[0] != ragged.num_tokens or 0 in shape[1:] for shape in shapes):
        raise ValueError(f"q, k and v must be ({ragged.num_tokens}, heads, columns); they are {shapes}")
    if shapes[0] != shapes[1] or shapes[2][1] % shapes[0][1]:
        raise ValueError(f"q and k must have one shape, and v a multiple of their heads; they are {shapes}")


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight * silu(gate) for each head in float32, rounded once. Yang, Kautz and
    Hatamizadeh, arXiv 2412.06464, section 3.4.

    x: (t, Hv, V) float32, any stride of tokens and heads. gate: (t, Hv, V) float32 or bfloat16, any token stride.
    weight: (V,) float32. Returns (t, Hv, V) in gate's dtype.
    """
    require_cpu(x, "x")
    require_cpu(gate, "gate")
    if x.dim() != 3 or x.shape != gate.shape or x.dtype != torch.float32 or x.stride(2) != 1:
        raise ValueError(
            f"x must be float32 (t, heads, columns) like gate, with contiguous columns; they are {x.dtype} "
            f"{tuple(x.shape)} and {tuple(gate.shape)}"
        )
    require_parameter(weight, "weight", (x.shape[2],), torch.float32)
    y = torch.empty(gate.shape, dtype=gate.dtype)
    t, heads, columns = x.shape
    rows = (x.data_ptr(), x.stride(0), FLOAT32), x.stride(1), view(gate, "gate"), weight.data_ptr()
    _C.gated_norm(t, heads, columns, *rows, eps, view(y, "y"), num_threads())
    return y
