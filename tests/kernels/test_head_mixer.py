"""The gated delta net and Mamba-2 mixers in one call: the bits of their kernels one by one, close to float64,
cut-invariant."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from apcbatch.kernels.cpu.head_mixer import FusedHeadMixer
from apcbatch.kernels.layer import DeltaNetWeights, Mamba2Weights, PreNorm
from apcbatch.layout import value_lanes
from benchmarks.bench.parts import recorded_parts
from tests.effort import table
from tests.kernels.heads import LIMITS
from tests.kernels.mixers import (
    assert_close_to_float64,
    assert_cuts_and_mates_change_no_bit,
    assert_equals_one_by_one,
    ops,
    run,
)
from tests.kernels.recurrent import DTYPES, ragged

pytestmark = pytest.mark.pairwise

SIZES = [(36, 2, 4, 8, 24, 4), (33, 1, 1, 5, 8, 2), (48, 2, 6, 12, 96, 4), (17, 1, 3, 16, 40, 1)]  # h, Hk, Hv, K, V, w


class Mixer:
    """Random weights of one mixer, plain and packed, and an arena of random states. gates: columns of in_proj for each
    value head after z."""

    kind, gates = "delta", 2

    def __init__(self, size: tuple[int, ...], dtype: torch.dtype) -> None:
        h, hk, hv, k, v, _ = size
        self.size, self.dtype, self.channels = size, dtype, 2 * hk * k + hv * v
        shapes = {"in_proj": (self.channels + hv * v + self.gates * hv, h), "out_proj": (h, hv * v)}
        self.plain = {name: (torch.randn(shape) * shape[1] ** -0.5).to(dtype) for name, shape in shapes.items()}
        self.norm = PreNorm(1 + 0.2 * torch.randn(h), 1e-6)
        self.weights = self.random({name: ops.pack_linear(weight) for name, weight in self.plain.items()})

    def random(self, projections):
        _, hk, hv, _, v, w = self.size
        return DeltaNetWeights(
            **projections,
            key_heads=hk,
            conv_weight=torch.randn(self.channels, w),
            A=-torch.rand(hv) - 0.01,
            dt_bias=torch.randn(hv),
            norm=1 + 0.2 * torch.randn(v),
            norm_eps=1e-6,
        )

    def arena(self, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Every second layer's states, as a model's arena has them."""
        _, _, hv, k, v, w = self.size
        lanes = value_lanes(k, v)
        states = torch.randn(slots, 2, hv, v // lanes, k, lanes)
        return states[:, 1], torch.randn(slots, 2, w - 1, self.channels).to(self.dtype)[:, 1]

    def fused(self, state: torch.Tensor, conv: torch.Tensor) -> FusedHeadMixer:
        return ops.sub_block(self.kind, self.norm, self.weights, state, conv)

    def one_by_one(self, sums, pending, state, conv, batch, k=ops, packed=None):
        """The ops in turn: the definition. sums changes. k: the ops, or the reference with the plain weights."""
        x = k.add_rms_norm_(sums, pending, self.norm.weight.to(sums.dtype), self.norm.eps, self.dtype)
        p = packed or {name: getattr(self.weights, name) for name in self.plain}
        w, (_, _, hv, _, values, _) = self.weights, self.size
        rows = k.linear(x, p["in_proj"])
        qkv, z, gates = rows.split([self.channels, hv * values, self.gates * hv], 1)
        qkv = k.causal_conv(qkv, w.conv_weight, getattr(w, "conv_bias", None), conv, batch)
        y = self.recurrence(k, qkv, gates, z, state, batch)
        return k.linear(y, p["out_proj"], out_dtype=torch.promote_types(x.dtype, torch.float32))

    def recurrence(self, k, x, gates, z, state, batch):
        """The recurrence and its gated norm."""
        w, (_, hk, hv, *_) = self.weights, self.size
        return k.gated_norm(k.head_scan(x, gates, hk, w.A, w.dt_bias, state, batch), z, hv, w.norm, w.norm_eps)


class Mamba2Mixer(Mixer):
    kind, gates = "mamba2", 1

    def random(self, projections):
        _, g, heads, _, columns, w = self.size
        return Mamba2Weights(
            **projections,
            groups=g,
            conv_weight=torch.randn(self.channels, w),
            conv_bias=torch.randn(self.channels) if w > 2 else None,
            A=-torch.rand(heads) - 0.01,
            D=torch.randn(heads),
            dt_bias=torch.randn(heads),
            dt_limits=LIMITS,
            norm=1 + 0.2 * torch.randn(heads * columns),
            norm_eps=1e-6,
        )

    def recurrence(self, k, x, gates, z, state, batch):
        w, g = self.weights, self.size[1]
        y = k.head_scan(x, gates, g, w.A, w.dt_bias, state, batch, w.D, w.dt_limits)
        return k.gated_norm(y, z, g, w.norm, w.norm_eps, w.gate_first)


class NormFirstMixer(Mamba2Mixer):
    def random(self, projections):
        return replace(super().random(projections), gate_first=False)


class NormlessMixer(Mamba2Mixer):
    def random(self, projections):
        return replace(super().random(projections), norm=None)


MIXERS = {"delta": Mixer, "mamba2": Mamba2Mixer, "norm first": NormFirstMixer, "normless": NormlessMixer}


@pytest.mark.parametrize("kind", MIXERS)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_its_kernels_one_by_one(kind, size, dtype, isa, threads):
    """A stride, an address, a rounding or an order that is another than the single kernels': the outputs, the final
    states and the snapshots of a ragged batch differ in a bit, or another slot is touched."""
    mixer = MIXERS[kind](size, dtype)
    assert_equals_one_by_one(mixer)


@pytest.mark.slow
@table("kind", MIXERS)
@table("size", SIZES)
def test_close_to_float64(kind, size):
    """A fused step that is wrong in the same way as the single kernel that it calls."""
    assert_close_to_float64(MIXERS[kind](size, torch.float32), 1e-4)


@pytest.mark.parametrize("kind", MIXERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuts_and_batch_mates_change_no_bit(kind, dtype, threads):
    """A workspace that is shared between sequences, or read beyond a pass: a sequence cut into passes, beside others,
    gives other bits than in one pass alone."""
    assert_cuts_and_mates_change_no_bit(MIXERS[kind](SIZES[2], dtype))


def test_refuses_what_does_not_fit():
    """Addresses handed to the kernels for tensors of another shape, dtype or number of slots."""
    mixer = Mixer(SIZES[0], torch.float32)
    delta, conv = mixer.arena(2)
    fused = mixer.fused(delta, conv)
    with pytest.raises(ValueError, match="a row for each of the batch's 3 tokens"):
        fused(ops.residual(torch.randn(2, 36)), ragged([3]))
    for states in ((delta, mixer.arena(3)[1]), (mixer.arena(3)[0], conv)):
        with pytest.raises(ValueError, match="it has 2 slots"):
            mixer.fused(*states)(ops.residual(torch.randn(3, 36)), ragged([3], [-1], [2]))
    with pytest.raises(ValueError, match="must have the part's 36 columns"):
        fused(ops.residual(torch.randn(3, 35)), ragged([3]))
    for change, sentence in (
        ({"in_proj": ops.pack_linear(torch.zeros(231, 36))}, "in_proj must be"),
        ({"out_proj": ops.pack_linear(torch.zeros(36, 95))}, "out_proj must be"),
        ({"out_proj": ops.pack_linear(torch.zeros(36, 96).bfloat16())}, "out_proj must be"),
        ({"conv_weight": torch.zeros(128, 9)}, "a mixer has 1 to 8 taps"),
        ({"conv_weight": torch.zeros(129, 4)}, "the convolution must have the channels of q and k"),
        ({"key_heads": 3}, "the convolution must have the channels of q and k"),
        ({"key_heads": 0}, "the convolution must have the channels of q and k"),
        ({"A": torch.zeros(4).double()}, "A must be contiguous of shape"),
        ({"dt_bias": torch.zeros(3)}, "dt_bias must be contiguous of shape"),
        ({"norm": torch.ones(48)[::2]}, "norm must be contiguous of shape"),
    ):
        with pytest.raises(ValueError, match=sentence):
            ops.sub_block("delta", mixer.norm, replace(mixer.weights, **change), delta, conv)
    ssd = Mamba2Mixer(SIZES[0], torch.float32)
    for change, sentence in (
        ({"in_proj": ops.pack_linear(torch.zeros(231, 36))}, "in_proj must be"),
        ({"groups": 3}, "the convolution must have the channels of C and B, 3 heads each, and of 4 heads of 24"),
        ({"conv_bias": torch.zeros(127)}, "conv_bias must be contiguous of shape"),
        ({"D": torch.zeros(3)}, "D must be contiguous of shape"),
        ({"norm": torch.zeros(97)}, "norm must be contiguous of shape"),
    ):
        with pytest.raises(ValueError, match=sentence):
            ops.sub_block("mamba2", ssd.norm, replace(ssd.weights, **change), *ssd.arena(2))
    for states in ((delta[:, :, :, :7], conv), (delta[..., :23], conv), (delta, conv[:, :2]), (delta, conv.bfloat16())):
        with pytest.raises(ValueError, match="state must"):
            mixer.fused(*states)
    with pytest.raises(ValueError, match="norm must be contiguous of shape"):
        ops.sub_block("delta", PreNorm(torch.ones(35), 1e-5), mixer.weights, delta, conv)


def test_parts_are_recorded():
    """A part of the mixer's time that is never counted, or counted as another."""
    mixer = Mixer(SIZES[0], torch.float32)
    with recorded_parts() as seconds:
        run(mixer.fused(*mixer.arena(1)), torch.randn(200, 36), None, ragged([200]))
    assert all(seconds[part] > 0 for part in ("matrix products", "convolution", "scan", "norms"))
    assert seconds["experts"] == seconds["gated product"] == seconds["attention"] == 0
