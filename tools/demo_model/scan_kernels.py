"""The selective scan in Triton: one program for a row and a block of channels, their states in registers.

The forward kernel walks a row from its first token to its last and keeps every state: n x d x 4 bytes a token. The
backward kernel walks from the last to the first with those states. Sums over channels are left in a part for each
block, and added up outside, so that results do not depend on the order in which programs end.
Must not know: autograd, the network.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 32  # channels of a program, which is one warp
STAGES = 10  # tokens whose inputs are on their way while one is worked on


@triton.jit
def _forward(
    x, dt, a, b, c, y, states, tokens, D: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, N)
    tile = n[:, None] * D + d[None, :]
    decay = tl.load(a + tile)
    h = tl.zeros((N, BLOCK), tl.float32)
    for t in tl.range(tokens, num_stages=STAGES):
        at = row * tokens + t
        dt_t = tl.load(dt + at * D + d)
        x_t = tl.load(x + at * D + d).to(tl.float32)
        b_t = tl.load(b + at * N + n)
        c_t = tl.load(c + at * N + n)
        h = tl.exp(dt_t[None, :] * decay) * h + b_t[:, None] * (dt_t * x_t)[None, :]
        tl.store(states + at * N * D + tile, h)
        tl.store(y + at * D + d, tl.sum(c_t[:, None] * h, 0))


@triton.jit
def _backward(
    grad,
    x,
    dt,
    a,
    b,
    c,
    states,
    dx,
    ddt,
    da,
    db,
    dc,
    tokens,
    D: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    d = block * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, N)
    tile = n[:, None] * D + d[None, :]
    decay = tl.load(a + tile)
    dh = tl.zeros((N, BLOCK), tl.float32)  # of the state after token t, from the tokens after it
    da_sum = tl.zeros((N, BLOCK), tl.float32)
    h = tl.load(states + (row * tokens + tokens - 1) * N * D + tile)
    for i in tl.range(tokens, num_stages=STAGES):
        t = tokens - 1 - i
        at = row * tokens + t
        grad_t = tl.load(grad + at * D + d)
        dt_t = tl.load(dt + at * D + d)
        x_t = tl.load(x + at * D + d).to(tl.float32)
        b_t = tl.load(b + at * N + n)
        c_t = tl.load(c + at * N + n)
        before = tl.load(states + (at - 1) * N * D + tile, mask=t > 0, other=0.0)
        dh += c_t[:, None] * grad_t[None, :]
        keep = tl.exp(dt_t[None, :] * decay)
        d_exponent = dh * before * keep
        d_input = tl.sum(dh * b_t[:, None], 0)  # of dt x
        tl.store(dx + at * D + d, (d_input * dt_t).to(dx.dtype.element_ty))
        tl.store(ddt + at * D + d, tl.sum(d_exponent * decay, 0) + d_input * x_t)
        part = (at * tl.num_programs(1) + block) * N + n
        tl.store(dc + part, tl.sum(h * grad_t[None, :], 1))
        tl.store(db + part, tl.sum(dh * (dt_t * x_t)[None, :], 1))
        da_sum += d_exponent * dt_t[None, :]
        dh *= keep
        h = before
    tl.store(da + row * N * D + tile, da_sum)


def _check(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[int, int, int, int]:
    rows, tokens, d = x.shape
    n = a.shape[0]
    if d % BLOCK or n & (n - 1):
        raise ValueError(f"d is {d} and n is {n}; expected a multiple of {BLOCK} and a power of two")
    shapes = (dt.shape, a.shape, b.shape, c.shape)
    if shapes != (x.shape, (n, d), (rows, tokens, n), (rows, tokens, n)):
        raise ValueError(f"shapes are {[list(s) for s in shapes]}; expected those of x {list(x.shape)} and n {n}")
    if not all(tensor.is_contiguous() for tensor in (x, dt, a, b, c)):
        raise ValueError("expected contiguous tensors")
    return rows, tokens, d, n


def forward(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """y (rows, tokens, d) and the states (rows, tokens, n, d), float32. x may be bfloat16, the others are float32."""
    rows, tokens, d, n = _check(x, dt, a, b, c)
    y = torch.empty((rows, tokens, d), dtype=torch.float32, device=x.device)
    states = torch.empty((rows, tokens, n, d), dtype=torch.float32, device=x.device)
    _forward[(rows, d // BLOCK)](x, dt, a, b, c, y, states, tokens, D=d, N=n, BLOCK=BLOCK, STAGES=STAGES, num_warps=1)
    return y, states


def backward(
    grad: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, states: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, dt, a, b and c, given that of y and the states of forward."""
    rows, tokens, d, n = _check(x, dt, a, b, c)
    dx, ddt = torch.empty_like(x), torch.empty_like(dt)
    da = torch.empty((rows, n, d), dtype=torch.float32, device=x.device)
    db, dc = (torch.empty((rows, tokens, d // BLOCK, n), dtype=torch.float32, device=x.device) for _ in range(2))
    grid = (rows, d // BLOCK)
    _backward[grid](
        grad, x, dt, a, b, c, states, dx, ddt, da, db, dc, tokens, D=d, N=n, BLOCK=BLOCK, STAGES=STAGES, num_warps=1
    )
    return dx, ddt, da.sum(0), db.sum(2), dc.sum(2)
