"""What the parts of a layer are made of, the same on every device: packed weights, norms, experts, the residual stream.

Must not know: models, checkpoints, how a part computes. Dimension letters: t tokens, h hidden, d d_inner, n d_state,
w taps, r dt_rank, f inner columns of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch

from apcbatch.kernels.arguments import require_parameter


class Linear(Protocol):
    """Weights (out_features, in_features) as one backend packs them, for that backend's ops."""

    @property
    def out_features(self) -> int: ...

    @property
    def in_features(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Rows of the weights: indices (k,) int64 -> (k, in_features) in their dtype, so that an embedding and an
        output projection that are tied share one copy."""


LinearT = TypeVar("LinearT", bound=Linear)


@dataclass(frozen=True, eq=False)
class PreNorm:
    """The norm at the beginning of a part. weight: (h) float32 contiguous."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True, eq=False)
class MambaWeights(Generic[LinearT]):
    """A Mamba-1 mixer. Packed weights of one dtype; the rest float32, contiguous.

    in_proj (2d, h), x_proj (r + 2n, d), dt_proj (d, r), out_proj (h, d). in_bias (2d), out_bias (h), conv_bias
    (d): None for none. conv_weight (d, w). A (n, d): -exp(A_log) transposed. D, dt_bias (d). norms: None, or
    the weights of the RMS norms of dt (r), B (n) and C (n), each None for ones.
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
class AttentionWeights(Generic[LinearT]):
    """An attention mixer of grouped queries, causal, without position embeddings. Packed weights of one dtype.

    qkv_proj (h + 2 kv_heads head_dim, h): queries, keys, values. o_proj (h, h). heads: of the queries. scale: of a
    query's products with its keys.
    """

    qkv_proj: LinearT
    o_proj: LinearT
    heads: int
    scale: float


@dataclass(frozen=True, eq=False)
class Expert(Generic[LinearT]):
    """down(silu(gate x) * up x). Shazeer, "GLU variants", arXiv 2002.05202.

    gate_up: (2f, h), the gate's rows before the up's; down: (h, f); of one dtype. Raises ValueError.
    """

    gate_up: LinearT
    down: LinearT

    def __post_init__(self) -> None:
        gate_up, down = self.gate_up, self.down
        h, f = gate_up.in_features, down.in_features
        if gate_up.out_features != 2 * f or down.out_features != h or gate_up.dtype != down.dtype:
            raise ValueError(
                f"gate_up must be (2f, h) and down (h, f) of one dtype; they are ({gate_up.out_features}, {h}) "
                f"{gate_up.dtype} and ({down.out_features}, {f}) {down.dtype}"
            )


class MatrixProduct(NamedTuple):
    """`linear` of so many rows by packed weights, as a fused sub-block makes it; out_dtype: None for the weights'."""

    rows: int
    packed: Any
    out_dtype: torch.dtype | None = None
    bias: torch.Tensor | None = None


class Residual:
    """The residual stream of a pass. A part adds to it what the part before it left, norms the sum, and leaves its own
    result to be added by the next.

    sum: (t, h) float32, changed in place. delta: (t, h) float32, what is yet to be added to it, where has_delta says
    that there is something. present: (1,) int64 on a CUDA device, how many of the rows, the first ones, are there;
    None: all. Nothing is to be done for the others.
    """

    def __init__(self, sum: torch.Tensor, delta: torch.Tensor, present: torch.Tensor | None = None) -> None:
        self.sum, self.delta, self.has_delta, self.present = sum, delta, False, present

    def rows(self, indices: torch.Tensor) -> Residual:
        """A copy of some of its rows: indices (r,) int64."""
        taken = Residual(self.sum[indices], self.delta[indices])
        taken.has_delta = self.has_delta
        return taken

    def settled(self) -> torch.Tensor:
        """The sum with what was left, (t, h) float32: the bits that the next part's norm would make of it."""
        if self.has_delta:
            self.sum.add_(self.delta)
            self.has_delta = False
        return self.sum

    def beside(self) -> torch.Tensor:
        """Give the next sub-block the sum that the one before it has read, as it is under the same norm. Returns what
        that one left, for `join`."""
        left, self.delta, self.has_delta = self.delta, torch.empty_like(self.delta), False
        return left

    def join(self, left: torch.Tensor) -> None:
        """Add what the sub-block left after `beside` to what the one before it had left."""
        self.leave(left.add_(self.delta))

    def leave(self, delta: torch.Tensor) -> None:
        """The next part adds this: (t, h) float32 contiguous, where the sum lies. Raises ValueError."""
        require_parameter(delta, "delta", tuple(self.sum.shape), torch.float32, self.sum.device)
        self.delta, self.has_delta = delta, True
