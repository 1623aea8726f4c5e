"""The gated delta net mixer of Qwen3.5 and Qwen3-Next.

Yang, Kautz and Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464, section 3.4. torch is imported only when a mixer
is loaded. The family's config has the fields linear_num_key_heads (Hk), linear_key_head_dim (K),
linear_num_value_heads (Hv), linear_value_head_dim (V) and linear_conv_kernel_dim (w).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from apcbatch.layout import CONV, DELTA, StatePart, value_lanes
from apcbatch.model.hf_config import ModelConfig
from apcbatch.model.sub_blocks import Fused, SubBlockKind

if TYPE_CHECKING:
    import torch

    from apcbatch.kernels.layer import PreNorm
    from apcbatch.model.sub_blocks import StateTensors
    from apcbatch.model.tensor_source import TensorSource


@dataclass(frozen=True)
class DeltaNetSizes:
    """Sizes of a mixer: heads, columns of a head, taps of the convolution."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int

    @staticmethod
    def of(config: ModelConfig) -> DeltaNetSizes:
        """Return the sizes in the config of a family with delta nets."""
        fields: Any = config
        return DeltaNetSizes(
            key_heads=fields.linear_num_key_heads,
            value_heads=fields.linear_num_value_heads,
            key_dim=fields.linear_key_head_dim,
            value_dim=fields.linear_value_head_dim,
            width=fields.linear_conv_kernel_dim,
        )

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

    @property
    def projected(self) -> int:
        """Rows of in_proj: those of q, k, v, z, b and a."""
        return self.channels + self.values + 2 * self.value_heads


InProj = Callable[[DeltaNetSizes, "TensorSource", int], "list[torch.Tensor]"]
"""in_proj(sizes, source, h): the rows of q, k, v, z, b and a, (rows, h) each, of neighbours also several together."""


def _in_proj(sizes: DeltaNetSizes, source: TensorSource, h: int) -> list[torch.Tensor]:
    """Take the rows from Qwen3.5's tensors."""
    heads = sizes.value_heads
    rows = {"qkv": sizes.channels, "z": sizes.values, "b": heads, "a": heads}
    return [source.take(f"in_proj_{name}.weight", (count, h)) for name, count in rows.items()]


def _grouped_in_proj(sizes: DeltaNetSizes, source: TensorSource, h: int) -> list[torch.Tensor]:
    """Take the rows from Qwen3-Next's two tensors, which are grouped by key head: the first has the rows of q, k, v and
    z of each group, the second those of b and a."""
    import torch

    keys, values, heads = sizes.key_dim, sizes.values // sizes.key_heads, sizes.value_heads // sizes.key_heads
    qkvz = source.take("in_proj_qkvz.weight", (2 * sizes.keys + 2 * sizes.values, h)).view(sizes.key_heads, -1, h)
    ba = source.take("in_proj_ba.weight", (2 * sizes.value_heads, h)).view(sizes.key_heads, -1, h)
    parts = (
        *torch.split(qkvz, [keys, keys, values, values], 1),
        *torch.split(ba, heads, 1),
    )  # (Hk, rows of a key head, h) each
    return [part.reshape(-1, h) for part in parts]


def _load(in_proj: InProj, config: ModelConfig, source: TensorSource, norm: PreNorm, state: StateTensors) -> Fused:
    """Load a mixer. state: this layer's delta (slots, Hv, V / lanes, K, lanes) and conv (slots, w - 1, 2 Hk K + Hv
    V)."""
    import torch

    from apcbatch.kernels.layer import DeltaNetWeights

    sizes, h = DeltaNetSizes.of(config), config.hidden_size
    heads, channels, values = sizes.value_heads, sizes.channels, sizes.values
    conv_weight = source.take("conv1d.weight", (channels, 1, sizes.width))
    weights = DeltaNetWeights(
        in_proj=source.pack(torch.cat(in_proj(sizes, source, h))),
        out_proj=source.packed_output("out_proj", h, values),
        key_heads=sizes.key_heads,
        conv_weight=conv_weight.float().squeeze(1).contiguous(),
        A=-torch.exp(source.take("A_log", (heads,)).double()).float(),
        dt_bias=source.vector("dt_bias", heads),
        norm=source.vector("norm.weight", sizes.value_dim),
        norm_eps=config.norm_eps,
    )
    part = source.backend.sub_block(DELTA_NET.name, norm, weights, state[DELTA.name], state[CONV.name])
    return Fused(source.backend, part)


def _state(config: ModelConfig, layer: int, dtype: str) -> tuple[StatePart, ...]:
    sizes = DeltaNetSizes.of(config)
    lanes = value_lanes(sizes.key_dim, sizes.value_dim)
    return (
        DELTA.part(layer, (sizes.value_heads, sizes.value_dim // lanes, sizes.key_dim, lanes), dtype),
        CONV.part(layer, (sizes.width - 1, sizes.channels), dtype),
    )


def _sizes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    sizes = DeltaNetSizes.of(config)
    return {
        "conv1d.weight": (sizes.channels, 1, sizes.width),
        "A_log": (sizes.value_heads,),
        "norm.weight": (sizes.value_dim,),
    }


DELTA_NET = SubBlockKind("delta", partial(_load, _in_proj), _state, _sizes)
GROUPED_DELTA_NET = replace(DELTA_NET, load=partial(_load, _grouped_in_proj))
