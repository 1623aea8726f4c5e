"""Fused Mamba-1 mixer on the CPU: pre-norm and mixer of one layer in one call.

Invariant: the bits equal those of the ops called in this order: add_rms_norm_, in_proj, causal_conv, x_proj, rms_norm
of dt, B and C (only with norms), dt_proj, selective_scan, out_proj. Weights and states are checked once, when a
FusedMamba is made.
"""

from __future__ import annotations

import torch

from apcbatch import _C
from apcbatch.kernels.arguments import DTYPE_CODES, FLOAT32, address, require_parameter, slot_stride
from apcbatch.kernels.cpu.linear import PackedLinear, projection
from apcbatch.kernels.cpu.ops import MAX_CONV_WIDTH, MAX_D_STATE
from apcbatch.kernels.cpu.sub_block import FusedSubBlock, norm_plan, require_projections
from apcbatch.kernels.layer import MambaWeights, PreNorm


class FusedMamba(FusedSubBlock):
    """Mixer of one layer, bound to its weights and state slots. A call stores the output, (t, h), as the residual's
    delta.

    ssm: (num_slots, n, d) float32, the recurrent states. conv: (num_slots, w - 1, d) in the projections' dtype, the
    last inputs of the convolution. Both with any slot stride. Raises ValueError if a shape or a dtype does not fit.
    """

    def __init__(
        self, norm: PreNorm, weights: MambaWeights[PackedLinear], ssm: torch.Tensor, conv: torch.Tensor
    ) -> None:
        _check(weights)
        self._kept_alive = norm, weights, ssm, conv  # the plan below holds their addresses
        self.hidden, dtype = weights.in_proj.in_features, weights.in_proj.dtype
        n, d = weights.A.shape
        width = weights.conv_weight.shape[1]
        self.num_slots = min(ssm.shape[0], conv.shape[0])
        dt_norm, b_norm, c_norm = weights.norms or (None, None, None)
        self.plan = _C.MambaMixer(
            norm=norm_plan(norm, self.hidden),
            in_proj=projection(weights.in_proj, weights.in_bias),
            x_proj=weights.x_proj.plan,
            dt_proj=weights.dt_proj.plan,
            out_proj=projection(weights.out_proj, weights.out_bias),
            d_state=n,
            width=width,
            conv_weight=weights.conv_weight.data_ptr(),
            conv_bias=address(weights.conv_bias),
            A=weights.A.data_ptr(),
            D=weights.D.data_ptr(),
            dt_bias=weights.dt_bias.data_ptr(),
            has_norms=weights.norms is not None,
            dt_norm=address(dt_norm),
            B_norm=address(b_norm),
            C_norm=address(c_norm),
            norm_eps=weights.norm_eps,
            ssm=(ssm.data_ptr(), slot_stride(ssm, (n, d), torch.float32), FLOAT32),
            conv=(conv.data_ptr(), slot_stride(conv, (width - 1, d), dtype), DTYPE_CODES[dtype]),
        )


def _check(w: MambaWeights[PackedLinear]) -> None:
    (n, d), h, dtype = w.A.shape, w.in_proj.in_features, w.in_proj.dtype
    r, width = w.dt_proj.in_features, w.conv_weight.shape[-1]
    if not 1 <= n <= MAX_D_STATE or not 1 <= width <= MAX_CONV_WIDTH:
        raise ValueError(
            f"a mixer has 1 to {MAX_D_STATE} states and 1 to {MAX_CONV_WIDTH} taps; this one {n} and {width}"
        )
    require_projections(
        dtype,
        in_proj=(w.in_proj, 2 * d, h),
        x_proj=(w.x_proj, r + 2 * n, d),
        dt_proj=(w.dt_proj, d, r),
        out_proj=(w.out_proj, h, d),
    )
    vectors = [
        (w.in_bias, "in_bias", (2 * d,)),
        (w.out_bias, "out_bias", (h,)),
        (w.conv_bias, "conv_bias", (d,)),
        (w.conv_weight, "conv_weight", (d, width)),
        (w.A, "A", (n, d)),
        (w.D, "D", (d,)),
        (w.dt_bias, "dt_bias", (d,)),
        *zip(w.norms or (), ("dt_norm", "B_norm", "C_norm"), ((r,), (n,), (n,)), strict=False),
    ]
    for vector, name, shape in vectors:
        if vector is not None:
            require_parameter(vector, name, shape, torch.float32)
