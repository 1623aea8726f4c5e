"""The tensors of one block of a model: those of a checkpoint with a common name prefix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from apcbatch.kernels.backend import Backend
from apcbatch.kernels.layer import Linear
from apcbatch.model.weights import Checkpoint


@dataclass(frozen=True)
class TensorSource:
    """Tensors of one block of a checkpoint. prefix: prefix of their names, without the dot after it. dtype, backend:
    dtype of packed matrices, and the backend that packs them. output_scale: factor of the outputs of sub-blocks.
    part_scales: see Multipliers.parts."""

    checkpoint: Checkpoint
    prefix: str
    dtype: torch.dtype
    backend: Backend
    output_scale: float
    part_scales: Mapping[str, float]

    def below(self, name: str) -> TensorSource:
        """Return the tensors of a named part of the block."""
        return replace(self, prefix=f"{self.prefix}.{name}")

    def __contains__(self, name: str) -> bool:
        return f"{self.prefix}.{name}" in self.checkpoint

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor as it is stored; see Checkpoint.take."""
        return self.checkpoint.take(f"{self.prefix}.{name}", shape)

    def vector(self, name: str, size: int) -> torch.Tensor:
        """Return a vector (size,) in float32."""
        return self.take(name, (size,)).float()

    def pack(self, weight: torch.Tensor) -> Linear:
        """Pack a matrix (out, in) for the backend's product."""
        return pack_scaled(self.backend, weight, self.dtype, 1.0)

    def packed(self, name: str, rows: int, columns: int) -> Linear:
        """Return the matrix (rows, columns) of a projection, packed."""
        return self.pack(self.take(f"{name}.weight", (rows, columns)))

    def pack_parts(self, **parts: torch.Tensor) -> Linear:
        """Pack matrices (out, in) as one, their rows in the given order. The results of each are multiplied by its
        factor in part_scales."""
        weight, factors = torch.cat(list(parts.values())), [self.part_scales.get(name, 1.0) for name in parts]
        if all(factor == 1 for factor in factors):
            return self.pack(weight)
        rows = torch.tensor([len(part) for part in parts.values()])
        scale = torch.tensor(factors).repeat_interleave(rows).to(weight.device)
        packed: Linear = self.backend.pack_linear(weight, scale, self.dtype)
        return packed

    def pack_output(self, weight: torch.Tensor, name: str = "") -> Linear:
        """Pack the matrix (h, in) of a sub-block's last projection. Its results are multiplied by output_scale and by
        the factor of `name` in part_scales."""
        return pack_scaled(self.backend, weight, self.dtype, self.output_scale * self.part_scales.get(name, 1.0))

    def packed_output(self, name: str, rows: int, columns: int) -> Linear:
        """Return the matrix (rows, columns) of a sub-block's last projection, packed."""
        return self.pack_output(self.take(f"{name}.weight", (rows, columns)), name)


def pack_scaled(backend: Backend, weight: torch.Tensor, dtype: torch.dtype, factor: float) -> Linear:
    """Pack a matrix (out, in) in a dtype for the backend's product, with the same factor for all of its results."""
    scale = None if factor == 1 else torch.full((len(weight),), factor, device=weight.device)
    packed: Linear = backend.pack_linear(weight, scale, dtype)
    return packed
