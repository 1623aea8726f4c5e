"""The mixer in one call: the bits of its ops one by one, close to float64, cut-invariant, and nothing else touched."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from apcbatch.kernels.cpu.mamba import FusedMamba
from apcbatch.kernels.layer import MambaWeights, PreNorm
from benchmarks.bench.parts import recorded_parts
from tests.effort import table
from tests.kernels.mixers import (
    assert_close_to_float64,
    assert_cuts_and_mates_change_no_bit,
    assert_equals_one_by_one,
    ops,
    run,
)
from tests.kernels.recurrent import DTYPES, ragged

pytestmark = pytest.mark.pairwise

SIZES = [(36, 72, 8, 3, 4), (33, 45, 5, 1, 2), (48, 160, 16, 7, 4), (17, 16, 20, 5, 1)]  # h, d, n, r, w
NORMS = ["none", "plain", "weighted"]


class Mixer:
    """Random weights of one mixer, plain and packed, and an arena of random states."""

    def __init__(self, size: tuple[int, ...], dtype: torch.dtype, norms: str, biases: bool) -> None:
        h, d, n, r, w = size
        shapes = {"in_proj": (2 * d, h), "x_proj": (r + 2 * n, d), "dt_proj": (d, r), "out_proj": (h, d)}
        self.plain = {k: (torch.randn(s) * s[1] ** -0.5).to(dtype) for k, s in shapes.items()}
        self.size, self.dtype = size, dtype
        weights = tuple(1 + 0.2 * torch.randn(size) if norms == "weighted" else None for size in (r, n, n))
        self.norm = PreNorm(1 + 0.2 * torch.randn(h), 1e-5)
        self.weights = MambaWeights(
            **{k: ops.pack_linear(v) for k, v in self.plain.items()},
            in_bias=torch.randn(2 * d) if biases else None,
            out_bias=torch.randn(h) if biases else None,
            conv_weight=torch.randn(d, w),
            conv_bias=torch.randn(d) if biases else None,
            A=-8 * torch.rand(n, d) - 0.1,
            D=torch.randn(d),
            dt_bias=torch.randn(d) - 3,
            norms=None if norms == "none" else weights,
            norm_eps=1e-5,
        )

    def arena(self, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Every second layer's states, as a model's arena has them."""
        _, d, n, _, w = self.size
        ssm, conv = torch.randn(slots, 2, n, d), torch.randn(slots, 2, w - 1, d).to(self.dtype)
        return ssm[:, 1], conv[:, 1]

    def fused(self, ssm: torch.Tensor, conv: torch.Tensor) -> FusedMamba:
        return ops.sub_block("mamba", self.norm, self.weights, ssm, conv)

    def one_by_one(self, sums, delta, ssm, conv, batch, k=ops, packed=None):
        """The ops in turn: the definition. sums changes; k: ops, or the reference with the plain weights."""
        x = k.add_rms_norm_(sums, delta, self.norm.weight.to(sums.dtype), self.norm.eps, self.dtype)
        p = packed or {name: getattr(self.weights, name) for name in self.plain}
        w, (_, d, n, r, _) = self.weights, self.size
        xz = k.linear(x, p["in_proj"], bias=w.in_bias)
        u = k.causal_conv(xz[:, :d], w.conv_weight, w.conv_bias, conv, batch)
        low = k.linear(u, p["x_proj"])
        parts = low[:, :r], low[:, r : r + n], low[:, r + n :]
        if w.norms is not None:
            parts = tuple(
                k.rms_norm(part, norm, w.norm_eps, x.dtype) for part, norm in zip(parts, w.norms, strict=True)
            )
        dt = k.linear(parts[0], p["dt_proj"])
        y = k.selective_scan(u, dt, w.A, parts[1], parts[2], w.D, xz[:, d:], w.dt_bias, ssm, batch)
        return k.linear(y, p["out_proj"], out_dtype=torch.promote_types(x.dtype, torch.float32), bias=w.out_bias)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norms", NORMS)
def test_equals_its_ops_one_by_one(size, dtype, norms, isa):
    """A stride, an address or an order that is another than the single ops': the outputs, the final states and the
    snapshots of a ragged batch differ in a bit, or another slot is touched."""
    mixer = Mixer(size, dtype, norms, biases=norms != "plain")
    assert_equals_one_by_one(mixer)


@table("norms", NORMS)
def test_close_to_float64(norms):
    """A fused step that is wrong in the same way as the single op that it calls."""
    assert_close_to_float64(Mixer(SIZES[0], torch.float32, norms, biases=True), 1e-3)


