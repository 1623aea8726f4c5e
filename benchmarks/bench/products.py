"""Repeat the matrix products of a pass alone, to measure their share of the pass's time.

A product is repeated with the same weights on random numbers of the same shape and dtype. A product inside a fused
sub-block is repeated as the op `linear`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from apcbatch.kernels.backend import Backend
from apcbatch.kernels.cpu.linear import PackedLinear
from apcbatch.kernels.cpu.ops import ops
from apcbatch.kernels.cpu.sub_block import FusedSubBlock
from apcbatch.kernels.layer import MatrixProduct, Residual
from apcbatch.kernels.ragged import Ragged
from apcbatch.model.families import family_of
from apcbatch.model.hf_config import ModelConfig


class Products:
    """Matrix products of a CPU backend: `recording` records them, and `again` repeats them in order."""

    def __init__(self) -> None:
        self._products: list[tuple[torch.Tensor, MatrixProduct]] = []
        self._operands: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}  # random x, by shape and dtype
        self._notes: dict[str, Callable[..., None]] = {
            "linear": self._note_linear,
            "run_sub_block": self._note_sub_block,
        }

    def __len__(self) -> int:
        return len(self._products)

    @contextmanager
    def recording(self, backend: Backend) -> Iterator[None]:
        """Record every product of the backend inside the block."""

        def noted(name: str, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if name in self._notes:
                self._notes[name](*args, **kwargs)
            return op(*args, **kwargs)

        with backend.observed(noted):
            yield

    def again(self) -> None:
        for x, (_, packed, out_dtype, bias) in self._products:
            ops.linear(x, packed, out_dtype, bias)

    def _note_linear(
        self,
        x: torch.Tensor,
        packed: PackedLinear,
        out_dtype: torch.dtype | None = None,
        bias: torch.Tensor | None = None,
    ) -> None:
        self._note(MatrixProduct(x.shape[0], packed, out_dtype, bias))

    def _note_sub_block(self, part: FusedSubBlock, residual: Residual, _: Ragged) -> None:
        for product in part.products(residual):
            self._note(product)

    def _note(self, product: MatrixProduct) -> None:
        rows, packed = product.rows, product.packed
        key = (rows, packed.in_features, packed.dtype)
        if key not in self._operands:
            self._operands[key] = torch.randn(rows, packed.in_features).to(packed.dtype)
        self._products.append((self._operands[key], product))


def product_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return name -> (in_features, out_features) of each matrix product of a model, `lm_head` last."""
    shapes: dict[str, tuple[int, int]] = {}
    for kind in family_of(config).kinds(config):
        shapes.update(kind.products(config))
    return {**shapes, "lm_head": (config.hidden_size, config.vocab_size)}
