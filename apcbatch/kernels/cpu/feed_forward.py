"""Fused feed-forward sub-blocks on the CPU, one call each: an MLP, gated or not, and a mixture of experts; and the two
kernels that they have besides the ops.

Invariants: the bits equal those of running the kernels one by one. A token's mixture is summed over its experts in
ascending order, independent of the routing of other tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from apcbatch import _C
from apcbatch.kernels.arguments import require_cpu, require_logits, require_matrix, view
from apcbatch.kernels.cpu.linear import PackedLinear
from apcbatch.kernels.cpu.sub_block import FusedSubBlock, norm_plan
from apcbatch.kernels.layer import Expert, PreNorm, SigmoidRouting
from apcbatch.kernels.processor import num_threads


def relu_square(x: torch.Tensor) -> torch.Tensor:
    """Compute max(x, 0)^2 in float32, rounded once. So et al., "Primer", arXiv 2109.08668.

    x: (t, f) float32 or bfloat16, any row stride. Returns (t, f) in x's dtype. Raises ValueError.
    """
    require_cpu(x, "x")
    require_matrix(x, "x")
    y = torch.empty(x.shape, dtype=x.dtype)
    _C.relu_square(x.shape[0], x.shape[1], view(x, "x"), view(y, "y"), num_threads())
    return y


def sigmoid_topk(
    logits: torch.Tensor, k: int, bias: torch.Tensor, groups: int = 1, top_groups: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two tensors for the k columns of each row with the largest scores, sigmoid(logit) + bias: their sigmoids,
    and their indices. Only the top_groups of `groups` equal groups of columns are used: those with the largest sums of
    their two largest scores. DeepSeek-AI, "DeepSeek-V3", arXiv 2412.19437, section 2.1.2.

    logits: (t, columns) float32, any row stride. bias: (columns,) float32 contiguous. Returns (t, k) float32 and (t, k)
    int64, in descending order of score, the lower group and the lower index first on ties. The sigmoids of a row with a
    logit or a score that is not finite are NaN. Raises ValueError.
    """
    require_cpu(logits, "logits")
    t, n = require_logits(logits)
    SigmoidRouting(bias, groups, top_groups).require(n, k)
    sigmoids, indices = torch.empty(t, k), torch.empty(t, k, dtype=torch.int64)
    results = sigmoids.data_ptr(), indices.data_ptr()
    _C.sigmoid_topk(t, n, k, view(logits, "logits"), *results, bias.data_ptr(), groups, top_groups, num_threads())
    return sigmoids, indices


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

    Each token uses the experts_per_token experts with the largest router logits, weighted by the softmax over all
    experts; with `sigmoid`, those that sigmoid_topk chooses, weighted by their sigmoids. is_normalised: the chosen
    weights are divided by their sum. router: (experts, h), float32 or of the experts' dtype. experts: of one shape,
    dtype and activation. latent: projections (l, h) before and (h, l) after the experts, of their dtype, so that the
    experts have l columns: y = latent[1](mixture(latent[0] x)). Empty: no projections.
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
            is_normalised=is_normalised,
            bias=0 if sigmoid is None else sigmoid.bias.data_ptr(),
            groups=1 if sigmoid is None else sigmoid.groups,
            top_groups=1 if sigmoid is None else sigmoid.top_groups,
            scale=1.0 if sigmoid is None else sigmoid.scale,
            eps=1e-20 if sigmoid is None else sigmoid.eps,
            latent=tuple(one.plan for one in latent),
            experts=[_expert_plan(expert) for expert in experts],
        )


def _expert_plan(expert: Expert[PackedLinear]) -> _C.Expert:
    return _C.Expert(expert.gate_up.plan, expert.down.plan, expert.is_gated)
