"""Launch all kernels of a model's Mamba mixers on a CUDA device by one C++ call, to save host time and release the GIL.

Invariant: it launches the same kernels as the ops one by one (apcbatch.kernels.cuda.mamba), so the bits are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from apcbatch.kernels.arguments import address, slot_stride
from apcbatch.kernels.cuda.batch import DeviceBatch
from apcbatch.kernels.cuda.extension import ALIGNMENT, DTYPE_CODES, current_stream, extension
from apcbatch.kernels.cuda.fixed_order import ProductShape
from apcbatch.kernels.cuda.linear import DeviceLinear
from apcbatch.kernels.layer import MambaWeights, PreNorm, Residual


@dataclass(frozen=True, eq=False)
class CompiledMamba:
    """Mamba mixer that one call launches. compiled: its _CUDA.Mixer. shapes: shapes of its four products, in order.
    slots: number of state slots."""

    compiled: object
    in_proj: DeviceLinear
    shapes: tuple[ProductShape, ...]
    slots: int


def compile_mamba(
    norm: PreNorm, weights: MambaWeights[DeviceLinear], ssm: torch.Tensor, conv: torch.Tensor
) -> CompiledMamba | None:
    """Compile a mixer. ssm: (slots, n, d) float32, its recurrent states. conv: (slots, w - 1, d) in the projections'
    dtype, the last inputs of its convolution. Returns None for weights that only the ops support, such as those without
    fixed-order products or with biases of the projections. Raises ValueError if the states do not fit."""
    if not _is_supported(norm, weights):
        return None
    w, (n, d), width = weights, weights.A.shape, weights.conv_weight.shape[1]
    dtype, device = w.in_proj.dtype, ssm.device
    code, float32 = DTYPE_CODES[dtype], DTYPE_CODES[torch.float32]
    compiled = extension().Mixer(
        dtype=code,
        in_proj=_projection(w.in_proj),
        x_proj=_projection(w.x_proj),
        dt_proj=_projection(w.dt_proj),
        out_proj=_projection(w.out_proj),
        norm=(norm.weight.data_ptr(), norm.eps),
        inner_norms=None if w.norms is None else [(address(part), w.norm_eps) for part in w.norms],
        conv_weight=(w.conv_weight.data_ptr(), width, float32),
        conv_bias=address(w.conv_bias),
        conv_state=(conv.data_ptr(), slot_stride(conv, (width - 1, d), dtype, device), code),
        A=w.A.data_ptr(),
        D=w.D.data_ptr(),
        dt_bias=w.dt_bias.data_ptr(),
        ssm_state=(ssm.data_ptr(), slot_stride(ssm, (n, d), torch.float32, device), float32),
        d_inner=d,
        d_state=n,
        width=width,
    )
    shapes = (
        _shape(w.in_proj, dtype, True),
        _shape(w.x_proj, dtype, True),
        _shape(w.dt_proj, dtype, w.norms is not None),
        _shape(w.out_proj, torch.float32, True),
    )
    return CompiledMamba(compiled, w.in_proj, shapes, min(ssm.shape[0], conv.shape[0]))


class CompiledMambaStack:
    """Mamba mixers of one device, run in order."""

    def __init__(self, mixers: Sequence[CompiledMamba | None]) -> None:
        known = [mixer for mixer in mixers if mixer is not None]
        are_alike = len(known) == len(mixers) and len({mixer.shapes for mixer in known}) == 1
        self._first = known[0] if are_alike else None
        self._compiled = [mixer.compiled for mixer in known]
        self._slots = min((mixer.slots for mixer in known), default=0)

    def __call__(self, residual: Residual, batch: DeviceBatch) -> bool:
        """Run the mixers, each as DeviceMamba does. Returns False, with nothing done, if the caller must run the ops
        instead: a mixer is not compiled, the mixers' shapes differ, no fixed-order product serves this number of rows,
        the kernel of a product is not chosen yet, or the arguments do not fit (the ops then raise the error)."""
        first, rows, sums = self._first, batch.num_tokens, residual.sum
        if first is None or not self._fit(first.in_proj, sums, batch):
            return False
        products = first.in_proj.fixed_order_for(rows)
        if products is None:
            return False
        kernels = [products.kernel(shape, rows) for shape in first.shapes]
        if None in kernels:
            return False
        size = extension().workspace_bytes(first.compiled, rows, kernels)
        workspace = torch.empty(size, dtype=torch.uint8, device=sums.device)
        left = torch.empty_like(sums)
        delta = residual.delta.data_ptr() if residual.has_delta else 0
        pointers = sums.data_ptr(), delta, left.data_ptr(), workspace.data_ptr()
        extension().run_mixers(self._compiled, batch.params, *pointers, kernels, current_stream())
        residual.leave(left)
        return True

    def _fit(self, in_proj: DeviceLinear, sums: torch.Tensor, batch: DeviceBatch) -> bool:
        device = in_proj.weight.device
        return (
            sums.shape == (batch.num_tokens, in_proj.in_features)
            and batch.num_tokens > 0
            and batch.max_slot < self._slots
            and sums.dtype == torch.float32
            and sums.is_contiguous()
            and sums.device == device
            and torch.cuda.current_device() == device.index
        )


def _is_supported(norm: PreNorm, weights: MambaWeights[DeviceLinear]) -> bool:
    w, (n, d), r = weights, weights.A.shape, weights.dt_proj.in_features
    projections = w.in_proj, w.x_proj, w.dt_proj, w.out_proj
    parameters: list[tuple[torch.Tensor | None, tuple[int, ...]]] = [
        (norm.weight, (w.in_proj.in_features,)),
        (w.conv_weight, (d, w.conv_weight.shape[-1])),
        (w.conv_bias, (d,)),
        (w.A, (n, d)),
        (w.D, (d,)),
        (w.dt_bias, (d,)),
    ]
    if w.norms is not None:
        parameters += zip(w.norms, ((r,), (n,), (n,)), strict=True)
    return (
        all(part.fixed_order is not None for part in projections)
        and len({part.dtype for part in projections}) == 1
        and w.in_bias is None
        and w.out_bias is None
        and 1 <= w.conv_weight.shape[-1] <= extension().MOST_TAPS
        and 1 <= n <= extension().MOST_STATES
        and all(_is_parameter(tensor, shape, w.A.device) for tensor, shape in parameters)
        # without norms, dt_proj reads dt in place: the first columns of x_proj's product, whose rows must be aligned
        and (w.norms is not None or (r + 2 * n) * w.dt_proj.dtype.itemsize % ALIGNMENT == 0)
    )


def _is_parameter(tensor: torch.Tensor | None, shape: tuple[int, ...], device: torch.device) -> bool:
    if tensor is None:
        return True
    is_laid_out = tensor.shape == shape and tensor.is_contiguous()
    return is_laid_out and tensor.dtype == torch.float32 and tensor.device == device


def _shape(packed: DeviceLinear, out_dtype: torch.dtype, is_packed: bool) -> ProductShape:
    return ProductShape(packed.out_features, packed.in_features, packed.pieces, packed.dtype, out_dtype, is_packed)


def _projection(packed: DeviceLinear) -> tuple[int, int, int, int]:
    return packed.weight.data_ptr(), packed.out_features, packed.in_features, packed.pieces
