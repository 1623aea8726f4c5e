"""The blocks that layers are made of, as far as they are known before any weight is read: mixers, feed-forward parts.

Must not know: families, requests; torch, before a block is loaded. A family says which blocks its layers have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from apcbatch.layout import CONV, KV, SSM, StatePart
from apcbatch.model.hf_config import ModelConfig

if TYPE_CHECKING:
    import torch

    from apcbatch.kernels.layer import PreNorm, Residual
    from apcbatch.kernels.ops import FeedForward
    from apcbatch.kernels.ops import Mixer as MixerPart
    from apcbatch.model.batch import Batch
    from apcbatch.model.tensor_source import TensorSource

    Parts = Mapping[str, torch.Tensor]


class Mixer(Protocol):
    """A loaded mixer: norms the residual and leaves what is to be added to it, over the states that the batch names.
    part: the mixer as the kernels have it, None where it is made of several operations."""

    @property
    def part(self) -> MixerPart | None: ...

    def __call__(self, residual: Residual, batch: Batch, /) -> None: ...


@dataclass(frozen=True)
class MixerKind:
    """What a mixer keeps, and how it is made.

    state(config, layer, dtype): the parts of the layer's state, in a model of that dtype. sizes(config): shapes of the
    tensors that fix the sizes of the state, by their names in the mixer. load(config, source, norm, parts): the
    mixer of these tensors, for the source's backend; norm: the layer's, which it begins with; parts: the layer's part
    of the arena, by role.
    """

    state: Callable[[ModelConfig, int, str], tuple[StatePart, ...]]
    sizes: Callable[[ModelConfig], dict[str, tuple[int, ...]]]
    load: Callable[[ModelConfig, TensorSource, PreNorm, Parts], Mixer]


@dataclass(frozen=True)
class FeedForwardKind:
    """load(config, source, norm): as a mixer's, without a state."""

    load: Callable[[ModelConfig, TensorSource, PreNorm], FeedForward]


def _mamba_state(config: ModelConfig, layer: int, dtype: str) -> tuple[StatePart, ...]:
    return (
        SSM.part(layer, (config.d_state, config.d_inner), dtype),
        CONV.part(layer, (config.d_conv - 1, config.d_inner), dtype),
    )


def _mamba_sizes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    d = config.d_inner
    return {"A_log": (d, config.d_state), "conv1d.weight": (d, 1, config.d_conv)}


def _load_mamba(config: ModelConfig, source: TensorSource, norm: PreNorm, parts: Parts) -> Mixer:
    from apcbatch.model.mamba import MambaMixer

    return MambaMixer(config, source, norm, parts[SSM.name], parts[CONV.name])


def _attention_state(config: ModelConfig, layer: int, dtype: str) -> tuple[StatePart, ...]:
    return (KV.part(layer, (2, None, config.num_key_value_heads, config.head_dim), dtype),)


def _attention_sizes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {"k_proj.weight": (config.num_key_value_heads * config.head_dim, config.hidden_size)}


def _load_attention(config: ModelConfig, source: TensorSource, norm: PreNorm, parts: Parts) -> Mixer:
    from apcbatch.model.attention import AttentionMixer

    k_cache, v_cache = parts[KV.name]
    return AttentionMixer(config, source, norm, k_cache, v_cache)


def _load_mlp(config: ModelConfig, source: TensorSource, norm: PreNorm) -> FeedForward:
    from apcbatch.model.moe import load_mlp

    return load_mlp(config, source, norm)


def _load_mixture(config: ModelConfig, source: TensorSource, norm: PreNorm) -> FeedForward:
    from apcbatch.model.moe import load_mixture

    return load_mixture(config, source, norm)


MAMBA = MixerKind(_mamba_state, _mamba_sizes, _load_mamba)
ATTENTION = MixerKind(_attention_state, _attention_sizes, _load_attention)
MLP = FeedForwardKind(_load_mlp)
MIXTURE = FeedForwardKind(_load_mixture)
