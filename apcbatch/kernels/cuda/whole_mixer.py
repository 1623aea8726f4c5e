"""A Mamba mixer on a CUDA device whose ops are launched by one call, so that the host is soon done with a layer.

Must not know: models, how the ops compute, how the library's kernels are chosen. Invariant: what is launched is what
the ops launch one by one (apcbatch.kernels.cuda.mixer), and so are the bits.
"""

from __future__ import annotations

from typing import Any

import torch

from apcbatch.kernels.arguments import address, slot_stride
from apcbatch.kernels.cuda.batch import DeviceBatch
from apcbatch.kernels.cuda.chains import ProductShape
from apcbatch.kernels.cuda.extension import ALIGNMENT, DTYPE_CODES, current_stream, extension
from apcbatch.kernels.cuda.linear import DeviceLinear
from apcbatch.kernels.layer import MixerWeights, PreNorm, Residual


class WholeMixer:
    """norm, weights, ssm (slots, n, d), conv (slots, w - 1, d): of one mixer."""

    def __init__(
        self, norm: PreNorm, weights: MixerWeights[DeviceLinear], ssm: torch.Tensor, conv: torch.Tensor
    ) -> None:
        self._device, self._slots = ssm.device, min(ssm.shape[0], conv.shape[0])
        self._chains = weights.in_proj.chains if _is_plain(norm, weights) else None
        self._mixer: Any = None if self._chains is None else _mixer(norm, weights, ssm, conv)
        dtype, dt_is_packed = weights.in_proj.dtype, weights.norms is not None
        self._hidden = weights.in_proj.in_features
        self._shapes = (
            _shape(weights.in_proj, dtype, True),
            _shape(weights.x_proj, dtype, True),
            _shape(weights.dt_proj, dtype, dt_is_packed),
            _shape(weights.out_proj, torch.float32, True),
        )

    def __call__(self, residual: Residual, batch: DeviceBatch) -> bool:
        """Run it, as DeviceMixer does. False, and nothing is done, where the ops are to be called: for weights without
        chains, or with biases of the projections, for products whose kernel is yet to be found, and for arguments that
        the ops refuse."""
        chains, rows, sums = self._chains, batch.num_tokens, residual.sum
        if chains is None or not self._fit(sums, batch):
            return False
        kernels = [chains.kernel(shape, rows) for shape in self._shapes]
        if None in kernels:
            return False
        size = self._mixer.workspace_bytes(rows, kernels)
        workspace = torch.empty(size, dtype=torch.uint8, device=self._device)
        left = torch.empty_like(sums)
        delta = residual.delta.data_ptr() if residual.has_delta else 0
        pointers = sums.data_ptr(), delta, left.data_ptr(), workspace.data_ptr()
        self._mixer.run(batch.params, *pointers, kernels, current_stream())
        residual.leave(left)
        return True

    def _fit(self, sums: torch.Tensor, batch: DeviceBatch) -> bool:
        return (
            sums.shape == (batch.num_tokens, self._hidden)
            and batch.num_tokens > 0
            and sums.dtype == torch.float32
            and sums.is_contiguous()
            and batch.max_slot < self._slots
            and sums.device == self._device
            and torch.cuda.current_device() == self._device.index
        )


def _is_plain(norm: PreNorm, weights: MixerWeights[DeviceLinear]) -> bool:
    """Whether the compiled mixer is made for such weights."""
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
        all(part.exact and part.chains is not None and part.chains.takes(part.weight) for part in projections)
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


def _mixer(norm: PreNorm, weights: MixerWeights[DeviceLinear], ssm: torch.Tensor, conv: torch.Tensor) -> object:
    """As _CUDA has it. ValueError for states that are not the mixer's."""
    w, (n, d), width = weights, weights.A.shape, weights.conv_weight.shape[1]
    dtype, float32 = w.in_proj.dtype, DTYPE_CODES[torch.float32]
    inner = None if w.norms is None else [(address(part), w.norm_eps) for part in w.norms]
    return extension().Mixer(
        dtype=DTYPE_CODES[dtype],
        in_proj=_projection(w.in_proj),
        x_proj=_projection(w.x_proj),
        dt_proj=_projection(w.dt_proj),
        out_proj=_projection(w.out_proj),
        norm=(norm.weight.data_ptr(), norm.eps),
        inner_norms=inner,
        conv_weight=(w.conv_weight.data_ptr(), width, float32),
        conv_bias=address(w.conv_bias),
        conv_state=(conv.data_ptr(), slot_stride(conv, (width - 1, d), dtype, ssm.device), DTYPE_CODES[dtype]),
        A=w.A.data_ptr(),
        D=w.D.data_ptr(),
        dt_bias=w.dt_bias.data_ptr(),
        ssm_state=(ssm.data_ptr(), slot_stride(ssm, (n, d), torch.float32, ssm.device), float32),
        d_inner=d,
        d_state=n,
        width=width,
    )


def _shape(packed: DeviceLinear, out_dtype: torch.dtype, is_packed: bool) -> ProductShape:
    return ProductShape(packed.out_features, packed.in_features, packed.pieces, packed.dtype, out_dtype, is_packed)


def _projection(packed: DeviceLinear) -> tuple[int, int, int, int]:
    return packed.weight.data_ptr(), packed.out_features, packed.in_features, packed.pieces
