"""The Mamba-2 mixer.

Dao and Gu, "Transformers are SSMs", arXiv 2405.21060, section 7. torch is imported only when a mixer is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from apcbatch.layout import CONV, SSD, StatePart, value_lanes
from apcbatch.model.sub_blocks import Fused, SubBlockKind

if TYPE_CHECKING:
    from apcbatch.kernels.layer import PreNorm
    from apcbatch.model.sub_blocks import StateTensors
    from apcbatch.model.tensor_source import TensorSource

Gate = Literal["gate_first", "norm_first", "no_norm"]


@dataclass(frozen=True, kw_only=True)
class Mamba2(SubBlockKind):
    """Heads (H) of head_dim (P) columns, groups (G) of B and C with d_state (N) columns, d_conv (w) taps of the
    convolution. time_step_limit: least and largest step. gate: whether silu(z) is multiplied before the norm, after it,
    or without a norm."""

    name = "mamba2"
    heads: int
    head_dim: int
    groups: int
    d_state: int
    d_conv: int
    conv_bias: bool
    time_step_limit: tuple[float, float]
    gate: Gate = "gate_first"

    @property
    def inner(self) -> int:
        """Columns of x; z has as many."""
        return self.heads * self.head_dim

    @property
    def states(self) -> int:
        """Columns of B; C has as many."""
        return self.groups * self.d_state

    @property
    def channels(self) -> int:
        """Columns of C, B and x, over which the convolution runs."""
        return 2 * self.states + self.inner

    def load(self, source: TensorSource, norm: PreNorm, state: StateTensors) -> Fused:
        """Load a mixer. state: this layer's ssd (slots, H, P / lanes, N, lanes) and conv (slots, w - 1, 2 G N + H P),
        whose channels are those of C, B and x in this order."""
        import torch

        from apcbatch.kernels.layer import Mamba2Weights

        inner, states, heads, h = self.inner, self.states, self.heads, len(norm.weight)
        in_proj = source.take("in_proj.weight", (self.channels + inner + heads, h))
        z, x, B, C, dt = torch.split(in_proj, [inner, inner, states, states, heads])

        def channels(tensor: torch.Tensor) -> torch.Tensor:
            """Reorder the channels of a tensor of the convolution, which the checkpoint has as x, B, C."""
            x, B, C = torch.split(tensor.float(), [inner, states, states])
            return torch.cat([C, B, x])

        bias = source.take("conv1d.bias", (self.channels,)) if self.conv_bias else None
        weights = Mamba2Weights(
            in_proj=source.pack_parts(C=C, B=B, x=x, z=z, dt=dt),
            out_proj=source.packed_output("out_proj", h, inner),
            groups=self.groups,
            conv_weight=channels(source.take("conv1d.weight", (self.channels, 1, self.d_conv)).squeeze(1)),
            conv_bias=None if bias is None else channels(bias),
            A=-torch.exp(source.take("A_log", (heads,)).double()).float(),
            D=source.vector("D", heads),
            dt_bias=source.vector("dt_bias", heads),
            dt_limits=self.time_step_limit,
            norm=None if self.gate == "no_norm" else source.vector("norm.weight", inner),
            norm_eps=norm.eps,
            gate_first=self.gate == "gate_first",
        )
        return self.fused(source, norm, weights, state[SSD.name], state[CONV.name])

    def state(self, layer: int, dtype: str) -> tuple[StatePart, ...]:
        lanes = value_lanes(self.d_state, self.head_dim)
        return (
            SSD.part(layer, (self.heads, self.head_dim // lanes, self.d_state, lanes), dtype),
            CONV.part(layer, (self.d_conv - 1, self.channels), dtype),
        )

    def sizes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        return {
            "conv1d.weight": (self.channels, 1, self.d_conv),
            "A_log": (self.heads,),
            "out_proj.weight": (hidden, self.inner),
        }

    @property
    def fields(self) -> dict[str, Any]:
        return {
            "d_inner": self.inner,
            "d_state": self.d_state,
            "d_conv": self.d_conv,
            "conv_bias": self.conv_bias,
            "mamba2_heads": self.heads,
            "mamba2_head_dim": self.head_dim,
            "mamba2_groups": self.groups,
            "time_step_limit": self.time_step_limit,
        }
