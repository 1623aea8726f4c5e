"""The feed-forward parts of a layer in one call each: a SwiGLU MLP and a mixture of them.

Must not know: models, checkpoints. Invariants: the bits are those of the ops called one after the other; a
token's mixture is the sum over its experts in ascending order, whatever else is routed there.
"""

from __future__ import annotations

from collections.abc import Sequence

from apcbatch import _C
from apcbatch.kernels.arguments import num_threads
from apcbatch.kernels.cpu.linear import PackedLinear
from apcbatch.kernels.cpu.residual import addresses, norm_plan
from apcbatch.kernels.layer import Expert, PreNorm, Residual


class FusedMlp:
    """Norms a residual (t, h), and leaves what one expert makes of it, (t, h), to be added. Raises ValueError."""

    most_captured = 0  # no CUDA graph holds what runs on the CPU

    def __init__(self, norm: PreNorm, expert: Expert[PackedLinear]) -> None:
        self.norm, self.expert = norm, expert  # kept alive: the plans hold their addresses
        self.plans = norm_plan(norm, expert.gate_up.in_features), _expert_plan(expert)

    def __call__(self, residual: Residual) -> None:
        """residual: of the norm's columns. Raises ValueError."""
        t, places = residual.sum.shape[0], addresses(residual, self.expert.gate_up.in_features)
        norm, plan = self.plans
        plan.run(norm, t, *places, num_threads())


class FusedMixture:
    """The same with the experts_per_token likeliest experts of each token, weighted by the softmax of the router over
    all of them, which is not normalised again.

    router: (experts, h); experts of one shape and of the router's dtype. Raises ValueError.
    """

    most_captured = 0

    def __init__(
        self,
        norm: PreNorm,
        router: PackedLinear,
        experts: Sequence[Expert[PackedLinear]],
        experts_per_token: int,
    ) -> None:
        takes = (router.in_features, router.dtype)
        shapes = {(e.gate_up.in_features, e.gate_up.dtype, e.down.in_features) for e in experts}
        if len(shapes) != 1 or {shape[:2] for shape in shapes} != {takes}:
            raise ValueError(
                f"experts must be alike and take what the router takes, {takes}; theirs (columns, dtype, inner "
                f"columns) are {sorted(map(str, shapes))}"
            )
        if router.out_features != len(experts) or not 1 <= experts_per_token <= len(experts):
            raise ValueError(
                f"a mixture needs a row of the router for each of its {len(experts)} experts and 1 to that many "
                f"of them a token; there are {router.out_features} rows and {experts_per_token} a token"
            )
        # Kept alive: the plans hold their addresses.
        self.norm, self.router, self.experts = norm, router, list(experts)
        self.experts_per_token = experts_per_token
        mixture = _C.Mixture(router.plan, experts_per_token, [_expert_plan(expert) for expert in experts])
        self.plans = norm_plan(norm, router.in_features), mixture

    def __call__(self, residual: Residual) -> None:
        """residual: of the norm's columns. Raises ValueError."""
        t, places = residual.sum.shape[0], addresses(residual, self.router.in_features)
        norm, plan = self.plans
        plan.run(norm, t, *places, num_threads())


def _expert_plan(expert: Expert[PackedLinear]) -> _C.Mlp:
    return _C.Mlp(expert.gate_up.plan, expert.down.plan)
