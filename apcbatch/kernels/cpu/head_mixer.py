"""Fused gated delta net and Mamba-2 mixers on the CPU: pre-norm and mixer of one layer in one call.

Invariant: the bits equal those of the ops called in this order: add_rms_norm_, in_proj, causal_conv, head_scan,
gated_norm, out_proj. In a bfloat16 model values are rounded after in_proj, after the convolution's SiLU and after
the gated norm; between these everything is float32. Weights and states are checked once, when a mixer is made.
"""

from __future__ import annotations

import torch

from apcbatch import _C
from apcbatch.kernels.arguments import DTYPE_CODES, address, head_scan_params, require_parameter, slot_stride
from apcbatch.kernels.cpu.linear import PackedLinear
from apcbatch.kernels.cpu.ops import MAX_CONV_WIDTH
from apcbatch.kernels.cpu.sub_block import FusedSubBlock, norm_plan, require_projections
from apcbatch.kernels.layer import DeltaNetWeights, Mamba2Weights, PreNorm


class FusedHeadMixer(FusedSubBlock):
    """Mixer of one layer over heads with matrix states, bound to its weights and state slots: a gated delta net or, by
    its weights, Mamba-2. A call stores the output, (t, h), as the residual's delta.

    state: (num_slots, Hv, V / lanes, K, lanes) float32, the recurrent states, the columns of v in blocks of `lanes`.
    conv: (num_slots, w - 1, 2 Hk K + Hv V) in the projections' dtype, the last inputs of the convolution. Both with any
    slot stride. Letters: see DeltaNetWeights; in Mamba-2, Hk is G, K is N, Hv is H and V is P. Raises ValueError if a
    shape or a dtype does not fit.
    """

    def __init__(
        self,
        norm: PreNorm,
        weights: DeltaNetWeights[PackedLinear] | Mamba2Weights[PackedLinear],
        state: torch.Tensor,
        conv: torch.Tensor,
    ) -> None:
        self._kept_alive = norm, weights, state, conv  # the plan below holds their addresses
        self.hidden, dtype = weights.in_proj.in_features, weights.in_proj.dtype
        channels, width = weights.conv_weight.shape
        self.num_slots = min(state.shape[0], conv.shape[0])
        self.plan = _C.HeadMixer(
            norm=norm_plan(norm, self.hidden),
            scan=_scan_params(weights, state),
            in_proj=weights.in_proj.plan,
            out_proj=weights.out_proj.plan,
            width=width,
            conv_weight=weights.conv_weight.data_ptr(),
            conv_bias=address(weights.conv_bias) if isinstance(weights, Mamba2Weights) else 0,
            head_norm=address(weights.norm),
            head_norm_eps=weights.norm_eps,
            gate_first=isinstance(weights, Mamba2Weights) and weights.gate_first,
            conv=(conv.data_ptr(), slot_stride(conv, (width - 1, channels), dtype), DTYPE_CODES[dtype]),
        )


def _scan_params(
    w: DeltaNetWeights[PackedLinear] | Mamba2Weights[PackedLinear], state: torch.Tensor
) -> _C.HeadScanParams:
    """Check the weights of a mixer against each other and its state, and pack the constants of its recurrence. Raises
    ValueError if a shape or a dtype does not fit."""
    value_heads, dtype = w.A.numel(), w.in_proj.dtype
    channels, width = w.conv_weight.shape[0], w.conv_weight.shape[-1]
    if isinstance(w, Mamba2Weights):
        shown, key_heads, gates, value_dim = "C and B", w.groups, 1, w.out_proj.in_features // max(1, value_heads)
        D, limits, bias, num_norm = w.D, w.dt_limits, w.conv_bias, value_heads * value_dim
    else:
        shown, key_heads, gates, value_dim = "q and k", w.key_heads, 2, w.norm.numel()
        D, limits, bias, num_norm = None, (0.0, 0.0), None, value_dim
    values = value_heads * value_dim
    keys = (channels - values) // 2  # columns of q, and of k
    if not 1 <= width <= MAX_CONV_WIDTH:
        raise ValueError(f"a mixer has 1 to {MAX_CONV_WIDTH} taps; this one {width}")
    if key_heads < 1 or value_heads % key_heads or keys < 1 or keys % key_heads or 2 * keys + values != channels:
        raise ValueError(
            f"the convolution must have the channels of {shown}, {key_heads} heads each, and of {value_heads} heads of "
            f"{value_dim}, a multiple of the former heads; it has {channels}"
        )
    rows, h = channels + values + gates * value_heads, w.in_proj.in_features
    require_projections(dtype, in_proj=(w.in_proj, rows, h), out_proj=(w.out_proj, h, values))
    require_parameter(w.conv_weight, "conv_weight", (channels, width), torch.float32)
    if bias is not None:
        require_parameter(bias, "conv_bias", (channels,), torch.float32)
    if w.norm is not None:
        require_parameter(w.norm, "norm", (num_norm,), torch.float32)
    heads = (key_heads, keys // key_heads), (value_heads, value_dim)
    params: _C.HeadScanParams = head_scan_params(_C, dtype, *heads, w.A, w.dt_bias, state, D, limits)
    return params
