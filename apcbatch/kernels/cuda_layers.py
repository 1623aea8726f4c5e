"""The parts of a layer on a CUDA device: the faces of apcbatch.kernels.residual, mixer and feed_forward, made of the
ops.

Must not know: models, checkpoints, the other layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from apcbatch.kernels.cuda import causal_conv, selective_scan
from apcbatch.kernels.cuda_experts import FewTokens
from apcbatch.kernels.cuda_rows import (
    DeviceLinear,
    add_rms_norm_,
    linear,
    rms_norm,
    silu_mul,
    softmax_topk,
)
from apcbatch.kernels.device_batch import DeviceBatch
from apcbatch.kernels.mixer import MixerWeights
from apcbatch.kernels.ragged import Ragged
from apcbatch.kernels.residual import PreNorm, Residual

# An expert's rows are filled up to a multiple: for each new number of rows the library chooses a kernel anew, and often
# loads it. Not where experts have fewer rows than that, nor where they have so many that the device is slower.
ROWS_AT_ONCE = 64
MOST_FILLED = 512  # rows of an expert, on the average


class DeviceNorm(PreNorm):
    """The norm at the beginning of a part. weight: (h) float32."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps


class DeviceResidual(Residual):
    """The residual stream of a pass: see apcbatch.kernels.residual. present: (1,) int64 on the device, how many of its
    rows, the first ones, are there; None: all. Nothing is to be done for the others."""

    def __init__(self, begin: torch.Tensor, present: torch.Tensor | None = None) -> None:
        self.sum, self.delta, self.has_delta, self.present = begin, begin, False, present

    def normed(self, norm: PreNorm, dtype: torch.dtype) -> torch.Tensor:
        if self.has_delta:
            return add_rms_norm_(self.sum, self.delta, norm.weight, norm.eps, dtype)
        return rms_norm(self.sum, norm.weight, norm.eps, dtype)

    def leave(self, delta: torch.Tensor) -> None:
        self.delta, self.has_delta = delta, True


class DeviceMixer:
    """The Mamba mixer of a layer, over the slots of its states: see apcbatch.kernels.mixer."""

    def __init__(
        self, norm: PreNorm, weights: MixerWeights, ssm: torch.Tensor, conv: torch.Tensor
    ) -> None:
        self.weights: Any = weights  # its projections are DeviceLinears
        self.norm, self.ssm, self.conv = norm, ssm, conv

    def __call__(self, residual: Residual, batch: Ragged | DeviceBatch) -> None:
        w = self.weights
        n, d = w.A.shape
        r, dtype = w.dt_proj.in_features, w.in_proj.dtype
        normed = residual.normed(self.norm, dtype)
        xz = linear(normed, w.in_proj, bias=w.in_bias)  # (t, h) -> (t, 2d)
        x = causal_conv(xz[:, :d], w.conv_weight, w.conv_bias, self.conv, batch)
        dbc = linear(x, w.x_proj)  # (t, d) -> (t, r + 2n)
        dt, b, c = dbc[:, :r], dbc[:, r : r + n], dbc[:, r + n :]
        if w.norms is not None:
            dt, b, c = (
                rms_norm(part, norm, w.norm_eps, dtype)
                for part, norm in zip((dt, b, c), w.norms, strict=True)
            )
        dt = linear(dt, w.dt_proj)  # (t, r) -> (t, d)
        y = selective_scan(x, dt, w.A, b, c, w.D, xz[:, d:], w.dt_bias, self.ssm, batch)
        residual.leave(linear(y, w.out_proj, out_dtype=torch.float32, bias=w.out_bias))  # (t, d) -> (t, h)


class DeviceExpert:
    """down(silu(gate x) * up x): (t, h) -> (t, h) float32: see apcbatch.kernels.feed_forward."""

    def __init__(self, gate_up: DeviceLinear, down: DeviceLinear) -> None:
        self.gate_up, self.down = gate_up, down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        f = self.down.in_features
        gate_up = linear(x, self.gate_up)  # (t, h) -> (t, 2f)
        return linear(silu_mul(gate_up[:, :f], gate_up[:, f:]), self.down, out_dtype=torch.float32)


class DeviceMlp:
    """One expert for all tokens: see apcbatch.kernels.feed_forward."""

    def __init__(self, norm: PreNorm, expert: DeviceExpert) -> None:
        self._norm, self._expert = norm, expert

    def __call__(self, residual: Residual) -> None:
        residual.leave(self._expert(residual.normed(self._norm, self._expert.down.dtype)))


class DeviceMixture:
    """Some of the experts for each token, added in ascending order: see apcbatch.kernels.feed_forward.

    For few tokens nothing is asked of the device. For more, one expert after the other takes its tokens; how many they
    are comes from the device, once a call, so that a pass waits for it and no CUDA graph can hold it.

    most_captured: the most tokens of a call that a graph can hold.
    """

    def __init__(
        self, norm: PreNorm, router: DeviceLinear, experts: Sequence[DeviceExpert], experts_per_token: int
    ) -> None:
        self._norm = norm
        self.router, self.experts, self.experts_per_token = router, list(experts), experts_per_token
        self._numbers = torch.arange(len(experts), device=router.weight.device)
        self._few = FewTokens([expert.gate_up for expert in experts], [expert.down for expert in experts])
        self.most_captured = self._few.most_pairs // experts_per_token

    def __call__(self, residual: DeviceResidual) -> None:
        x = residual.normed(self._norm, self.router.dtype)
        logits = linear(x, self.router, out_dtype=torch.float32)  # (t, h) -> (t, e)
        weights, chosen = softmax_topk(logits, self.experts_per_token)  # (t, k) each
        few = x.shape[0] <= self.most_captured
        make = self._few.mixture if few else self._one_by_one
        residual.leave(make(x, weights, chosen, residual.present))

    def _one_by_one(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, _: torch.Tensor | None
    ) -> torch.Tensor:
        chosen, ascending = chosen.sort(dim=1)
        weights = weights.gather(1, ascending)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)  # (t k): every choice, an expert's next to each other
        counts = (flat == self._numbers.unsqueeze(1)).sum(dim=1)
        if ROWS_AT_ONCE <= flat.numel() / len(self.experts) < MOST_FILLED:
            order, place, sizes = _filled(order, flat, counts)
        else:
            place, sizes = order.argsort(), counts.tolist()
        taken = torch.split(x[order // self.experts_per_token], sizes)
        made = [expert(part) for expert, part in zip(self.experts, taken, strict=True) if len(part)]
        place = place.view_as(chosen)  # of every choice among the rows made
        rows = torch.cat(made) if made else x.new_empty(x.shape, dtype=torch.float32)
        y = rows[place[:, 0]] * weights[:, :1]
        for i in range(1, self.experts_per_token):
            y += rows[place[:, i]] * weights[:, i : i + 1]
        return y


def _filled(
    order: torch.Tensor, chosen: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """(`order` with each expert's rows filled up, the place of every choice in it, each expert's rows). order, chosen:
    (choices,), counts (experts,), all int64; what fills up is a choice of any expert."""
    spare = -counts % ROWS_AT_ONCE
    before = spare.cumsum(0) - spare  # of the experts before
    places = torch.arange(order.numel(), device=order.device) + before[chosen[order]]
    sizes: list[int] = (counts + spare).tolist()
    filled = order.new_zeros(sum(sizes)).scatter_(0, places, order)
    return filled, torch.empty_like(order).scatter_(0, order, places), sizes
