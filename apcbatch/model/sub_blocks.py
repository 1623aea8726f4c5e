"""The sub-blocks that a model's layers are made of: each has a norm's name, its own name, and its kind with its sizes.

torch is imported only when a sub-block is loaded. To add a kind, write a module in this package with its SubBlockKind,
and for each device a module and an entry of the backend's `kinds` (apcbatch.kernels.backend.KindOnDevice). A family
makes the kinds of its layers from config.json; a variant of a kind is a field of its class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from apcbatch.layout import StatePart

if TYPE_CHECKING:
    import torch

    from apcbatch.kernels.backend import Backend
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


@dataclass(frozen=True)
class Fused:
    """A loaded sub-block that runs as one fused call on every backend. part: see BackendOf.sub_block."""

    backend: Backend
    part: Any

    def __call__(self, residual: Residual, batch: Batch) -> None:
        self.backend.run_sub_block(self.part, residual, batch.ragged)


class SubBlockKind(ABC):
    """A kind of sub-block. A subclass is a frozen dataclass, whose fields are its sizes and switches, and its tensors'
    names. name: the backends' name for the kind."""

    name: ClassVar[str]

    @abstractmethod
    def load(self, source: TensorSource, norm: PreNorm, state: StateTensors) -> LoadedSubBlock:
        """Load the sub-block from the tensors of `source`, on its backend. norm: the norm at its beginning, as wide as
        the residual. state: the layer's part of the arena, by role."""

    def state(self, layer: int, dtype: str) -> tuple[StatePart, ...]:
        """Return the parts of a layer's state. layer: its number. dtype: of the model."""
        return ()

    def sizes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Return tensor name in the sub-block -> shape, for the tensors that determine the sizes of the state. hidden:
        columns of the residual."""
        return {}

    @property
    def fields(self) -> dict[str, Any]:
        """The sizes and switches that are part of the fingerprint, by their names there. A family adds those that it
        calls otherwise, or that differ between two kinds of one class (ModelConfig.fields)."""
        return {}

    def fused(self, source: TensorSource, norm: PreNorm, *weights_and_state: Any) -> Fused:
        """Return the sub-block as one fused call of the source's backend."""
        return Fused(source.backend, source.backend.sub_block(self.name, norm, *weights_and_state))


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
