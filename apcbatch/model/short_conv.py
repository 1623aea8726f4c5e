"""The gated short convolution of LFM2, a mixer whose state is its last inputs alone.

Liquid AI, "LFM2 Technical Report", arXiv 2511.23404. torch is imported only when a mixer is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from apcbatch.layout import CONV, StatePart
from apcbatch.model.sub_blocks import Fused, SubBlockKind

if TYPE_CHECKING:
    from apcbatch.kernels.layer import PreNorm
    from apcbatch.model.sub_blocks import StateTensors
    from apcbatch.model.tensor_source import TensorSource


@dataclass(frozen=True)
class ShortConv(SubBlockKind):
    """hidden (h): columns of the residual, over which the convolution runs. d_conv (w): its taps."""

    name = "short_conv"
    hidden: int
    d_conv: int

    def load(self, source: TensorSource, norm: PreNorm, state: StateTensors) -> Fused:
        """Load a mixer. state: this layer's conv (slots, w - 1, h)."""
        from apcbatch.kernels.layer import ShortConvWeights

        h = self.hidden
        weights = ShortConvWeights(
            in_proj=source.packed("in_proj", 3 * h, h),
            out_proj=source.packed_output("out_proj", h, h),
            conv_weight=source.take("conv.weight", (h, 1, self.d_conv)).float().squeeze(1).contiguous(),
        )
        return self.fused(source, norm, weights, state[CONV.name])

    def state(self, layer: int, dtype: str) -> tuple[StatePart, ...]:
        return (CONV.part(layer, (self.d_conv - 1, self.hidden), dtype),)

    def sizes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        return {"conv.weight": (hidden, 1, self.d_conv)}

    @property
    def fields(self) -> dict[str, Any]:
        return {"d_conv": self.d_conv}
