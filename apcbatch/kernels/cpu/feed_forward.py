"""Fused feed-forward sub-blocks on the CPU, one call each: an MLP, gated or not, and a mixture of experts.

Invariants: the bits equal those of running the ops one by one. A token's mixture is summed over its experts in
ascending order, independent of the routing of other tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from apcbatch import _C
from apcbatch.kernels.cpu.linear import PackedLinear
from apcbatch.kernels.cpu.sub_block import FusedSubBlock, norm_plan
from apcbatch.kernels.layer import Expert, PreNorm, SigmoidRouting, routing_rule


class FusedMlp(FusedSubBlock):
    """Pre-norm and MLP in one call. A call stores the output, (t, h), as the residual's delta.

    gate: (1, h), of the expert's dtype, for the shared expert of a mixture: each token's output is multiplied by the
    sigmoid of its float32 logit. None: no gate. Raises ValueError if a shape or a dtype does not fit.
    """

    def __init__(self, norm: PreNorm, expert: Expert[PackedLinear], gate: PackedLinear | None = None) -> None:
        takes = (expert.gate_up.in_features, expert.gate_up.dtype)
        if gate is not None and (gate.out_features, gate.in_features, gate.dtype) != (1, *takes):
            raise ValueError(
                f"the gate must have one row, and the expert's inputs and dtype {takes}; it is ({gate.out_features}, "
                f"{gate.in_features}) {gate.dtype}"
            )
        self._kept_alive, self._expert, self._gate, self.hidden = norm, expert, gate, expert.gate_up.in_features
        gate_plan = None if gate is None else gate.plan
        self.plan = _C.Mlp(norm_plan(norm, self.hidden), _expert_plan(expert), gate_plan)


class FusedMixture(FusedSubBlock):
    """Pre-norm and mixture of experts in one call. A call stores the output, (t, h), as the residual's delta. Raises
    ValueError if a shape or a dtype does not fit.

    Each token uses experts_per_token experts, chosen and weighted by is_normalised and sigmoid as in Ops.route.
    router: (experts, h), float32 or of the experts' dtype. experts: of one shape, dtype and activation. latent:
    projections (l, h) before and (h, l) after the experts, of their dtype, so that the experts have l columns:
    y = latent[1](mixture(latent[0] x)). Empty: no projections.
    """

    def __init__(
        self,
        norm: PreNorm,
        router: PackedLinear,
        experts: Sequence[Expert[PackedLinear]],
        experts_per_token: int,
        is_normalised: bool = False,
        sigmoid: SigmoidRouting | None = None,
        latent: tuple[PackedLinear, ...] = (),
    ) -> None:
        shapes = {(e.gate_up.in_features, e.gate_up.dtype, e.down.in_features, e.is_gated) for e in experts}
        dtype = experts[0].down.dtype if experts else router.dtype
        takes = (latent[0].out_features if latent else router.in_features, dtype)
        if len(shapes) != 1 or {shape[:2] for shape in shapes} != {takes} or router.dtype not in (dtype, torch.float32):
            raise ValueError(
                f"experts must have one shape, {takes[0]} inputs, and the router's dtype, {router.dtype}, unless that "
                f"is torch.float32; their (inputs, dtype, inner columns, is_gated) are {sorted(map(str, shapes))}"
            )
        h, pairs = router.in_features, [(one.out_features, one.in_features, one.dtype) for one in latent]
        if latent and pairs != [(takes[0], h, dtype), (h, takes[0], dtype)]:
            raise ValueError(f"latent must be (l, {h}) and ({h}, l) of the experts' {dtype}; they are {pairs}")
        if router.out_features != len(experts) or not 1 <= experts_per_token <= len(experts):
            raise ValueError(
                f"the router must have {len(experts)} rows, one for each expert, and experts_per_token must lie in 1 "
                f"to {len(experts)}; there are {router.out_features} rows, and it is {experts_per_token}"
            )
        if sigmoid is not None:
            sigmoid.require(len(experts), experts_per_token)
        self._norm, self._router, self._experts = norm, router, list(experts)  # alive: the plan has their addresses
        self._sigmoid, self._latent = sigmoid, latent
        self.hidden = h
        self.plan = _C.Mixture(
            norm=norm_plan(norm, h),
            router=router.plan,
            experts_per_token=experts_per_token,
            rule=routing_rule(is_normalised, sigmoid),
            latent=tuple(one.plan for one in latent),
            experts=[_expert_plan(expert) for expert in experts],
        )


def _expert_plan(expert: Expert[PackedLinear]) -> _C.Expert:
    return _C.Expert(expert.gate_up.plan, expert.down.plan, expert.is_gated)
