"""The Mamba-1 mixer of Mamba, Falcon Mamba and Jamba.

Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", arXiv 2312.00752, section 3.2, algorithm
2. torch is imported only when a mixer is loaded. Dimension letters: d d_inner, n d_state, w taps, r dt_rank, h hidden.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from apcbatch.layout import CONV, SSM, StatePart
from apcbatch.model.sub_blocks import Fused, SubBlockKind

if TYPE_CHECKING:
    import torch

    from apcbatch.kernels.layer import PreNorm
    from apcbatch.model.sub_blocks import StateTensors
    from apcbatch.model.tensor_source import TensorSource

    Norms = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]

MixerNorm = Literal["none", "weightless", "weighted"]


@dataclass(frozen=True, kw_only=True)
class Mamba(SubBlockKind):
    """d_conv (w): taps of the convolution. mixer_norm: whether dt, B and C have RMS norms, with or without weights."""

    name = "mamba"
    d_inner: int
    d_state: int
    d_conv: int
    dt_rank: int
    conv_bias: bool
    proj_bias: bool
    mixer_norm: MixerNorm
    mixer_norm_eps: float

    def load(self, source: TensorSource, norm: PreNorm, state: StateTensors) -> Fused:
        """Load a mixer. state: this layer's ssm (slots, n, d) and conv (slots, w - 1, d)."""
        import torch

        from apcbatch.kernels.layer import MambaWeights

        h, d, n, r = len(norm.weight), self.d_inner, self.d_state, self.dt_rank
        conv_weight = source.take("conv1d.weight", (d, 1, self.d_conv))
        a_log = source.take("A_log", (d, n))
        weights = MambaWeights(
            in_proj=source.packed("in_proj", 2 * d, h),
            x_proj=source.packed("x_proj", r + 2 * n, d),
            dt_proj=source.packed("dt_proj", d, r),
            out_proj=source.packed_output("out_proj", h, d),
            in_bias=source.vector("in_proj.bias", 2 * d) if self.proj_bias else None,
            out_bias=source.vector("out_proj.bias", h) if self.proj_bias else None,
            conv_weight=conv_weight.float().squeeze(1).contiguous(),
            conv_bias=source.vector("conv1d.bias", d) if self.conv_bias else None,
            A=-torch.exp(a_log.float()).t().contiguous(),  # (d, n) -> (n, d)
            D=source.vector("D", d),
            dt_bias=source.vector("dt_proj.bias", d),
            norms=self._norms(source),
            norm_eps=self.mixer_norm_eps,
        )
        return self.fused(source, norm, weights, state[SSM.name], state[CONV.name])

    def _norms(self, source: TensorSource) -> Norms | None:
        """Return the weights of the RMS norms of dt, B and C, each None if the norms have no weights; None if there
        are no such norms."""
        if self.mixer_norm == "none":
            return None
        if self.mixer_norm == "weightless":
            return None, None, None
        dt, b, c = (
            source.vector(f"{name}_layernorm.weight", size)
            for name, size in (("dt", self.dt_rank), ("b", self.d_state), ("c", self.d_state))
        )
        return dt, b, c

    def state(self, layer: int, dtype: str) -> tuple[StatePart, ...]:
        return (
            SSM.part(layer, (self.d_state, self.d_inner), dtype),
            CONV.part(layer, (self.d_conv - 1, self.d_inner), dtype),
        )

    def sizes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        return {"A_log": (self.d_inner, self.d_state), "conv1d.weight": (self.d_inner, 1, self.d_conv)}

    @property
    def fields(self) -> dict[str, Any]:
        return asdict(self)
