"""The selective scan with gradients: a Triton kernel pair on a GPU, plain PyTorch elsewhere.

    h[t] = exp(dt[t] A) h[t - 1] + dt[t] x[t] B[t],    y[t] = C[t] h[t]        (arXiv 2312.00752, equation 2)

over rows that begin with h = 0. Padding belongs at the end of a row: nothing before it sees it.
Shapes: x, dt (rows, tokens, d); A (n, d); B, C (rows, tokens, n). Must not know: the network around it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def selective_scan_reference(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """y (rows, tokens, d), one token after the other, in the dtype of dt; gradients are autograd's."""
    h = torch.zeros(x.shape[0], *a.shape, dtype=dt.dtype, device=x.device)  # (rows, n, d)
    outputs = []
    for x_t, dt_t, b_t, c_t in zip(x.unbind(1), dt.unbind(1), b.unbind(1), c.unbind(1), strict=True):
        h = torch.exp(dt_t[:, None] * a) * h + b_t[:, :, None] * (dt_t * x_t)[:, None]
        outputs.append((c_t[:, :, None] * h).sum(1))
    return torch.stack(outputs, 1)


@torch.library.custom_op("demo_model::scan", mutates_args=())
def scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """y (rows, tokens, d) and all states (rows, tokens, n, d), both float32."""
    from demo_model import scan_kernels

    return scan_kernels.forward(x, dt, a, b, c)


@scan.register_fake
def _(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    rows, tokens, d = x.shape
    return dt.new_empty(rows, tokens, d), dt.new_empty(rows, tokens, a.shape[0], d)


@torch.library.custom_op("demo_model::scan_gradients", mutates_args=())
def scan_gradients(
    grad: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, states: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, dt, a, b and c, given that of y."""
    from demo_model import scan_kernels

    return scan_kernels.backward(grad, x, dt, a, b, c, states)


@scan_gradients.register_fake
def _(
    grad: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, states: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(dt), torch.empty_like(a), torch.empty_like(b), torch.empty_like(c)


def _save(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])


def _backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor, _: Tensor | None) -> tuple[Tensor, ...]:
    return scan_gradients(grad.contiguous(), *ctx.saved_tensors)


scan.register_autograd(_backward, setup_context=_save)


def selective_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """y (rows, tokens, d) float32, by the way of the inputs' device."""
    if x.is_cuda:
        return scan(x.contiguous(), dt.contiguous(), a, b, c)[0]
    return selective_scan_reference(x, dt, a, b, c)
