"""Fused feed-forward sub-blocks on the CPU, one call each: a SwiGLU MLP, and a mixture of SwiGLU experts.

Invariants: the bits equal those of running the ops one by one. A token's mixture is summed over its experts in
ascending order, independent of the routing of other tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from apcbatch import _C
from apcbatch.kernels.cpu.linear import PackedLinear
from apcbatch.kernels.cpu.ops import ops
from apcbatch.kernels.cpu.sub_block import FusedSubBlock, norm_plan
from apcbatch.kernels.layer import Expert, MatrixProduct, PreNorm, Residual
from apcbatch.kernels.ragged import Ragged


class FusedMlp(FusedSubBlock):
    """Pre-norm and SwiGLU MLP in one call. A call stores the output, (t, h), as the residual's delta. Raises
    ValueError if the norm does not fit."""

    def __init__(self, norm: PreNorm, expert: Expert[PackedLinear]) -> None:
        self._kept_alive, self._expert, self.hidden = norm, expert, expert.gate_up.in_features
        self.plan = _C.Mlp(norm_plan(norm, self.hidden), _expert_plan(expert))

    def __call__(self, residual: Residual, _: Ragged) -> None:
        """Run the sub-block. Raises ValueError unless the residual has the norm's columns."""
        self.run(residual)

    def products(self, residual: Residual) -> Iterator[MatrixProduct]:
        """See FusedSubBlock."""
        return _expert_products(self._expert, residual.sum.shape[0])


class FusedMixture(FusedSubBlock):
    """Pre-norm and mixture of SwiGLU experts in one call. A call stores the output, (t, h), as the residual's delta.
    Raises ValueError if a shape or a dtype does not fit.

    Each token uses the experts_per_token experts with the largest router logits, weighted by the softmax over all
    experts. is_normalised: the chosen weights are divided by their sum. router: (experts, h). experts: of one shape and
    of the router's dtype.
    """

    def __init__(
        self,
        norm: PreNorm,
        router: PackedLinear,
        experts: Sequence[Expert[PackedLinear]],
        experts_per_token: int,
        is_normalised: bool = False,
    ) -> None:
        takes = (router.in_features, router.dtype)
        shapes = {(e.gate_up.in_features, e.gate_up.dtype, e.down.in_features) for e in experts}
        if len(shapes) != 1 or {shape[:2] for shape in shapes} != {takes}:
            raise ValueError(
                f"experts must have one shape, and the router's inputs and dtype {takes}; their (inputs, dtype, inner "
                f"columns) are {sorted(map(str, shapes))}"
            )
        if router.out_features != len(experts) or not 1 <= experts_per_token <= len(experts):
            raise ValueError(
                f"the router must have {len(experts)} rows, one for each expert, and experts_per_token must lie in 1 "
                f"to {len(experts)}; there are {router.out_features} rows, and it is {experts_per_token}"
            )
        self._norm, self._router, self._experts = norm, router, list(experts)  # alive: the plan has their addresses
        self._experts_per_token, self.hidden = experts_per_token, router.in_features
        plans = [_expert_plan(expert) for expert in experts]
        self.plan = _C.Mixture(norm_plan(norm, self.hidden), router.plan, experts_per_token, is_normalised, plans)

    def __call__(self, residual: Residual, _: Ragged) -> None:
        """Run the sub-block. Raises ValueError unless the residual has the norm's columns."""
        self.run(residual)

    def products(self, residual: Residual) -> Iterator[MatrixProduct]:
        """Yield the router's product, then those of each expert for the rows routed to it. Runs the router to count
        these rows."""
        router, t = self._router, residual.sum.shape[0]
        yield MatrixProduct(t, router, torch.float32)
        x = ops.normed(residual.rows(torch.arange(t)), self._norm, router.dtype)
        _, chosen = ops.softmax_topk(ops.linear(x, router, torch.float32), self._experts_per_token)
        for expert, rows in zip(self._experts, chosen.flatten().bincount(minlength=len(self._experts)), strict=True):
            if rows:
                yield from _expert_products(expert, int(rows))


def _expert_plan(expert: Expert[PackedLinear]) -> _C.Expert:
    return _C.Expert(expert.gate_up.plan, expert.down.plan)


def _expert_products(expert: Expert[PackedLinear], rows: int) -> Iterator[MatrixProduct]:
    yield MatrixProduct(rows, expert.gate_up)
    yield MatrixProduct(rows, expert.down, torch.float32)
