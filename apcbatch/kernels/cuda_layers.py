"""The parts of a layer on a CUDA device: the faces of apcbatch.kernels.residual, mixer and feed_forward, made of the
ops.

Must not know: models, checkpoints, the other layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from apcbatch.kernels.cuda import causal_conv, selective_scan
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


class DeviceNorm(PreNorm):
    """The norm at the beginning of a part. weight: (h) float32."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps


class DeviceResidual(Residual):
    """The residual stream of a pass: see apcbatch.kernels.residual."""

    def __init__(self, begin: torch.Tensor) -> None:
        self.sum, self.delta, self.has_delta = begin, begin, False

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
        self._norm, self._ssm, self._conv = norm, ssm, conv

    def __call__(self, residual: Residual, batch: Ragged | DeviceBatch) -> None:
        w = self.weights
        n, d = w.A.shape
        r, dtype = w.dt_proj.in_features, w.in_proj.dtype
        normed = residual.normed(self._norm, dtype)
        xz = linear(normed, w.in_proj, bias=w.in_bias)  # (t, h) -> (t, 2d)
        x = causal_conv(xz[:, :d], w.conv_weight, w.conv_bias, self._conv, batch)
        dbc = linear(x, w.x_proj)  # (t, d) -> (t, r + 2n)
        dt, b, c = dbc[:, :r], dbc[:, r : r + n], dbc[:, r + n :]
        if w.norms is not None:
            dt, b, c = (
                rms_norm(part, norm, w.norm_eps, dtype)
                for part, norm in zip((dt, b, c), w.norms, strict=True)
            )
        dt = linear(dt, w.dt_proj)  # (t, r) -> (t, d)
        y = selective_scan(x, dt, w.A, b, c, w.D, xz[:, d:], w.dt_bias, self._ssm, batch)
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

    bfloat16 experts are multiplied together, grouped on the device; others, and exact ones, one after the other.
    """

    def __init__(
        self, norm: PreNorm, router: DeviceLinear, experts: Sequence[DeviceExpert], experts_per_token: int
    ) -> None:
        self._norm = norm
        self.router, self.experts, self.experts_per_token = router, list(experts), experts_per_token
        self._grouped: tuple[torch.Tensor, torch.Tensor] | None = None
        if router.dtype == torch.bfloat16 and not router.exact and _can_group(self.experts[0]):
            self._grouped = (
                torch.stack([expert.gate_up.weight for expert in self.experts]),  # (e, 2f, h)
                torch.stack([expert.down.weight for expert in self.experts]),  # (e, h, f)
            )
            self.experts = []

    @property
    def captures(self) -> bool:
        """Whether it never waits for the device, so that a CUDA graph can hold it."""
        return self._grouped is not None

    def __call__(self, residual: Residual) -> None:
        x = residual.normed(self._norm, self.router.dtype)
        logits = linear(x, self.router, out_dtype=torch.float32)  # (t, h) -> (t, e)
        weights, chosen = softmax_topk(logits, self.experts_per_token)  # (t, k) each
        chosen, order = chosen.sort(dim=1)
        weights = weights.gather(1, order)
        if self._grouped is None:
            residual.leave(self._one_by_one(x, weights, chosen))
        else:
            residual.leave(self._together(x, weights, chosen, *self._grouped))

    def _together(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        chosen: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
    ) -> torch.Tensor:
        t, k = chosen.shape
        experts, f = gate_up.shape[0], down.shape[2]
        flat = chosen.flatten()
        sorted_experts, order = flat.sort(stable=True)
        numbers = torch.arange(experts, device=x.device)
        ends = torch.searchsorted(sorted_experts, numbers, right=True, out_int32=True)
        hidden = torch._grouped_mm(x[order // k], gate_up.transpose(1, 2), offs=ends)  # (t k, 2f)
        parts = torch._grouped_mm(silu_mul(hidden[:, :f], hidden[:, f:]), down.transpose(1, 2), offs=ends)
        y = torch.empty((t * k, x.shape[1]), dtype=torch.float32, device=x.device)
        y[order] = parts.float()
        return (y.view(t, k, -1) * weights.unsqueeze(2)).sum(dim=1)

    def _one_by_one(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for index, expert in enumerate(self.experts):
            rows, choice = (chosen == index).nonzero(as_tuple=True)
            if rows.numel():
                y[rows] += expert(x[rows]) * weights[rows, choice].unsqueeze(1)
        return y


def _can_group(expert: DeviceExpert) -> bool:
    """Whether the library's grouped product takes the shapes: rows of a multiple of 16 bytes, on a new enough chip."""
    sizes = (expert.gate_up.in_features, expert.gate_up.out_features, expert.down.in_features)
    return torch.cuda.get_device_capability()[0] >= 9 and all(size % 8 == 0 for size in sizes)
