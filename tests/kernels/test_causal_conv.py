"""The causal convolution against float64 and against torch's own."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from apcbatch.kernels.cpu.backend import CpuBackend
from tests.effort import table
from tests.kernels.recurrent import (
    DTYPES,
    Conv,
    in_pieces,
    on_devices,
    one_shot,
    ragged,
    same_bits,
)

ops = CpuBackend()


def test_reference_is_the_convolution():
    """A reference that is wrong in the same way as the kernel."""
    for options in (True, False):
        inputs = Conv.random(50, 10, options=options)
        wide = inputs.arena(1).double()
        padded, taps = F.pad(inputs.x.double().t(), (3, 0)), inputs.weight.double().unsqueeze(1)
        expected = F.conv1d(padded, taps, inputs.bias.double() if options else None, groups=10)
        expected = F.silu(expected) if options else expected
        torch.testing.assert_close(inputs.expect(wide, ragged([50])), expected.t())


@on_devices
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pieces_of_one_and_two_tokens(dtype, width):
    """Pieces shorter than the taps, at and across a boundary, that lose or repeat an input."""
    inputs = Conv.random(40, 24, width, dtype)
    positions = [1, 2, 3, 4, 16, 32]
    outputs, truth = one_shot(inputs, 40, positions)
    for ends in (range(1, 41), range(2, 41, 2), [1, *range(3, 40, 2), 40], [15, 16, 17, 31, 33, 40]):
        arena = inputs.arena(len(positions) + 1)
        slot_of = {position: slot for slot, position in enumerate(positions)}.get
        assert same_bits(in_pieces(inputs, list(ends), arena, len(positions), slot_of), outputs)
        assert same_bits(arena, truth)
    ends = sorted(random.sample(range(1, 40), 20)) + [40]
    arena = inputs.arena(1)
    assert same_bits(in_pieces(inputs, ends, arena, 0, lambda position: None), outputs)
    assert same_bits(arena[0], truth[-1])


@on_devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tail_is_the_last_raw_inputs(dtype):
    """A tail of outputs or of rounded inputs, or one that is not padded with zeros before token 0."""
    inputs = Conv.random(9, 24, 4, dtype)
    _, arena = one_shot(inputs, 9, range(1, 10))
    padded = torch.cat([torch.zeros(3, 24, dtype=dtype), inputs.x])
    for position in range(1, 10):
        assert same_bits(arena[position - 1], padded[position : position + 3]), f"tail at {position}"


REFUSED = {
    "x must be (4, d_inner)": {"x": torch.zeros(3, 24)},
    "with a stride of 1 within a row": {"x": torch.zeros(24, 4).t()},
    "weight must be contiguous of shape (24, 4)": {"weight": torch.zeros(23, 4)},
    "weight must have 1 to 8 columns": {"weight": torch.zeros(24, 9)},
    "weight must be contiguous of shape (24, 24)": {"weight": torch.zeros(24)},
    "the taps; it has 0": {"weight": torch.zeros(24, 0)},
    "weight must be contiguous of shape (24, 4) and torch.float32": {"weight": torch.zeros(24, 4).bfloat16()},
    "bias must be contiguous of shape (24,) and torch.float32": {"bias": torch.zeros(24).bfloat16()},
    "state must be torch.float32 of shape (num_slots, 3, 24)": {"state": torch.zeros(9, 3, 24).bfloat16()},
    "state must have slot 7": {"state": torch.zeros(7, 3, 24)},
    "x must be on the CPU": {"x": torch.zeros(4, 24, device="meta")},
    "state must be on the CPU": {"state": torch.zeros(9, 3, 24, device="meta")},
}


@table("message", REFUSED)
def test_refuses_what_it_cannot_read(message):
    """Memory read or written out of bounds because an argument was not what the kernel takes it for."""
    good = {
        "x": torch.zeros(4, 24),
        "weight": torch.zeros(24, 4),
        "bias": torch.zeros(24),
        "state": torch.zeros(9, 3, 24),
        "ragged": ragged([3, 1], [7, -1], [7, 2]),
    }
    ops.causal_conv(**good)
    with pytest.raises(ValueError) as error:
        ops.causal_conv(**{**good, **REFUSED[message]})
    assert message in str(error.value)
