"""Feed-forward sub-blocks on a CUDA device, composed of the ops: see apcbatch.kernels.cpu.feed_forward."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from apcbatch.kernels.cuda.experts import FewTokens
from apcbatch.kernels.cuda.linear import DeviceLinear
from apcbatch.kernels.cuda.ops import ops
from apcbatch.kernels.layer import Expert, PreNorm, Residual
from apcbatch.kernels.ragged import Ragged

# Pad each expert's rows to a multiple of ROWS_AT_ONCE: for each new number of rows, cuBLASLt chooses a kernel anew and
# often loads it. Padding is used only if experts have ROWS_AT_ONCE to MOST_FILLED rows on average. With more rows it
# slows the device by 1 to 2 %.
ROWS_AT_ONCE = 64
MOST_FILLED = 512  # rows of an expert, on average; exclusive


def swiglu(expert: Expert[DeviceLinear], x: torch.Tensor) -> torch.Tensor:
    """Compute down(silu(gate x) * up x). x: (t, h) in the weights' dtype. Returns (t, h) float32."""
    f = expert.down.in_features
    gate_up = ops.linear(x, expert.gate_up)  # (t, h) -> (t, 2f)
    return ops.linear(ops.silu_mul(gate_up[:, :f], gate_up[:, f:]), expert.down, out_dtype=torch.float32)


class DeviceMlp:
    """SwiGLU MLP: see apcbatch.kernels.cpu.feed_forward.FusedMlp."""

    most_captured = sys.maxsize

    def __init__(self, norm: PreNorm, expert: Expert[DeviceLinear]) -> None:
        self._norm, self._expert = norm, expert

    def __call__(self, residual: Residual, _: Ragged) -> None:
        residual.leave(swiglu(self._expert, ops.normed(residual, self._norm, self._expert.down.dtype)))


class DeviceMixture:
    """Mixture of SwiGLU experts: see apcbatch.kernels.cpu.feed_forward.FusedMixture.

    Up to most_captured tokens, FewTokens runs all experts at once without a transfer to the host. With more tokens the
    experts run one after the other. Then each call waits until the host has read the number of tokens per expert from
    the device, so no CUDA graph can capture it.
    """

    def __init__(
        self,
        norm: PreNorm,
        router: DeviceLinear,
        experts: Sequence[Expert[DeviceLinear]],
        experts_per_token: int,
    ) -> None:
        self._norm = norm
        self.router, self.experts_per_token = router, experts_per_token
        self.experts = [Expert(part.gate_up.in_one_piece(), part.down.in_one_piece()) for part in experts]
        self._numbers = torch.arange(len(experts), device=router.weight.device)
        self._few = FewTokens([expert.gate_up for expert in experts], [expert.down for expert in experts])
        self.most_captured = self._few.most_pairs // experts_per_token

    def __call__(self, residual: Residual, _: Ragged) -> None:
        x = ops.normed(residual, self._norm, self.router.dtype)
        logits = ops.linear(x, self.router, out_dtype=torch.float32)  # (t, h) -> (t, e)
        weights, chosen = ops.softmax_topk(logits, self.experts_per_token)  # (t, k) each
        few = x.shape[0] <= self.most_captured
        make = self._few.mixture if few else self._one_by_one
        residual.leave(make(x, weights, chosen, residual.present))

    def _one_by_one(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, _: torch.Tensor | None
    ) -> torch.Tensor:
        chosen, ascending = chosen.sort(dim=1)
        weights = weights.gather(1, ascending)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)  # (t k,): (token, expert) pairs sorted by expert
        counts = (flat == self._numbers.unsqueeze(1)).sum(dim=1)
        if ROWS_AT_ONCE <= flat.numel() / len(self.experts) < MOST_FILLED:
            order, place, sizes = _filled(order, flat, counts)
        else:
            place, sizes = order.argsort(), counts.tolist()
        taken = torch.split(x[order // self.experts_per_token], sizes)
        made = [swiglu(expert, part) for expert, part in zip(self.experts, taken, strict=True) if len(part)]
        place = place.view_as(chosen)  # (t, k): row of each pair in `rows`
        rows = torch.cat(made) if made else x.new_empty(x.shape, dtype=torch.float32)
        y = rows[place[:, 0]] * weights[:, :1]
        for i in range(1, self.experts_per_token):
            y += rows[place[:, i]] * weights[:, i : i + 1]
        return y


def _filled(
    order: torch.Tensor, chosen: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Pad each expert's pairs in `order` to a multiple of ROWS_AT_ONCE.

    order, chosen: (pairs,), counts: (experts,), all int64. Returns the padded order, the row of each pair in it, and
    each expert's padded number of rows. A padding row repeats pair 0, and its result is not used.
    """
    spare = -counts % ROWS_AT_ONCE
    before = spare.cumsum(0) - spare  # padding rows of the preceding experts
    places = torch.arange(order.numel(), device=order.device) + before[chosen[order]]
    sizes: list[int] = (counts + spare).tolist()
    filled = order.new_zeros(sum(sizes)).scatter_(0, places, order)
    return filled, torch.empty_like(order).scatter_(0, order, places), sizes
