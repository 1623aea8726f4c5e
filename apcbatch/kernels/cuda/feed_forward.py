"""Feed-forward sub-blocks on a CUDA device, composed of the ops: see apcbatch.kernels.cpu.feed_forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from apcbatch.kernels.cuda.experts import GroupedExperts
from apcbatch.kernels.cuda.linear import DeviceLinear
from apcbatch.kernels.cuda.ops import ops
from apcbatch.kernels.cuda.program import Program, require
from apcbatch.kernels.cuda.residual import DeviceResidual
from apcbatch.kernels.layer import Expert, PreNorm, Residual, SigmoidRouting
from apcbatch.kernels.ragged import Ragged


def run_expert(expert: Expert[DeviceLinear], x: torch.Tensor) -> torch.Tensor:
    """Compute the expert's output. x: (t, h) in the weights' dtype. Returns (t, h) float32."""
    return ops.linear(inner_of(expert, x), expert.down, out_dtype=torch.float32)


def inner_of(expert: Expert[DeviceLinear], x: torch.Tensor) -> torch.Tensor:
    """Compute the input of the expert's last product, (t, f)."""
    f = expert.down.in_features
    gate_up = ops.linear(x, expert.gate_up)  # (t, h) -> (t, 2f) or (t, f)
    return ops.silu_mul(gate_up[:, :f], gate_up[:, f:]) if expert.is_gated else ops.relu_square(gate_up)


class DeviceMlp:
    """MLP, gated or not: see apcbatch.kernels.cpu.feed_forward.FusedMlp."""

    can_capture = True

    def __init__(self, norm: PreNorm, expert: Expert[DeviceLinear], gate: DeviceLinear | None = None) -> None:
        self._norm, self._expert, self._gate = norm, expert, gate

    def __call__(self, residual: Residual, _: Ragged) -> None:
        x = ops.normed(residual, self._norm, self._expert.down.dtype)
        gate = None if self._gate is None else ops.linear(x, self._gate, out_dtype=torch.float32)  # (t, h) -> (t, 1)
        ops.leave(residual, inner_of(self._expert, x), self._expert.down, gate)

    def list_launches(self, program: Program) -> None:
        expert, f = self._expert, self._expert.down.in_features
        require(self._gate is None and expert.is_gated)
        gate_up = program.product(program.normed(self._norm, expert.down.dtype), expert.gate_up)
        inner = program.rows(f, gate_up.dtype)
        program.launches.multiply(f, gate_up.given, gate_up.columns(f).given, True, inner.given)
        program.leave(inner, expert.down)


class DeviceMixture:
    """Mixture of experts: see apcbatch.kernels.cpu.feed_forward.FusedMixture.

    GroupedExperts, if it supports the experts, runs them all at once. Otherwise the experts run one after the other.
    Each call then waits until the host has read the number of tokens per expert from the device, so no CUDA graph can
    capture it.
    """

    def __init__(
        self,
        norm: PreNorm,
        router: DeviceLinear,
        experts: Sequence[Expert[DeviceLinear]],
        experts_per_token: int,
        is_normalised: bool = False,
        sigmoid: SigmoidRouting | None = None,
        latent: tuple[DeviceLinear, ...] = (),
    ) -> None:
        self._norm, self._is_normalised, self._latent = norm, is_normalised, latent
        self._sigmoid = sigmoid
        self.router, self.experts_per_token = router, experts_per_token
        self.experts = [
            replace(one, gate_up=one.gate_up.in_one_piece(), down=one.down.in_one_piece()) for one in experts
        ]
        self._grouped = GroupedExperts(self.experts)
        self.can_capture = self._grouped.is_supported

    def normed(self, residual: Residual) -> torch.Tensor:
        """Compute the experts' input, (t, h): see CudaOps.normed."""
        return ops.normed(residual, self._norm, self.experts[0].down.dtype)

    def __call__(self, residual: Residual, _: Ragged) -> None:
        x = self.normed(residual)
        logits = ops.linear(x.to(self.router.dtype), self.router, out_dtype=torch.float32)  # (t, h) -> (t, e)
        k, present = self.experts_per_token, residual.present
        groups = self._grouped.groups(len(x), k, x.device) if self._grouped.is_supported else None
        weights, chosen = ops.route(logits, k, self._is_normalised, self._sigmoid, present, groups)  # (t, k) each
        if self._latent:
            x = ops.linear(x, self._latent[0])  # (t, h) -> (t, l)
        if groups is None:
            y = self._one_by_one(x, weights, chosen)
        elif self._latent:
            y = self._grouped.mixture(x, weights, chosen, present, groups)
        else:
            assert isinstance(residual, DeviceResidual)
            return residual.leave_experts(self._grouped.rows(x, weights, chosen, present, groups))
        if self._latent:
            y = ops.linear(y.to(x.dtype), self._latent[1], out_dtype=torch.float32)  # (t, l) -> (t, h)
        residual.leave(y)

    def _one_by_one(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        y = torch.zeros((len(x), self.experts[0].down.out_features), dtype=torch.float32, device=x.device)
        pairs = chosen.flatten().argsort(stable=True)  # (t k,): (token, expert) pairs sorted by expert
        counts = chosen.flatten().bincount(minlength=len(self.experts)).tolist()
        for expert, its in zip(self.experts, torch.split(pairs, counts), strict=True):
            if len(its):
                tokens = its // self.experts_per_token
                y[tokens] += run_expert(expert, x[tokens]) * weights.flatten()[its].unsqueeze(1)
        return y
