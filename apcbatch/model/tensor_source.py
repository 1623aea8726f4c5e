"""Where a block of a model gets its tensors: those of a checkpoint whose names begin alike.

Must not know: families, what a block makes of its tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from apcbatch.kernels.layer import Linear
from apcbatch.kernels.ops import Backend
from apcbatch.model.weights import Checkpoint


@dataclass(frozen=True)
class TensorSource:
    """prefix: what the tensors' names begin with, without the dot. dtype, backend: for which matrices are packed."""

    checkpoint: Checkpoint
    prefix: str
    dtype: torch.dtype
    backend: Backend

    def below(self, name: str) -> TensorSource:
        """The tensors of a part of the block."""
        return replace(self, prefix=f"{self.prefix}.{name}")

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor as it is stored; see Checkpoint.take."""
        return self.checkpoint.take(f"{self.prefix}.{name}", shape)

    def vector(self, name: str, size: int) -> torch.Tensor:
        """A vector (size,) in float32."""
        return self.take(name, (size,)).float()

    def pack(self, weight: torch.Tensor) -> Linear:
        """A matrix (out, in) as the backend multiplies by it."""
        packed: Linear = self.backend.pack_linear(weight.to(self.dtype))
        return packed

    def packed(self, name: str, rows: int, columns: int) -> Linear:
        """The matrix (rows, columns) of a projection, packed."""
        return self.pack(self.take(f"{name}.weight", (rows, columns)))
