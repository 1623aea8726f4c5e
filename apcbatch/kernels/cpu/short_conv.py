"""Fused gated short convolutions on the CPU: pre-norm and mixer of one layer in one call.

y = out_proj(C * conv(B * x)). In a bfloat16 model values are rounded after in_proj, after each of the two products and
after the convolution; between these everything is float32. Weights and state are checked once, when a mixer is made.
"""

from __future__ import annotations

import torch

from apcbatch import _C
from apcbatch.kernels.arguments import DTYPE_CODES, require_parameter, slot_stride
from apcbatch.kernels.cpu.linear import PackedLinear
from apcbatch.kernels.cpu.ops import MAX_CONV_WIDTH
from apcbatch.kernels.cpu.sub_block import FusedSubBlock, norm_plan, require_projections
from apcbatch.kernels.layer import PreNorm, ShortConvWeights


class FusedShortConv(FusedSubBlock):
    """Mixer of one layer, bound to its weights and state slots. A call stores the output, (t, h), as the residual's
    delta.

    conv: (num_slots, w - 1, h) in the projections' dtype, any slot stride: the last values of B * x. Raises ValueError
    if a shape or a dtype does not fit.
    """

    def __init__(self, norm: PreNorm, weights: ShortConvWeights[PackedLinear], conv: torch.Tensor) -> None:
        self._kept_alive = norm, weights, conv  # the plan below holds their addresses
        self.hidden, dtype = weights.in_proj.in_features, weights.in_proj.dtype
        width = weights.conv_weight.shape[-1]
        h, in_proj, out_proj = self.hidden, weights.in_proj, weights.out_proj
        require_projections(dtype, in_proj=(in_proj, 3 * h, h), out_proj=(out_proj, h, h))
        if not 1 <= width <= MAX_CONV_WIDTH:
            raise ValueError(f"a mixer has 1 to {MAX_CONV_WIDTH} taps; this one {width}")
        require_parameter(weights.conv_weight, "conv_weight", (self.hidden, width), torch.float32)
        self.num_slots = conv.shape[0]
        self.plan = _C.ShortConv(
            norm=norm_plan(norm, self.hidden),
            in_proj=weights.in_proj.plan,
            out_proj=weights.out_proj.plan,
            width=width,
            conv_weight=weights.conv_weight.data_ptr(),
            conv=(conv.data_ptr(), slot_stride(conv, (width - 1, self.hidden), dtype), DTYPE_CODES[dtype]),
        )