@table("dtype", DTYPES)
def test_cuts_and_batch_mates_change_no_bit(dtype, threads):
    """A workspace that is shared between sequences, or read beyond a pass: a sequence cut into passes, beside others,
    gives other bits than in one pass alone."""
    assert_cuts_and_mates_change_no_bit(Mixer(SIZES[2], dtype, "weighted", biases=True))


def test_refuses_what_does_not_fit():
    """Addresses handed to the kernels for tensors of another shape, dtype or number of slots."""
    mixer = Mixer(SIZES[0], torch.float32, "none", biases=True)
    ssm, conv = mixer.arena(2)
    fused = mixer.fused(ssm, conv)
    with pytest.raises(ValueError, match="a row for each of the batch's 3 tokens"):
        fused(ops.residual(torch.randn(2, 36)), ragged([3]))
    with pytest.raises(ValueError, match="a row for each of the batch's 3 tokens"):
        fused(ops.residual(torch.randn(4, 36)), ragged([3]))
    for states in ((ssm, mixer.arena(3)[1]), (mixer.arena(3)[0], conv)):
        with pytest.raises(ValueError, match="it has 2 slots"):
            mixer.fused(*states)(ops.residual(torch.randn(3, 36)), ragged([3], [-1], [2]))
    for change in ({"A": torch.zeros(257, 72)}, {"A": torch.zeros(0, 72)}, {"conv_weight": torch.zeros(72, 9)}):
        with pytest.raises(ValueError, match="a mixer has 1 to 256 states and 1 to 8 taps"):
            ops.sub_block("mamba", mixer.norm, replace(mixer.weights, **change), ssm, conv)
    for name, shape in (("in_proj", (145, 36)), ("x_proj", (18, 72)), ("x_proj", (20, 72)), ("dt_proj", (71, 3))):
        change = {name: ops.pack_linear(torch.zeros(shape))}
        with pytest.raises(ValueError, match=f"{name} must be"):
            ops.sub_block("mamba", mixer.norm, replace(mixer.weights, **change), ssm, conv)
    with pytest.raises(ValueError, match="must have the part's 36 columns"):
        fused(ops.residual(torch.randn(3, 35)), ragged([3]))
    with pytest.raises(ValueError, match="the residual must be contiguous of shape"):
        ops.residual(torch.randn(3, 36).bfloat16())
    with pytest.raises(ValueError, match="delta must be contiguous of shape"):
        ops.residual(torch.randn(3, 36)).leave(torch.randn(2, 36))
    with pytest.raises(ValueError, match="must have slot 2, which the batch names; it has 2 slots"):
        fused(ops.residual(torch.randn(3, 36)), ragged([3], [-1], [2]))
    with pytest.raises(ValueError, match="norm must be contiguous of shape"):
        ops.sub_block("mamba", PreNorm(torch.ones(35), 1e-5), mixer.weights, ssm, conv)
    for norms in ((torch.ones(4), None, None), (None, torch.ones(9), None), (None, None, torch.ones(7))):
        with pytest.raises(ValueError, match="_norm must be contiguous of shape"):
            ops.sub_block("mamba", mixer.norm, replace(mixer.weights, norms=norms), ssm, conv)
    with pytest.raises(ValueError, match="state must be torch.float32"):
        mixer.fused(ssm[:, :-1], conv)
    with pytest.raises(ValueError, match="out_proj must be"):
        ops.sub_block("mamba", mixer.norm, replace(mixer.weights, out_proj=mixer.weights.in_proj), ssm, conv)
    with pytest.raises(ValueError, match="conv_bias must be contiguous of shape"):
        ops.sub_block("mamba", mixer.norm, replace(mixer.weights, conv_bias=torch.randn(3)), ssm, conv)


def test_parts_are_recorded_only_while_asked():
    """Times that continue adding up after a measurement, or a part that is never counted."""
    mixer = Mixer(SIZES[0], torch.float32, "weighted", biases=True)
    fused = mixer.fused(*mixer.arena(1))
    x, batch = torch.randn(200, 36), ragged([200])
    with recorded_parts() as seconds:
        run(fused, x, None, batch)
    assert all(seconds[part] > 0 for part in ("matrix products", "convolution", "scan", "norms"))
    assert seconds["experts"] == seconds["gated product"] == 0
    run(fused, x, None, batch)
    with recorded_parts() as seconds:
        pass
    assert not any(seconds.values())
