"""The feed-forward parts of a layer in one call each: a SwiGLU MLP and a mixture of them.

Must not know: models, checkpoints. Invariants: the bits are those of the ops called one after the other; a
token's mixture is the sum over its experts in ascending order, whatever else is routed there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from apcbatch import _C
from apcbatch.kernels.arguments import num_threads, require_parameter
from apcbatch.kernels.cpu.linear import PackedLinear
from apcbatch.kernels.cpu.residual import PreNorm, Residual


class Expert:
    """down(silu(gate x) * up x). Shazeer, "GLU variants", arXiv 2002.05202.

    gate_up: (2f, h), the gate's rows before the up's; down: (h, f); of one dtype. Raises ValueError.
    """

    def __init__(self, gate_up: PackedLinear, down: PackedLinear) -> None:
        h, f = gate_up.in_features, down.in_features
        if gate_up.out_features != 2 * f or down.out_features != h or gate_up.dtype != down.dtype:
            raise ValueError(
                f"gate_up must be (2f, h) and down (h, f) of one dtype; they are ({gate_up.out_features}, {h}) "
                f"{gate_up.dtype} and ({down.out_features}, {f}) {down.dtype}"
            )
        self.gate_up, self.down = gate_up, down  # kept alive: the plan below holds their addresses
        self.plan = _C.Mlp(gate_up.plan, down.plan)


class FusedMlp:
    """Norms a residual (t, h), and leaves what one expert makes of it, (t, h), to be added. Raises ValueError."""

    def __init__(self, norm: PreNorm, expert: Expert) -> None:
        require_parameter(norm.weight, "norm", (expert.gate_up.in_features,), torch.float32)
        self.norm, self.expert = norm, expert

    def __call__(self, residual: Residual) -> None:
        """residual: of the norm's columns. Raises ValueError."""
        t, addresses = residual.sum.shape[0], residual.addresses(self.expert.gate_up.in_features)
        self.expert.plan.run(self.norm.plan, t, *addresses, num_threads())


class FusedMixture:
    """The same with the experts_per_token likeliest experts of each token, weighted by the softmax of the router over
    all of them, which is not normalised again.

    router: (experts, h); experts of one shape and of the router's dtype. Raises ValueError.
    """

    def __init__(
        self, norm: PreNorm, router: PackedLinear, experts: Sequence[Expert], experts_per_token: int
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
        require_parameter(norm.weight, "norm", (router.in_features,), torch.float32)
        self.norm = norm
        self.router, self.experts = router, list(experts)  # kept alive: the plan below holds their addresses
        self.experts_per_token = experts_per_token
        self._plan = _C.Mixture(
            router.plan, experts_per_token, [expert.plan for expert in experts]
        )

    def __call__(self, residual: Residual) -> None:
        """residual: of the norm's columns. Raises ValueError."""
        t, addresses = residual.sum.shape[0], residual.addresses(self.router.in_features)
        self._plan.run(self.norm.plan, t, *addresses, num_threads())
