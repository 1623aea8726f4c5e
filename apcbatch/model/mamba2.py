"""The Mamba-2 mixer.

Dao and Gu, "Transformers are SSMs", arXiv 2405.21060, section 7. Each form of its gated norm (Norm) is a SubBlockKind.
torch is imported only when a mixer is loaded. The family's config has the fields of Mamba2Sizes as mamba2_heads (H),
mamba2_head_dim (P), mamba2_groups (G), and time_step_limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from apcbatch.layout import CONV, SSD, StatePart, value_lanes
from apcbatch.model.hf_config import ModelConfig
from apcbatch.model.sub_blocks import Fused, SubBlockKind

if TYPE_CHECKING:
    from apcbatch.kernels.layer import PreNorm
    from apcbatch.model.sub_blocks import StateTensors
    from apcbatch.model.tensor_source import TensorSource

# Whether the gate silu(z) is multiplied before the norm, after it, or without a norm.
Norm = Literal["gate_first", "norm_first", "none"]


@dataclass(frozen=True)
class Mamba2Sizes:
    """Sizes of a mixer: heads of head_dim columns, groups of B and C with d_state columns, taps of the convolution."""

    heads: int
    head_dim: int
    groups: int
    d_state: int
    width: int

    @staticmethod
    def of(config: ModelConfig) -> Mamba2Sizes:
        """Return the sizes in the config of a family with Mamba-2 mixers."""
        fields: Any = config
        return Mamba2Sizes(
            fields.mamba2_heads, fields.mamba2_head_dim, fields.mamba2_groups, config.d_state, config.d_conv
        )

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

    @property
    def projected(self) -> int:
        """Rows of in_proj: those of C, B, x, z and dt."""
        return self.channels + self.inner + self.heads


def _load(
    kind: str, form: Norm, config: ModelConfig, source: TensorSource, norm: PreNorm, state: StateTensors
) -> Fused:
    """Load a mixer. state: this layer's ssd (slots, H, P / lanes, N, lanes) and conv (slots, w - 1, 2 G N + H P), whose
    channels are those of C, B and x in this order."""
    import torch

    from apcbatch.kernels.layer import Mamba2Weights

    fields: Any = config
    sizes, h = Mamba2Sizes.of(config), config.hidden_size
    inner, states, heads = sizes.inner, sizes.states, sizes.heads
    in_proj = source.take("in_proj.weight", (sizes.projected, h))
    z, x, B, C, dt = torch.split(in_proj, [inner, inner, states, states, heads])

    def channels(tensor: torch.Tensor) -> torch.Tensor:
        """Reorder the channels of a tensor of the convolution, which the checkpoint has as x, B, C."""
        x, B, C = torch.split(tensor.float(), [inner, states, states])
        return torch.cat([C, B, x])

    bias = source.take("conv1d.bias", (sizes.channels,)) if config.conv_bias else None
    weights = Mamba2Weights(
        in_proj=source.pack_parts(C=C, B=B, x=x, z=z, dt=dt),
        out_proj=source.packed_output("out_proj", h, inner),
        groups=sizes.groups,
        conv_weight=channels(source.take("conv1d.weight", (sizes.channels, 1, sizes.width)).squeeze(1)),
        conv_bias=None if bias is None else channels(bias),
        A=-torch.exp(source.take("A_log", (heads,)).double()).float(),
        D=source.vector("D", heads),
        dt_bias=source.vector("dt_bias", heads),
        dt_limits=fields.time_step_limit,
        norm=None if form == "none" else source.vector("norm.weight", inner),
        norm_eps=config.norm_eps,
        gate_first=form == "gate_first",
    )
    part = source.backend.sub_block(kind, norm, weights, state[SSD.name], state[CONV.name])
    return Fused(source.backend, part)


def _state(config: ModelConfig, layer: int, dtype: str) -> tuple[StatePart, ...]:
    sizes = Mamba2Sizes.of(config)
    lanes = value_lanes(sizes.d_state, sizes.head_dim)
    return (
        SSD.part(layer, (sizes.heads, sizes.head_dim // lanes, sizes.d_state, lanes), dtype),
        CONV.part(layer, (sizes.width - 1, sizes.channels), dtype),
    )


def _sizes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    sizes = Mamba2Sizes.of(config)
    return {
        "conv1d.weight": (sizes.channels, 1, sizes.width),
        "A_log": (sizes.heads,),
        "out_proj.weight": (config.hidden_size, sizes.inner),
    }


def _mamba2(name: str, form: Norm) -> SubBlockKind:
    return SubBlockKind(name, partial(_load, name, form), _state, _sizes)


MAMBA2 = _mamba2("mamba2", "gate_first")
NORM_FIRST_MAMBA2 = _mamba2("norm_first_mamba2", "norm_first")
NORMLESS_MAMBA2 = _mamba2("normless_mamba2", "none")
