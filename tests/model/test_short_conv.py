"""The gated short convolution of LFM2: against its definition, at every cut, and its state."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from apcbatch.kernels.cpu.backend import CpuBackend
from apcbatch.kernels.layer import PreNorm, ShortConvWeights
from apcbatch.kernels.processor import set_isa
from apcbatch.model.families import load_model_config, state_layout
from tests.effort import table, tries
from tests.kernels.recurrent import DTYPES, ragged, same_bits


class Mixer:
    """A short convolution of random weights, its states and its definition."""

    def __init__(self, h: int, width: int, dtype: torch.dtype, slots: int = 4) -> None:
        self.ops, self.h, self.dtype = CpuBackend(), h, dtype
        self.in_proj, self.out_proj = ((torch.randn(n * h, h) * h**-0.5).to(dtype) for n in (3, 1))
        self.taps, self.norm = torch.randn(h, width), PreNorm(1 + 0.2 * torch.randn(h), 1e-5)
        pack = self.ops.pack_linear
        weights = ShortConvWeights(pack(self.in_proj), pack(self.out_proj), self.taps)
        self.conv = torch.full((slots, width - 1, h), float("nan"), dtype=dtype)
        self.part = self.ops.sub_block("short_conv", self.norm, weights, self.conv)

    def run(self, x: torch.Tensor, batch: Any) -> torch.Tensor:
        residual = self.ops.residual(x.clone())
        self.part(residual, batch)
        return residual.delta

    def expected(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(the output, all inputs of the convolution) for one sequence, each rounded where the mixer rounds it, by
        sums in float64."""
        normed = self.ops.rms_norm(x, self.norm.weight, self.norm.eps, self.dtype)
        b, c, v = self.ops.linear(normed, self.ops.pack_linear(self.in_proj)).double().chunk(3, 1)
        raw = (b * v).to(self.dtype)
        width = self.taps.shape[1]
        padded = torch.cat([torch.zeros(width - 1, self.h), raw]).double()
        sums = sum(padded[k : k + len(x)] * self.taps[:, k].double() for k in range(width))
        y = (c * sums.to(self.dtype)).to(self.dtype)
        return self.ops.linear(y, self.ops.pack_linear(self.out_proj), out_dtype=torch.float32), raw


@table("dtype", DTYPES)
@table("h, width", [(5, 3), (16, 3), (37, 2), (130, 4), (33, 8)])
def test_the_mixer_is_its_definition_however_it_is_cut(dtype: torch.dtype, h: int, width: int, threads: int) -> None:
    """Catches B, C and x in another order, a SiLU that is not there, a tap of another token, a snapshot that is not the
    inputs before it, and a cut of the prompt that changes a bit."""
    for _ in range(tries(20)):
        mixer, length = Mixer(h, width, dtype), random.choice([1, 2, 3, 64, 65, random.randint(1, 300)])
        x, kept = torch.randn(length, h), random.randint(1, length)
        whole = mixer.run(x, ragged([length], [-1], [0], [[(kept, 2)]]))
        expected, raw = mixer.expected(x)
        assert (whole - expected).abs().max() <= (1e-5 if dtype == torch.float32 else 0.05) * expected.abs().max()
        tail = torch.cat([torch.zeros(width - 1, h, dtype=dtype), raw[:kept]])[kept:]
        assert same_bits(mixer.conv[2], tail)
        ends = sorted({*(random.randint(1, length) for _ in range(random.choice([0, 1, 5, 300]))), length})
        pieces = [
            mixer.run(x[begin:end], ragged([end - begin], [1 if begin else -1], [1]))
            for begin, end in zip([0, *ends], ends, strict=False)
        ]
        assert same_bits(torch.cat(pieces), whole) and same_bits(mixer.conv[1], mixer.conv[0]), ends


@table("dtype", DTYPES)
def test_instruction_sets_give_the_same_bits_and_sequences_do_not_meet(
    dtype: torch.dtype, every_isa: list[str]
) -> None:
    """Catches a vector width, or a neighbour in the batch, that changes a bit."""
    mixer, x = Mixer(37, 3, torch.float32), torch.randn(70, 37)
    if dtype != torch.float32:
        mixer = Mixer(37, 3, dtype)
    batch, answers = ragged([40, 1, 29], [-1, -1, -1], [0, 1, 2]), []
    for isa in every_isa:
        set_isa(isa)
        answers.append(mixer.run(x, batch))
        alone = mixer.run(x[41:], ragged([29], [-1], [3]))
        assert same_bits(answers[-1][41:], alone) and same_bits(mixer.conv[2], mixer.conv[3]), isa
    if dtype == torch.float32:
        assert all(same_bits(one, answers[0]) for one in answers)


def test_what_does_not_fit_is_refused() -> None:
    """Catches addresses handed to the kernels for tensors of another shape or dtype."""
    ops, norm = CpuBackend(), PreNorm(torch.ones(8), 1e-5)
    pack, conv = ops.pack_linear, torch.zeros(2, 2, 8)
    good = {"in_proj": torch.randn(24, 8), "out_proj": torch.randn(8, 8), "conv_weight": torch.randn(8, 3)}
    for name, wrong, sentence in [
        ("in_proj", torch.randn(23, 8), r"in_proj must be \(24, 8\)"),
        ("out_proj", torch.randn(8, 7), "out_proj must be"),
        ("out_proj", torch.randn(8, 8).bfloat16(), "out_proj must be .* torch.float32"),
        ("conv_weight", torch.randn(8, 9), "a mixer has 1 to 8 taps; this one 9"),
        ("conv_weight", torch.randn(7, 3), "conv_weight must be"), ("conv_weight", torch.randn(8, 4), "."),
    ]:  # fmt: skip
        tensors = {**good, name: wrong}
        weights = ShortConvWeights(pack(tensors["in_proj"]), pack(tensors["out_proj"]), tensors["conv_weight"])
        with pytest.raises(ValueError, match=sentence):
            ops.sub_block("short_conv", norm, weights, conv)


def test_the_state_is_the_last_inputs_alone(tiny_checkpoint: Callable[..., Path]) -> None:
    """Catches a state that holds more than the tail of each convolution."""
    layout = state_layout(load_model_config(tiny_checkpoint("lfm2")), "bfloat16")
    assert layout.slot_bytes == 3 * 2 * 36 * 2 and layout.token_bytes == 2 * 2 * 6 * 2
    assert {name: tensor.shape for name, tensor in layout.stored().items()} == {
        "conv": (3, 2, 36), "kv": (1, 2, None, 2, 6),
    }  # fmt: skip
