"""Data types of a layer's sub-blocks, the same on every device: packed weights, norms, experts, the residual stream.

Dimension letters: t tokens, h hidden, d d_inner, n d_state, w convolution taps, r dt_rank, f inner columns of an
expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal, localcontext
from typing import Generic, Protocol, TypeVar

import torch

from apcbatch.kernels.arguments import require_parameter


class Linear(Protocol):
    """Weights (out_features, in_features), packed by one backend for its own ops."""

    @property
    def out_features(self) -> int: ...

    @property
    def in_features(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Return rows of the weights: indices (k,) int64 -> (k, in_features) in the weights' dtype. So a tied
        embedding needs no second copy of the weights."""


LinearT = TypeVar("LinearT", bound=Linear)
TURN_BITS = 64  # a rotary angle is an integer number of 2^-64 turns
_TWO_PI = Decimal("6.283185307179586476925286766559005768394338798750211641949889")


@dataclass(frozen=True, eq=False)
class PreNorm:
    """RMS norm at the beginning of a sub-block. weight: (h,) float32 contiguous."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True, eq=False)
class MambaWeights(Generic[LinearT]):
    """Weights of a Mamba-1 mixer. The projections are packed and of one dtype; the rest is float32, contiguous.

    in_proj: (2d, h). x_proj: (r + 2n, d). dt_proj: (d, r). out_proj: (h, d). in_bias: (2d,), out_bias: (h,),
    conv_bias: (d,), each optional. conv_weight: (d, w). A: (n, d), -exp(A_log) transposed. D, dt_bias: (d,).
    norms: weights of the RMS norms of dt (r,), B (n,) and C (n,), where None stands for ones; None: dt, B and C are
    not normed. norm_eps: eps of these norms.
    """

    in_proj: LinearT
    x_proj: LinearT
    dt_proj: LinearT
    out_proj: LinearT
    in_bias: torch.Tensor | None
    out_bias: torch.Tensor | None
    conv_weight: torch.Tensor
    conv_bias: torch.Tensor | None
    A: torch.Tensor
    D: torch.Tensor
    dt_bias: torch.Tensor
    norms: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None] | None
    norm_eps: float


@dataclass(frozen=True, eq=False)
class DeltaNetWeights(Generic[LinearT]):
    """Weights of a gated delta net mixer: Hk key heads of K columns, Hv value heads of V columns, c = 2 Hk K + Hv V.
    The projections are packed and of one dtype; the rest is float32, contiguous.

    in_proj: (c + Hv V + 2 Hv, h), rows of q, k, v, z, b, a. out_proj: (h, Hv V). key_heads: Hk, a divisor of Hv.
    conv_weight: (c, w). A: (Hv,), -exp(A_log). dt_bias: (Hv,). norm: (V,), weight of the gated RMS norm of each value
    head. norm_eps: its eps.
    """

    in_proj: LinearT
    out_proj: LinearT
    key_heads: int
    conv_weight: torch.Tensor
    A: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    norm_eps: float


@dataclass(frozen=True, eq=False)
class Mamba2Weights(Generic[LinearT]):
    """Weights of a Mamba-2 mixer: G groups of B and C with N columns (d_state), H heads of P columns, c = 2 G N + H P.
    The projections are packed and of one dtype; the rest is float32, contiguous.

    in_proj: (c + H P + H, h), rows of C, B, x, z, dt. out_proj: (h, H P). groups: G, a divisor of H. conv_weight: (c,
    w). conv_bias: (c,). A: (H,), -exp(A_log). D: (H,). dt_bias: (H,). dt_limits: of the step, softplus(dt + dt_bias).
    norm: (H P,), weight of the gated RMS norm over the columns of each group, or None for the gate alone. norm_eps: its
    eps. gate_first: whether to multiply by silu(z) before the norm; otherwise after it.
    """

    in_proj: LinearT
    out_proj: LinearT
    groups: int
    conv_weight: torch.Tensor
    conv_bias: torch.Tensor | None
    A: torch.Tensor
    D: torch.Tensor
    dt_bias: torch.Tensor
    dt_limits: tuple[float, float]
    norm: torch.Tensor | None
    norm_eps: float
    gate_first: bool = True


@dataclass(frozen=True, eq=False)
class ShortConvWeights(Generic[LinearT]):
    """Weights of a gated short convolution. The projections are packed and of one dtype.

    in_proj: (3h, h), rows of B, C, x. out_proj: (h, h). conv_weight: (h, w) float32 contiguous.
    """

    in_proj: LinearT
    out_proj: LinearT
    conv_weight: torch.Tensor


@dataclass(frozen=True, eq=False)
class QueryKeyNorms:
    """RMS norms of queries and keys, and the rotary position embedding that follows: arguments of `norm_rope`.

    q, k: weights (head_dim,) float32, or both None for no norms. eps: of both norms. steps: (rotary_dim / 2,) int64, in
    2^-64 turns per position (`rotary_steps`).
    """

    q: torch.Tensor | None
    k: torch.Tensor | None
    eps: float
    steps: torch.Tensor


def rotary_steps(rotary_dim: int, theta: float) -> torch.Tensor:
    """Return the rotary angle between two neighbouring positions for each pair of columns, theta^(-2i / rotary_dim)
    radians, as (rotary_dim / 2,) int64 in 2^-64 turns. Su et al., "RoFormer", arXiv 2104.09864, section 3.2.

    Integers make the angle of any position exact, and the same on every machine. Raises ValueError unless rotary_dim is
    even and theta finite and at least 1.
    """
    if rotary_dim < 0 or rotary_dim % 2 or not 1 <= theta < float("inf"):
        raise ValueError(
            f"rotary_dim must be even, and theta a finite number of at least 1; they are {rotary_dim} and {theta}"
        )
    with localcontext() as context:
        context.prec = 60  # the C library's power function differs between machines in the last bit of a double
        turn = Decimal(2**TURN_BITS) / _TWO_PI
        steps = [
            int((turn * Decimal(theta) ** (Decimal(-2 * i) / rotary_dim)).to_integral_value())
            for i in range(rotary_dim // 2)
        ]
    return torch.tensor(steps, dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class AttentionWeights(Generic[LinearT]):
    """Weights of a causal grouped-query attention mixer, packed, of one dtype. Here d = heads * head_dim.

    qkv_proj: (d + 2 kv_heads head_dim, h), rows of the queries, keys, values; with gates d more rows, at the end.
    o_proj: (h, d). heads: number of query heads. scale: factor of the scores q k^T. norms: None for neither norms nor
    position embeddings. is_gated: whether the output of attention is multiplied by sigmoid(gates) before o_proj.
    """

    qkv_proj: LinearT
    o_proj: LinearT
    heads: int
    scale: float
    norms: QueryKeyNorms | None
    is_gated: bool


@dataclass(frozen=True, eq=False)
class Expert(Generic[LinearT]):
    """Weights of a feed-forward network: SwiGLU, down(silu(gate x) * up x), or without a gate a squared ReLU,
    down(relu(up x)^2). Shazeer, "GLU variants", arXiv 2002.05202; So et al., "Primer", arXiv 2109.08668.

    gate_up: (2f, h), rows of gate, then of up; without a gate (f, h), those of up. down: (h, f), of the same dtype.
    Raises ValueError.
    """

    gate_up: LinearT
    down: LinearT
    is_gated: bool = True

    def __post_init__(self) -> None:
        gate_up, down = self.gate_up, self.down
        h, f, parts = gate_up.in_features, down.in_features, 2 if self.is_gated else 1
        if gate_up.out_features != parts * f or down.out_features != h or gate_up.dtype != down.dtype:
            raise ValueError(
                f"gate_up must be ({'2f' if self.is_gated else 'f'}, h) and down (h, f) of one dtype; they are "
                f"({gate_up.out_features}, {h}) {gate_up.dtype} and ({down.out_features}, {f}) {down.dtype}"
            )


@dataclass(frozen=True, eq=False)
class SigmoidRouting:
    """Routing of a mixture by sigmoids in place of a softmax. A token uses the experts with the largest scores,
    sigmoid(logit) + bias, weighted by their sigmoids. All its weights are NaN if a logit or a score of the token is not
    finite. DeepSeek-AI, "DeepSeek-V3", arXiv 2412.19437, section 2.1.2.

    bias: (experts,) float32, added to the sigmoids for the choice only. groups: number of equal groups of experts.
    top_groups: number of groups that a token may use, those with the largest sums of their two largest scores, the
    lower group first on ties. scale: factor of the weights, after they are normalised. eps: added to the sum that the
    weights are divided by.
    """

    bias: torch.Tensor
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    eps: float = 1e-20

    def require(self, experts: int, k: int) -> None:
        """Check that k of the experts can be chosen. Raises ValueError."""
        groups, top_groups = self.groups, self.top_groups
        require_parameter(self.bias, "bias", (experts,), torch.float32, self.bias.device)
        if not 1 <= top_groups <= groups or experts % groups or (top_groups < groups and experts < 2 * groups):
            raise ValueError(
                f"groups must divide the {experts} columns, into at least 2 each if top_groups is less than groups, "
                f"and top_groups must lie in 1 to groups; they are {groups} and {top_groups}"
            )
        most = top_groups * (experts // groups)
        if not 1 <= k <= most:
            raise ValueError(f"k must lie in 1 to {most}, the columns of {top_groups} groups; it is {k}")


def routing_rule(is_normalised: bool, sigmoid: SigmoidRouting | None) -> tuple[int, int, int, bool, float, float]:
    """Return the rule as the compiled modules take it (RoutingParams of csrc/rowwise.h). It holds the bias's address:
    the caller keeps it alive. sigmoid: None for a softmax."""
    if sigmoid is None:
        return 0, 1, 1, is_normalised, 0.0, 1.0
    one = sigmoid
    return one.bias.data_ptr(), one.groups, one.top_groups, is_normalised, one.eps, one.scale


class Residual:
    """Residual stream of a pass: a running sum, and the output of the last sub-block, not added yet.

    Each sub-block adds `delta`, the output of the previous sub-block, to `sum`, norms the sum, and stores its own
    output as the new `delta`. So the addition and the norm are one kernel.

    sum: (t, h) float32, changed in place. delta: (t, h) float32, valid only if has_delta is true. present: (1,) int64
    on a CUDA device, number of real rows, which come first; the others are padding and need no work. None: all rows
    are real.
    """

    def __init__(self, sum: torch.Tensor, delta: torch.Tensor, present: torch.Tensor | None = None) -> None:
        self.sum, self.delta, self.has_delta, self.present = sum, delta, False, present

    def output(self) -> torch.Tensor:
        """Return the pending output of the last sub-block, (t, h) float32. Call it only if has_delta is true."""
        return self.delta

    def rows(self, indices: torch.Tensor) -> Residual:
        """Return a copy of the rows `indices` (r,) int64."""
        taken = Residual(self.sum[indices], self.delta[indices])
        taken.has_delta = self.has_delta
        return taken

    def settled(self) -> torch.Tensor:
        """Add the pending delta and return the sum, (t, h) float32: the bits that the next sub-block would norm."""
        if self.has_delta:
            self.sum.add_(self.output())
            self.has_delta = False
        return self.sum

    def beside(self) -> torch.Tensor:
        """Detach the last sub-block's output, so that the next sub-block reads the same sum as the last one did.
        Returns that output, (t, h) float32, for `join`."""
        left, self.delta, self.has_delta = self.delta, torch.empty_like(self.delta), False
        return left

    def join(self, left: torch.Tensor) -> None:
        """Store the sum of `left`, which `beside` returned, and the next sub-block's output as the pending delta.
        Overwrites `left`."""
        self.leave(left.add_(self.delta))

    def leave(self, delta: torch.Tensor) -> None:
        """Store a sub-block's output as the pending delta. delta: (t, h) float32 contiguous, on the sum's device.
        Raises ValueError."""
        require_parameter(delta, "delta", tuple(self.sum.shape), torch.float32, self.sum.device)
        self.delta, self.has_delta = delta, True
