"""The matrix products of a pass, done again alone: the share of a pass that they are is its distance from the best.

Must not know: models, engines. A product is done again with the same weights, on other numbers of the same shape and
type; those inside a fused op as the plain ops that define it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from apcbatch.bench.parts import replaced
from apcbatch.kernels import ops

FLOAT32 = torch.float32


@dataclass(frozen=True, eq=False)
class Product:
    """x (t, in) times packed weights: the result's dtype, the bias."""

    x: torch.Tensor
    packed: ops.PackedLinear
    out_dtype: torch.dtype | None
    bias: torch.Tensor | None = None


class Products:
    """The matrix products that were made while `recording`; `again` makes them once more, in order."""

    def __init__(self) -> None:
        self._products: list[Product] = []
        self._stand_ins: dict[tuple[Any, ...], torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._products)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note every product while it lasts."""
        noted = (
            (ops, "linear", self._note_linear),
            (ops.FusedMixer, "__call__", self._note_mixer),
            (ops.FusedMlp, "__call__", self._note_mlp),
            (ops.FusedMixture, "__call__", self._note_mixture),
        )
        with ExitStack() as stack:
            for owner, name, note in noted:
                stack.enter_context(replaced(owner, name, _first(note)))
            yield

    def again(self) -> None:
        """All products, without what was between them."""
        for product in self._products:
            ops.linear(product.x, product.packed, product.out_dtype, product.bias)

    def _note_linear(
        self,
        x: torch.Tensor,
        packed: ops.PackedLinear,
        out_dtype: torch.dtype | None = None,
        bias: torch.Tensor | None = None,
    ) -> None:
        self._note(x.shape[0], packed, out_dtype, bias)

    def _note_mixer(self, mixer: ops.FusedMixer, residual: ops.Residual, _: Any) -> None:
        weights, t = mixer.weights, residual.sum.shape[0]
        self._note(t, weights.in_proj, None, weights.in_bias)
        self._note(t, weights.x_proj, None)
        self._note(t, weights.dt_proj, None)
        self._note(t, weights.out_proj, FLOAT32, weights.out_bias)

    def _note_mlp(self, mlp: ops.FusedMlp, residual: ops.Residual) -> None:
        self._note_expert(mlp.expert, residual.sum.shape[0])

    def _note_mixture(self, mixture: ops.FusedMixture, residual: ops.Residual) -> None:
        """The router, noted as it runs here, and each expert on as many rows as are routed to it."""
        x = residual.rows(torch.arange(residual.sum.shape[0])).normed(mixture.norm, mixture.router.dtype)
        logits, experts = ops.linear(x, mixture.router, FLOAT32), mixture.experts
        _, chosen = ops.softmax_topk(logits, mixture.experts_per_token)
        for expert, rows in zip(experts, chosen.flatten().bincount(minlength=len(experts)), strict=True):
            if rows:
                self._note_expert(expert, int(rows))

    def _note_expert(self, expert: ops.Expert, rows: int) -> None:
        self._note(rows, expert.gate_up, None)
        self._note(rows, expert.down, FLOAT32)

    def _note(
        self,
        rows: int,
        packed: ops.PackedLinear,
        out_dtype: torch.dtype | None,
        bias: torch.Tensor | None = None,
    ) -> None:
        key = (rows, packed.in_features, packed.dtype)
        if key not in self._stand_ins:
            self._stand_ins[key] = torch.randn(rows, packed.in_features).to(packed.dtype)
        self._products.append(Product(self._stand_ins[key], packed, out_dtype, bias))


def _first(note: Callable[..., None]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """What makes of a function one that notes its arguments and then does what it did."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            note(*args, **kwargs)
            return original(*args, **kwargs)

        return call

    return make
