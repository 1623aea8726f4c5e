"""Fused gated delta net mixer on the CPU: pre-norm and mixer of one layer in one call.

Invariant: the bits equal those of the kernels called in this order: add_rms_norm_, in_proj, causal_conv, delta_rule,
gated_norm, out_proj. In a bfloat16 model values are rounded after in_proj, after the convolution's SiLU and after the
gated norm; between these everything is float32. Weights and states are checked once, when a FusedDeltaNet is made.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from apcbatch import _C
from apcbatch.kernels.arguments import DTYPE_CODES, FLOAT32, require_parameter, slot_stride
from apcbatch.kernels.cpu.linear import PackedLinear
from apcbatch.kernels.cpu.ops import MAX_CONV_WIDTH
from apcbatch.kernels.cpu.sub_block import FusedSubBlock, norm_plan
from apcbatch.kernels.layer import DeltaNetWeights, MatrixProduct, PreNorm, Residual
from apcbatch.kernels.ragged import Ragged


class FusedDeltaNet(FusedSubBlock):
    """Mixer of one layer, bound to its weights and state slots. A call stores the output, (t, h), as the residual's
    delta.

    delta: (num_slots, Hv, V / lanes, K, lanes) float32, the recurrent states, the columns of v in blocks of `lanes`.
    conv: (num_slots, w - 1, 2 Hk K + Hv V) in the projections' dtype, the last inputs of the convolution. Both with any
    slot stride. Letters: see DeltaNetWeights. Raises ValueError if a shape or a dtype does not fit.
    """

    def __init__(
        self, norm: PreNorm, weights: DeltaNetWeights[PackedLinear], delta: torch.Tensor, conv: torch.Tensor
    ) -> None:
        key_dim, lanes = _check(weights, delta)
        self.weights = weights
        self._kept_alive = norm, weights, delta, conv  # the plan below holds their addresses
        self.hidden, dtype = weights.in_proj.in_features, weights.in_proj.dtype
        value_heads, value_dim = len(weights.A), len(weights.norm)
        channels, width = weights.conv_weight.shape
        self.num_slots = min(delta.shape[0], conv.shape[0])
        blocks = value_heads, value_dim // lanes, key_dim, lanes
        self.plan = _C.DeltaMixer(
            norm=norm_plan(norm, self.hidden),
            in_proj=weights.in_proj.plan,
            out_proj=weights.out_proj.plan,
            key_heads=weights.key_heads,
            value_heads=value_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            lanes=lanes,
            width=width,
            conv_weight=weights.conv_weight.data_ptr(),
            A=weights.A.data_ptr(),
            dt_bias=weights.dt_bias.data_ptr(),
            head_norm=weights.norm.data_ptr(),
            head_norm_eps=weights.norm_eps,
            delta=(delta.data_ptr(), slot_stride(delta, blocks, torch.float32), FLOAT32),
            conv=(conv.data_ptr(), slot_stride(conv, (width - 1, channels), dtype), DTYPE_CODES[dtype]),
        )

    def __call__(self, residual: Residual, ragged: Ragged) -> None:
        """Run the mixer; see run_over."""
        self.run_over(residual, ragged)

    def products(self, residual: Residual) -> Iterator[MatrixProduct]:
        """See FusedSubBlock."""
        t = residual.sum.shape[0]
        yield MatrixProduct(t, self.weights.in_proj)
        yield MatrixProduct(t, self.weights.out_proj, torch.float32)


def _check(w: DeltaNetWeights[PackedLinear], delta: torch.Tensor) -> tuple[int, int]:
    """Return K, and the number of columns (lanes) of a block of the state. Raises ValueError if a shape or a dtype does
    not fit."""
    value_heads, value_dim, dtype = w.A.numel(), w.norm.numel(), w.in_proj.dtype
    channels, width = w.conv_weight.shape[0], w.conv_weight.shape[-1]
    values, lanes = value_heads * value_dim, delta.shape[-1]
    keys = (channels - values) // 2  # columns of q, and of k
    if not 1 <= width <= MAX_CONV_WIDTH:
        raise ValueError(f"a mixer has 1 to {MAX_CONV_WIDTH} taps; this one {width}")
    if w.key_heads < 1 or value_heads % w.key_heads or keys < 1 or keys % w.key_heads or 2 * keys + values != channels:
        raise ValueError(
            f"the convolution must have the channels of q and k, {w.key_heads} heads each, and of v, {value_heads} "
            f"heads of {value_dim}, a multiple of the key heads; it has {channels}"
        )
    if lanes == 0 or value_dim % lanes:
        raise ValueError(f"state must have blocks that divide V {value_dim}; it is {tuple(delta.shape)}")
    projections = {
        "in_proj": (w.in_proj, channels + values + 2 * value_heads, w.in_proj.in_features),
        "out_proj": (w.out_proj, w.in_proj.in_features, values),
    }
    for name, (packed, rows, columns) in projections.items():
        if (packed.out_features, packed.in_features, packed.dtype) != (rows, columns, dtype):
            raise ValueError(
                f"{name} must be ({rows}, {columns}) {dtype}; it is ({packed.out_features}, {packed.in_features}) "
                f"{packed.dtype}"
            )
    for vector, name, shape in (
        (w.conv_weight, "conv_weight", (channels, width)),
        (w.A, "A", (value_heads,)),
        (w.dt_bias, "dt_bias", (value_heads,)),
        (w.norm, "norm", (value_dim,)),
    ):
        require_parameter(vector, name, shape, torch.float32)
    return keys // w.key_heads, lanes
