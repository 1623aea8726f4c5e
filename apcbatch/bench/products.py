"""The matrix products of a pass, done again alone: the share of a pass that they are is its distance from the best.

Must not know: models, engines. A product is done again with the same weights, on other numbers of the same shape and
type; those inside a fused op as the plain ops that define it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from apcbatch.kernels.cpu.choose import softmax_topk
from apcbatch.kernels.cpu.feed_forward import FusedMixture, FusedMlp
from apcbatch.kernels.cpu.linear import PackedLinear, linear
from apcbatch.kernels.cpu.mixer import FusedMixer
from apcbatch.kernels.cpu.residual import normed
from apcbatch.kernels.layer import Expert, Residual
from apcbatch.kernels.ops import Backend
from apcbatch.kernels.ragged import Ragged

FLOAT32 = torch.float32


@dataclass(frozen=True, eq=False)
class Product:
    """x (t, in) times packed weights: the result's dtype, the bias."""

    x: torch.Tensor
    packed: PackedLinear
    out_dtype: torch.dtype | None
    bias: torch.Tensor | None = None


class Products:
    """The matrix products that a CPU backend made while `recording`; `again` makes them once more, in order."""

    def __init__(self) -> None:
        self._products: list[Product] = []
        self._stand_ins: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        self._notes: dict[str, Callable[..., None]] = {
            "linear": self._note_linear,
            "run_mixer": self._note_mixer,
            "run_feed_forward": self._note_feed_forward,
        }

    def __len__(self) -> int:
        return len(self._products)

    @contextmanager
    def recording(self, backend: Backend) -> Iterator[None]:
        """Note every product of the backend while it lasts."""

        def noted(name: str, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if name in self._notes:
                self._notes[name](*args, **kwargs)
            return op(*args, **kwargs)

        with backend.observed(noted):
            yield

    def again(self) -> None:
        """All products, without what was between them."""
        for product in self._products:
            linear(product.x, product.packed, product.out_dtype, product.bias)

    def _note_linear(
        self,
        x: torch.Tensor,
        packed: PackedLinear,
        out_dtype: torch.dtype | None = None,
        bias: torch.Tensor | None = None,
    ) -> None:
        self._note(x.shape[0], packed, out_dtype, bias)

    def _note_mixer(self, mixer: FusedMixer, residual: Residual, _: Ragged) -> None:
        weights, t = mixer.weights, residual.sum.shape[0]
        self._note(t, weights.in_proj, None, weights.in_bias)
        self._note(t, weights.x_proj, None)
        self._note(t, weights.dt_proj, None)
        self._note(t, weights.out_proj, FLOAT32, weights.out_bias)

    def _note_feed_forward(self, part: FusedMlp | FusedMixture, residual: Residual) -> None:
        if isinstance(part, FusedMlp):
            self._note_expert(part.expert, residual.sum.shape[0])
        else:
            self._note_mixture(part, residual)

    def _note_mixture(self, mixture: FusedMixture, residual: Residual) -> None:
        """The router, noted as it runs here, and each expert on as many rows as are routed to it."""
        router, experts = mixture.router, mixture.experts
        x = normed(residual.rows(torch.arange(residual.sum.shape[0])), mixture.norm, router.dtype)
        self._note(x.shape[0], router, FLOAT32)
        _, chosen = softmax_topk(linear(x, router, FLOAT32), mixture.experts_per_token)
        for expert, rows in zip(experts, chosen.flatten().bincount(minlength=len(experts)), strict=True):
            if rows:
                self._note_expert(expert, int(rows))

    def _note_expert(self, expert: Expert[PackedLinear], rows: int) -> None:
        self._note(rows, expert.gate_up, None)
        self._note(rows, expert.down, FLOAT32)

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
