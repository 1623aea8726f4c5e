"""Mamba mixers on a CUDA device whose ops are launched by one call, so that the host is soon done with a pass, and
other threads may go on meanwhile.

Must not know: models, how the ops compute, how the library's kernels are chosen. Invariant: what is launched is what
the ops launch one by one (apcbatch.kernels.cuda.mixer), and so are the bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from apcbatch.kernels.arguments import address, slot_stride
from apcbatch.kernels.cuda.batch import DeviceBatch
from apcbatch.kernels.cuda.chains import ProductShape
from apcbatch.kernels.cuda.extension import ALIGNMENT, DTYPE_CODES, current_stream, extension
from apcbatch.kernels.cuda.linear import DeviceLinear
from apcbatch.kernels.layer import MixerWeights, PreNorm, Residual


@dataclass(frozen=True, eq=False)
class CompiledMixer:
    """One mixer. compiled: as _CUDA has it. shapes: of the four products in their order. slots: of its states."""

    compiled: object
    in_proj: DeviceLinear
    shapes: tuple[ProductShape, ...]
    slots: int


def compiled_mixer(
    norm: PreNorm, weights: MixerWeights[DeviceLinear], ssm: torch.Tensor, conv: torch.Tensor
) -> CompiledMixer | None:
    """ssm (slots, n, d), conv (slots, w - 1, d). None for weights that the ops alone take: without chains, or with
    biases of the projections. ValueError for states that are not the mixer's."""
    if not _is_plain(norm, weights):
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
    return CompiledMixer(compiled, w.in_proj, shapes, min(ssm.shape[0], conv.shape[0]))


class CompiledMixers:
    """Mixers of one device, one after the other."""

    def __init__(self, mixers: Sequence[CompiledMixer | None]) -> None:
        known = [mixer for mixer in mixers if mixer is not None]
        are_alike = len(known) == len(mixers) and len({mixer.shapes for mixer in known}) == 1
        self._first = known[0] if are_alike else None
        self._compiled = [mixer.compiled for mixer in known]
        self._slots = min((mixer.slots for mixer in known), default=0)

    def __call__(self, residual: Residual, batch: DeviceBatch) -> bool:
        """Run them, each as DeviceMixer does. False, and nothing is done, where the ops are to be called: for mixers
        of which one is not compiled or has another shape, for products whose kernel is yet to be found, and for
        arguments that the ops refuse."""
        first, rows, sums = self._first, batch.num_tokens, residual.sum
        if first is None or not self._fit(first.in_proj, sums, batch):
            return False
        chains = first.in_proj.chains_for(rows)
        if chains is None:
            return False
        kernels = [chains.kernel(shape, rows) for shape in first.shapes]
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


def _is_plain(norm: PreNorm, weights: MixerWeights[DeviceLinear]) -> bool:
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
        all(part.chains is not None for part in projections)
        and len({part.dtype for part in projections}) == 1
        and w.in_bias is None
        and w.out_bias is None
        and 1 <= w.conv_weight.shape[-1] <= extension().MOST_TAPS
        and 1 <= n <= extension().MOST_STATES
        and all(_is_parameter(tensor, shape, w.A.device) for tensor, shape in parameters)
        # dt, the first columns of x_proj's product, is read where it lies
        and (w.norms is not None or (r + 2 * n) * w.dt_proj.dtype.itemsize % ALIGNMENT == 0)
    )


def _is_parameter(tensor: torch.Tensor | None, shape: tuple[int, ...], device: torch.device) -> bool:
    if tensor is None:
        return True
    lies = tensor.shape == shape and tensor.is_contiguous()
    return lies and tensor.dtype == torch.float32 and tensor.device == device


def _shape(packed: DeviceLinear, out_dtype: torch.dtype, is_packed: bool) -> ProductShape:
    return ProductShape(packed.out_features, packed.in_features, packed.pieces, packed.dtype, out_dtype, is_packed)


def _projection(packed: DeviceLinear) -> tuple[int, int, int, int]:
    return packed.weight.data_ptr(), packed.out_features, packed.in_features, packed.pieces
