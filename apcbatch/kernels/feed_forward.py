"""The feed-forward parts of a layer in one call each: a SwiGLU MLP and a mixture of them.

Must not know: models, checkpoints. Invariants: the bits are those of the ops called one after the other; a
token's mixture is the sum over its experts in ascending order, whatever else is routed there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from apcbatch import _C
from apcbatch.kernels.arguments import DTYPE_CODES, num_threads, require_parameter
from apcbatch.kernels.linear import PackedLinear, projection


class FusedMlp:
    """down(silu(gate x) * up x): (t, h) -> (t, h) float32. Shazeer, "GLU variants", arXiv 2002.05202.

    gate_up: (2f, h), the gate's rows before the up's; down: (h, f); of one dtype, which is x's. Raises ValueError.
    """

    def __init__(self, gate_up: PackedLinear, down: PackedLinear) -> None:
        h, f = gate_up.in_features, down.in_features
        if gate_up.out_features != 2 * f or down.out_features != h or gate_up.dtype != down.dtype:
            raise ValueError(
                f"gate_up must be (2f, h) and down (h, f) of one dtype; they are ({gate_up.out_features}, {h}) "
                f"{gate_up.dtype} and ({down.out_features}, {f}) {down.dtype}"
            )
        self.gate_up, self.down = gate_up, down  # kept alive: the plan below holds their addresses
        self.hidden, self.inner, self.dtype = h, f, gate_up.dtype
        self.plan = _C.Mlp(DTYPE_CODES[gate_up.dtype], projection(gate_up, None), projection(down, None))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: (t, h) contiguous in the weights' dtype. Raises ValueError."""
        require_parameter(x, "x", (x.shape[0], self.hidden), self.dtype)
        y = torch.empty(x.shape, dtype=torch.float32)
        self.plan.run(x.shape[0], x.data_ptr(), y.data_ptr(), num_threads())
        return y


class FusedMixture:
    """The experts_per_token likeliest experts of each token, weighted by the softmax of the router over all of them,
    which is not normalised again: (t, h) -> (t, h) float32.

    router: (experts, h); experts of one shape and of the router's dtype. Raises ValueError.
    """

    def __init__(self, router: PackedLinear, experts: Sequence[FusedMlp], experts_per_token: int) -> None:
        shapes = {(expert.hidden, expert.inner, expert.dtype) for expert in experts}
        if len(shapes) != 1 or {(h, dtype) for h, _, dtype in shapes} != {(router.in_features, router.dtype)}:
            raise ValueError(
                f"experts must be alike and take what the router takes, {router.in_features} columns of "
                f"{router.dtype}; theirs (columns, inner, dtype) are {sorted(map(str, shapes))}"
            )
        if router.out_features != len(experts) or not 1 <= experts_per_token <= len(experts):
            raise ValueError(
                f"a mixture needs a row of the router for each of its {len(experts)} experts and 1 to that many "
                f"of them a token; there are {router.out_features} rows and {experts_per_token} a token"
            )
        self.router, self.experts = router, list(experts)  # kept alive: the plan below holds their addresses
        self.experts_per_token = experts_per_token
        self._hidden, self._dtype = router.in_features, router.dtype
        self._plan = _C.Mixture(
            projection(router, None), experts_per_token, [expert.plan for expert in experts]
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: (t, h) contiguous in the weights' dtype. Raises ValueError."""
        require_parameter(x, "x", (x.shape[0], self._hidden), self._dtype)
        y = torch.empty(x.shape, dtype=torch.float32)
        self._plan.run(x.shape[0], x.data_ptr(), y.data_ptr(), num_threads())
        return y
