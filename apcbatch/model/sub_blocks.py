"""The sub-blocks that a model's layers are made of: each has a norm's name, its own name, and its kind.

torch is imported only when a sub-block is loaded. To add a kind, write a module in this package with its SubBlockKind,
and for each device a module and an entry of the backend's `kinds` (apcbatch.kernels.backend.KindOnDevice). A family
says which sub-blocks its layers have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from apcbatch.layout import StatePart
from apcbatch.model.hf_config import ModelConfig

if TYPE_CHECKING:
    import torch

    from apcbatch.kernels.backend import Backend, FusedSubBlock
    from apcbatch.kernels.layer import PreNorm, Residual
    from apcbatch.model.batch import Batch
    from apcbatch.model.tensor_source import TensorSource

    StateTensors = Mapping[str, torch.Tensor]


class LoadedSubBlock(Protocol):
    """Sub-block with its weights. A call norms the residual, reads and writes the batch's states, and stores its output
    as the residual's delta. part: its fused form on the backend (apcbatch.kernels.backend.StackEntry); None if the
    backend has none; the model's passes then run op by op."""

    @property
    def part(self) -> Any | None: ...

    def __call__(self, residual: Residual, batch: Batch, /) -> None: ...


def _no_state(config: ModelConfig, layer: int, dtype: str) -> tuple[StatePart, ...]:
    return ()


def _no_sizes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {}


@dataclass(frozen=True)
class SubBlockKind:
    """A kind of sub-block: the state that it keeps, and how to load it.

    name: the backends' name for it. load(config, source, norm, state): returns the sub-block with the tensors of
    `source`, on its backend; norm: the norm at its beginning; state: the layer's part of the arena, by role.
    state(config, layer, dtype): the parts of the layer's state, in a model of that dtype. sizes(config): tensor name in
    the sub-block -> shape, for the tensors that determine the sizes of the state.
    """

    name: str
    load: Callable[[ModelConfig, TensorSource, PreNorm, StateTensors], LoadedSubBlock]
    state: Callable[[ModelConfig, int, str], tuple[StatePart, ...]] = _no_state
    sizes: Callable[[ModelConfig], dict[str, tuple[int, ...]]] = _no_sizes


@dataclass(frozen=True)
class SubBlock:
    """A sub-block of a layer: x + f(norm(x)). norm, name: tensor names in the layer, of the norm and of the sub-block.

    Consecutive sub-blocks with the same norm run in parallel: x + f(norm(x)) + g(norm(x)). So a layer of Jamba is
    (input_layernorm, mamba), (pre_ff_layernorm, feed_forward); one with attention in parallel to Mamba begins with
    (input_layernorm, mamba), (input_layernorm, self_attn).
    """

    norm: str
    name: str
    kind: SubBlockKind


@dataclass(frozen=True)
class Fused:
    """A loaded sub-block that runs as one fused call on every backend."""

    backend: Backend
    part: FusedSubBlock

    def __call__(self, residual: Residual, batch: Batch) -> None:
        self.backend.run_sub_block(self.part, residual, batch.ragged)
