"""The gated delta net mixer of Qwen3.5 and Qwen3-Next.

Yang, Kautz and Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464, section 3.4. torch is imported only when a mixer
is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from apcbatch.layout import CONV, DELTA, StatePart, value_lanes
from apcbatch.model.sub_blocks import Fused, SubBlockKind

if TYPE_CHECKING:
    import torch

    from apcbatch.kernels.layer import PreNorm
    from apcbatch.model.sub_blocks import StateTensors
    from apcbatch.model.tensor_source import TensorSource


@dataclass(frozen=True, kw_only=True)
class DeltaNet(SubBlockKind):
    """key_heads (Hk) of key_dim (K) columns, value_heads (Hv) of value_dim (V) columns, d_conv (w) taps of the
    convolution. is_grouped: whether the checkpoint has the projections in two tensors that are grouped by key head."""

    name = "delta"
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    d_conv: int
    is_grouped: bool

    @property
    def keys(self) -> int:
        """Columns of q; k has as many."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Columns of v; z has as many."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Columns of q, k and v, over which the convolution runs."""
        return 2 * self.keys + self.values

    def load(self, source: TensorSource, norm: PreNorm, state: StateTensors) -> Fused:
        """Load a mixer. state: this layer's delta (slots, Hv, V / lanes, K, lanes) and conv (slots, w - 1, 2 Hk K + Hv
        V)."""
        import torch

        from apcbatch.kernels.layer import DeltaNetWeights

        h = len(norm.weight)
        conv_weight = source.take("conv1d.weight", (self.channels, 1, self.d_conv))
        in_proj = self._grouped_in_proj(source, h) if self.is_grouped else self._in_proj(source, h)
        weights = DeltaNetWeights(
            in_proj=source.pack(torch.cat(in_proj)),
            out_proj=source.packed_output("out_proj", h, self.values),
            key_heads=self.key_heads,
            conv_weight=conv_weight.float().squeeze(1).contiguous(),
            A=-torch.exp(source.take("A_log", (self.value_heads,)).double()).float(),
            dt_bias=source.vector("dt_bias", self.value_heads),
            norm=source.vector("norm.weight", self.value_dim),
            norm_eps=norm.eps,
        )
        return self.fused(source, norm, weights, state[DELTA.name], state[CONV.name])

    def _in_proj(self, source: TensorSource, h: int) -> list[torch.Tensor]:
        """Return the rows (rows, h) of q, k and v together, of z, b and a, from Qwen3.5's tensors."""
        rows = {"qkv": self.channels, "z": self.values, "b": self.value_heads, "a": self.value_heads}
        return [source.take(f"in_proj_{name}.weight", (count, h)) for name, count in rows.items()]

    def _grouped_in_proj(self, source: TensorSource, h: int) -> list[torch.Tensor]:
        """Return the rows (rows, h) of q, k, v, z, b and a, from Qwen3-Next's two tensors, grouped by key head: the
        first has the rows of q, k, v and z of each group, the second those of b and a."""
        import torch

        groups = self.key_heads
        keys, values, heads = self.key_dim, self.values // groups, self.value_heads // groups
        qkvz = source.take("in_proj_qkvz.weight", (2 * self.keys + 2 * self.values, h)).view(groups, -1, h)
        ba = source.take("in_proj_ba.weight", (2 * self.value_heads, h)).view(groups, -1, h)
        parts = (
            *torch.split(qkvz, [keys, keys, values, values], 1),
            *torch.split(ba, heads, 1),
        )  # (Hk, rows of a key head, h) each
        return [part.reshape(-1, h) for part in parts]

    def state(self, layer: int, dtype: str) -> tuple[StatePart, ...]:
        lanes = value_lanes(self.key_dim, self.value_dim)
        return (
            DELTA.part(layer, (self.value_heads, self.value_dim // lanes, self.key_dim, lanes), dtype),
            CONV.part(layer, (self.d_conv - 1, self.channels), dtype),
        )

    def sizes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        return {
            "conv1d.weight": (self.channels, 1, self.d_conv),
            "A_log": (self.value_heads,),
            "norm.weight": (self.value_dim,),
        }

    @property
    def fields(self) -> dict[str, Any]:
        return {
            "linear_num_key_heads": self.key_heads,
            "linear_num_value_heads": self.value_heads,
            "linear_key_head_dim": self.key_dim,
            "linear_value_head_dim": self.value_dim,
            "linear_conv_kernel_dim": self.d_conv,
        }
