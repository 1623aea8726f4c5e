"""Random arguments of the recurrences over heads, for the tests of their kernel."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from apcbatch.kernels import reference
from apcbatch.kernels.ragged import Ragged
from apcbatch.layout import value_lanes
from apcbatch.model.devices import backend_for
from tests.kernels.recurrent import one_thread, poison

# Hk, Hv, K, V (G, H, N, P): lanes of no whole vector, of one and a half, of several blocks, and the real size
SIZES = [(1, 1, 8, 8), (2, 4, 5, 24), (1, 3, 13, 40), (2, 2, 6, 67), (1, 2, 36, 96), (2, 4, 128, 128)]


@dataclass
class Rule:
    """Arguments of a recurrence over t tokens. inputs: names of those with a row for each token, the first two k or B
    (t, heads, K) and v or x (t, heads, V). columns: names of those that are the columns of x and of gates, in the op's
    order. State slots are (heads of v, V / lanes, K, lanes)."""

    inputs: ClassVar[tuple[str, ...]]
    columns: ClassVar[tuple[tuple[str, ...], tuple[str, ...]]]
    rule: ClassVar[tuple[str, ...]] = ()  # names of the arguments that Mamba-2 alone has

    def arena(self, slots: int) -> torch.Tensor:
        """Random states, every second layer's, as a model's arena has them."""
        (_, _, k), (_, heads, v) = (getattr(self, name).shape for name in self.inputs[:2])
        lanes = value_lanes(k, v)
        return torch.randn(slots, 2, heads, v // lanes, k, lanes)[:, 1]

    def run(self, state: torch.Tensor, batch: Ragged, own: int = 0) -> torch.Tensor:
        """The op's result, (t, heads, V). Its x and gates are slices of wider rows. own: see CudaOps."""
        k, v = (getattr(self, name) for name in self.inputs[:2])
        x, gates = (self._wide([getattr(self, name) for name in names]) for names in self.columns)
        poison((len(v), v.shape[1] * v.shape[2]), torch.float32)
        ops = backend_for(x.device)
        ops.own = own
        rule = (getattr(self, name) for name in self.rule)
        return ops.head_scan(x, gates, k.shape[1], self.A, self.dt_bias, state, batch, *rule).view(v.shape)

    def _wide(self, parts: list[torch.Tensor]) -> torch.Tensor:
        rows = torch.cat([part.flatten(1) for part in parts], 1)
        wide = torch.full((len(rows), rows.shape[1] + 5), torch.nan, dtype=rows.dtype)
        wide[:, 3:-2] = rows
        return wide[:, 3:-2]

    def tokens(self, begin: int, end: int) -> Any:
        cut = {name: getattr(self, name)[begin:end] for name in self.inputs}
        return dataclasses.replace(self, **cut)


@dataclass
class DeltaRule(Rule):
    """Arguments of the gated delta rule."""

    inputs = ("k", "v", "q", "b", "a")
    columns = ("q", "k", "v"), ("b", "a")

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    b: torch.Tensor
    a: torch.Tensor
    A: torch.Tensor
    dt_bias: torch.Tensor
    dtype: torch.dtype

    @classmethod
    def random(cls, t: int, size: tuple[int, int, int, int], dtype: torch.dtype = torch.float32) -> DeltaRule:
        """q, k and v are column slices of one matrix, and so are b and a, as in the model."""
        hk, hv, k, v = size
        qkv, ba = torch.randn(t, 2 * hk * k + hv * v).to(dtype), torch.randn(t, 2 * hv).to(dtype)
        parts = qkv.split([hk * k, hk * k, hv * v], 1)
        q, k_, v_ = (part.unflatten(1, (heads, -1)) for part, heads in zip(parts, (hk, hk, hv), strict=True))
        return cls(q, k_, v_, ba[:, :hv], ba[:, hv:], -torch.rand(hv) - 0.01, torch.randn(hv), dtype)

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        """Those before the states."""
        return self.q, self.k, self.v, self.b, self.a, self.A, self.dt_bias

    def expect(self, state: torch.Tensor, batch: Ragged) -> torch.Tensor:
        """The reference in float64; state must be float64."""
        with one_thread():
            return reference.delta_rule(*(value.double() for value in self.arguments), state, batch)


LIMITS = 0.05, 1.5  # of the step; both bind for some tokens


@dataclass
class Ssd(Rule):
    """Arguments of the recurrence of Mamba-2."""

    inputs = ("B", "x", "C", "dt")
    columns = ("C", "B", "x"), ("dt",)
    rule = ("D", "dt_limits")

    x: torch.Tensor
    dt: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor
    dt_bias: torch.Tensor
    dt_limits: tuple[float, float]
    dtype: torch.dtype

    @classmethod
    def random(cls, t: int, size: tuple[int, int, int, int], dtype: torch.dtype = torch.float32) -> Ssd:
        """C, B and x are column slices of one matrix, as in the model."""
        g, h, n, p = size
        parts = torch.randn(t, 2 * g * n + h * p).to(dtype).split([g * n, g * n, h * p], 1)
        C, B, x = (part.unflatten(1, (heads, -1)) for part, heads in zip(parts, (g, g, h), strict=True))
        dt = torch.randn(t, 2 * h).to(dtype)[:, h:]
        return cls(x, dt, -torch.rand(h) - 0.01, B, C, torch.randn(h), torch.randn(h), LIMITS, dtype)

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        """The tensors before the states."""
        return self.x, self.dt, self.A, self.B, self.C, self.D, self.dt_bias

    def expect(self, state: torch.Tensor, batch: Ragged) -> torch.Tensor:
        """The reference in float64; state must be float64."""
        with one_thread():
            return reference.ssd(*(value.double() for value in self.arguments), self.dt_limits, state, batch)


RULES = {"delta": DeltaRule, "ssd": Ssd}
