"""Recurrences over heads with matrix states on the CPU, and their gated norm: the kernels of the gated delta net and
Mamba-2 mixers, one call each.

apcbatch.kernels.reference computes them in plain PyTorch. Invariants: a row of a recurrence's result depends only on
the initial state and the tokens of its sequence up to that row, a row of gated_norm's only on that row; a snapshot is a
copy of the carry, not rounded, so cutting a sequence anywhere gives the same bits; in float32 every instruction set
gives the same bits. All functions raise ValueError for arguments that do not fit.

Dimension letters of the delta rule: t tokens, Hk key heads of K columns, Hv value heads of V columns. Those of Mamba-2:
G groups of B and C, N d_state, H heads of P columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from apcbatch import _C
from apcbatch.kernels.arguments import (
    DTYPE_CODES,
    FLOAT32,
    address,
    dtype_code,
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
    inputs = {"q": q, "k": k, "v": v, "a": a, "b": b}
    _check_inputs(inputs, ragged)
    params = head_scan_params(q.dtype, q.shape[1:], v.shape[1:], A, dt_bias, state)
    out = torch.empty(v.shape[1], v.shape[0], v.shape[2], dtype=torch.float32)
    _run(params, inputs, state, out, ragged)
    return out.transpose(0, 1)


def ssd(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    dt_limits: tuple[float, float],
    state: torch.Tensor,
    ragged: Ragged,
) -> torch.Tensor:
    """Compute the recurrence of Mamba-2 in float32. For each token and head, S_t = exp(A s) S_(t-1) + B (s x)^T and
    y = S_t^T C + D x, where s = softplus(dt + dt_bias), limited to dt_limits. Dao and Gu, "Transformers are SSMs",
    arXiv 2405.21060, equation 1 with a scalar A for each head.

    x: (t, H, P). dt: (t, H). B, C: (t, G, N); head h uses group h // (H / G). All four of one dtype, float32 or
    bfloat16, with any token stride. A: (H,) float32, -exp(A_log). D, dt_bias: (H,) float32. state: (num_slots, H, P /
    lanes, N, lanes) float32, any slot stride: S (N, P) of each head, its columns in blocks of `lanes`. The slots that
    the batch names are read and written in place. Returns y, (t, H, P) float32 contiguous.
    """
    inputs = {"C": C, "B": B, "x": x, "dt": dt}
    _check_inputs(inputs, ragged)
    params = head_scan_params(C.dtype, C.shape[1:], x.shape[1:], A, dt_bias, state, D, dt_limits)
    out = torch.empty(x.shape, dtype=torch.float32)
    _run(params, inputs, state, out, ragged)
    return out


def head_scan_params(
    dtype: torch.dtype,
    keys: Sequence[int],
    values: Sequence[int],
    A: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    D: torch.Tensor | None = None,
    dt_limits: tuple[float, float] = (0.0, 0.0),
) -> _C.HeadScanParams:
    """Check and pack what a recurrence needs besides the inputs of a call: that of Mamba-2 if D is given, otherwise the
    delta rule.

    dtype: of the inputs. keys: (Hk, K), in Mamba-2 (G, N). values: (Hv, V), in Mamba-2 (H, P). The result holds
    addresses: the caller keeps A, dt_bias, D and state alive. Raises ValueError if a shape or a dtype does not fit.
    """
    (key_heads, key_dim), (heads, value_dim), lanes = keys, values, state.shape[-1]
    for name, vector in (("A", A), ("dt_bias", dt_bias), *([] if D is None else [("D", D)])):
        require_parameter(vector, name, (heads,), torch.float32)
    if lanes == 0 or value_dim % lanes:
        raise ValueError(f"state must have blocks that divide the {value_dim} columns; it is {tuple(state.shape)}")
    stride = slot_stride(state, (heads, value_dim // lanes, key_dim, lanes), torch.float32)
    return _C.HeadScanParams(
        dtype=DTYPE_CODES[dtype],
        key_heads=key_heads,
        value_heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
        lanes=lanes,
        A=A.data_ptr(),
        dt_bias=dt_bias.data_ptr(),
        D=address(D),
        dt_min=dt_limits[0],
        dt_max=dt_limits[1],
        state=(state.data_ptr(), stride, FLOAT32),
    )


def _check_inputs(inputs: dict[str, torch.Tensor], ragged: Ragged) -> None:
    """Raise ValueError unless the inputs of a call fit each other and the batch. inputs: q, k and v, or C, B and x,
    (t, heads, columns) each; then the gates, (t, value heads) each."""
    (q_name, q), (k_name, k), (v_name, v), *gates = inputs.items()
    require_cpu(q, q_name)
    dtype_code(q, q_name)
    shapes = [tuple(tensor.shape) for tensor in (q, k, v)]
    shown = ", ".join(map(str, shapes))
    if any(len(shape) != 3 or shape[0] != ragged.num_tokens or 0 in shape[1:] for shape in shapes):
        raise ValueError(
            f"{q_name}, {k_name} and {v_name} must be ({ragged.num_tokens}, heads, columns); they are {shown}"
        )
    if shapes[0] != shapes[1] or shapes[2][1] % shapes[0][1]:
        raise ValueError(
            f"{q_name} and {k_name} must have one shape, and {v_name} a multiple of their heads; they are {shown}"
        )
    for name, tensor in gates:
        if tuple(tensor.shape) != shapes[2][:2]:
            raise ValueError(f"{name} must be {shapes[2][:2]}, a value a head; it is {tuple(tensor.shape)}")
    for name, tensor in inputs.items():
        require_cpu(tensor, name)
        require_one_dtype(q, q_name, tensor, name)


def _run(
    params: _C.HeadScanParams,
    inputs: dict[str, torch.Tensor],
    state: torch.Tensor,
    out: torch.Tensor,
    ragged: Ragged,
) -> None:
    """Run the kernel (csrc/head_scan.h). Raises ValueError unless the state has the batch's slots."""
    require_slots(ragged.max_slot, state.shape[0])
    q, k, v, a, *b = (view(tensor, name) for name, tensor in inputs.items())
    _C.head_scan(
        params, ragged=ragged.params, q=q, k=k, v=v, b=b[0] if b else None, a=a, out=view(out, "out"),
        num_threads=num_threads(),
    )  # fmt: skip


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor | None, eps: float, gate_first: bool = False
) -> torch.Tensor:
    """Compute norm(x) * weight * silu(gate) for each head in float32, rounded once, where norm(x) = x / sqrt(mean(x^2)
    + eps): Yang, Kautz and Hatamizadeh, arXiv 2412.06464, section 3.4. gate_first: compute norm(x * silu(gate)) *
    weight instead, as Mamba-2 does over the columns of a group: Dao and Gu, arXiv 2405.21060, section 7. weight None:
    compute x * silu(gate).

    x: (t, Hv, V) float32, any stride of tokens and heads. gate: (t, Hv, V) float32 or bfloat16, any token stride.
    weight: (V,) float32, or one for each head, (Hv, V). Returns (t, Hv, V) in gate's dtype.
    """
    require_cpu(x, "x")
    require_cpu(gate, "gate")
    if x.dim() != 3 or x.shape != gate.shape or x.dtype != torch.float32 or x.stride(2) != 1:
        raise ValueError(
            f"x must be float32 (t, heads, columns) like gate, with contiguous columns; they are {x.dtype} "
            f"{tuple(x.shape)} and {tuple(gate.shape)}"
        )
    t, heads, columns = x.shape
    is_shared = weight is not None and weight.dim() == 1
    if weight is not None:
        require_parameter(weight, "weight", (columns,) if is_shared else (heads, columns), torch.float32)
    y = torch.empty(gate.shape, dtype=gate.dtype)
    rows = (x.data_ptr(), x.stride(0), FLOAT32), x.stride(1), view(gate, "gate")
    norm = *rows, address(weight), 0 if is_shared else columns, eps
    _C.gated_norm(t, heads, columns, *norm, gate_first, view(y, "y"), num_threads())
    return y
