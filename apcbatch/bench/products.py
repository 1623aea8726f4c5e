"""Repeat the matrix products of a pass alone, to measure their share of the pass's time.

A product is repeated with the same weights on random numbers of the same shape and dtype; one inside a fused op is
repeated as a plain op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from apcbatch.kernels.backend import Backend
from apcbatch.kernels.cpu.linear import PackedLinear
from apcbatch.kernels.cpu.ops import ops
from apcbatch.kernels.cpu.sub_block import FusedSubBlock
from apcbatch.kernels.layer import Residual
from apcbatch.kernels.ragged import Ragged
from apcbatch.model.families import family_of
from apcbatch.model.hf_config import ModelConfig


@dataclass(frozen=True, eq=False)
class Product:
    """One matrix product: x (t, in) times packed weights. out_dtype: dtype of the result. bias: None for none."""

    x: torch.Tensor
    packed: PackedLinear
    out_dtype: torch.dtype | None
    bias: torch.Tensor | None = None


class Products:
    """Matrix products of a CPU backend: `recording` records them, and `again` repeats them in order."""

    def __init__(self) -> None:
        self._products: list[Product] = []
        self._stand_ins: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
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
        for product in self._products:
            ops.linear(product.x, product.packed, product.out_dtype, product.bias)

    def _note_linear(
        self,
        x: torch.Tensor,
        packed: PackedLinear,
        out_dtype: torch.dtype | None = None,
        bias: torch.Tensor | None = None,
    ) -> None:
        self._note(x.shape[0], packed, out_dtype, bias)

    def _note_sub_block(self, part: FusedSubBlock, residual: Residual, _: Ragged) -> None:
        for product in part.products(residual):
            self._note(*product)

    def _note(
        self,
        rows: int,
        packed: PackedLinear,
        out_dtype: torch.dtype | None,
        bias: torch.Tensor | None = None,
    ) -> None:
        key = (rows, packed.in_features, packed.dtype)
        if key not in self._stand_ins:
            self._stand_ins[key] = torch.randn(rows, packed.in_features).to(packed.dtype)
        self._products.append(Product(self._stand_ins[key], packed, out_dtype, bias))


def product_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return (in_features, out_features) of every kind of product of a model, the vocabulary last."""
    shapes: dict[str, tuple[int, int]] = {}
    for kind in family_of(config).kinds(config):
        shapes.update(kind.products(config))
    return {**shapes, "lm_head": (config.hidden_size, config.vocab_size)}
