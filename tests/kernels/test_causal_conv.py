"""The causal convolution against float64 and against torch's own."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from apcbatch.kernels.cpu.backend import CpuBackend
from tests.kernels.recurrent import (
    DTYPES,
    Conv,
    assert_close,
    fresh_seed,
    in_pieces,
    on_devices,
    one_shot,
    ragged,
    same_bits,
)

ops = CpuBackend()

LENGTHS = [1, 2, 3, 4, 5, 63, 64, 65, 128, 129, 151, 372, 1024, 1134, 4096]


@on_devices
@pytest.mark.parametrize("width, options", [(2, False), (3, True), (4, True), (4, False)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_float64(dtype, width, options):
    """A tap out of place, a missing bias, or a state that begins or ends in the wrong slot."""
    fresh_seed()
    inputs = Conv.random(sum(LENGTHS), 24, width, dtype, options)
    b = len(LENGTHS)
    initial = [s if s % 3 else -1 for s in range(b)]
    batch = ragged(LENGTHS, initial, range(b), [[((n + 1) // 2, b + s)] for s, n in enumerate(LENGTHS)])
    arena = inputs.arena(2 * b)
    wide = arena.double()
    outputs = inputs.run(arena, batch)
    assert_close(outputs, inputs.expect(wide, batch), dtype)
    assert same_bits(arena, wide.to(dtype))


def test_reference_is_the_convolution():
    """A reference that is wrong in the same way as the kernel."""
    fresh_seed()
    inputs = Conv.random(50, 10)
    wide = inputs.arena(1).double()
    padded, taps = F.pad(inputs.x.double().t(), (3, 0)), inputs.weight.double().unsqueeze(1)
    expected = F.silu(F.conv1d(padded, taps, inputs.bias.double(), groups=10))
    torch.testing.assert_close(inputs.expect(wide, ragged([50])), expected.t())


@on_devices
@pytest.mark.parametrize("width", [1, 5, 8])
def test_unusual_widths(width):
    """A width of one tap, which has no state, or more taps than usual."""
    fresh_seed()
    inputs = Conv.random(20, 20, width)
    arena = inputs.arena(2)
    wide = arena.double()
    batch = ragged([15, 5], [0, -1], [0, 1])
    assert_close(inputs.run(arena, batch), inputs.expect(wide, batch), torch.float32)
    assert same_bits(arena, wide.float())


@on_devices
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pieces_of_one_and_two_tokens(dtype, width):
    """Pieces shorter than the taps, at and across a boundary, that lose or repeat an input."""
    generator = random.Random(fresh_seed())
    inputs = Conv.random(40, 24, width, dtype)
    positions = [1, 2, 3, 4, 16, 32]
    outputs, truth = one_shot(inputs, 40, positions)
    for ends in (range(1, 41), range(2, 41, 2), [1, *range(3, 40, 2), 40], [15, 16, 17, 31, 33, 40]):
        arena = inputs.arena(len(positions) + 1)
        slot_of = {position: slot for slot, position in enumerate(positions)}.get
        assert same_bits(in_pieces(inputs, list(ends), arena, len(positions), slot_of), outputs)
        assert same_bits(arena, truth)
    ends = sorted(generator.sample(range(1, 40), 20)) + [40]
    arena = inputs.arena(1)
    assert same_bits(in_pieces(inputs, ends, arena, 0, lambda position: None), outputs)
    assert same_bits(arena[0], truth[-1])


@on_devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tail_is_the_last_raw_inputs(dtype):
    """A tail of outputs or of rounded inputs, or one that is not padded with zeros before token 0."""
    fresh_seed()
    inputs = Conv.random(9, 24, 4, dtype)
    _, arena = one_shot(inputs, 9, range(1, 10))
    padded = torch.cat([torch.zeros(3, 24, dtype=dtype), inputs.x])
    for position in range(1, 10):
        assert same_bits(arena[position - 1], padded[position : position + 3]), f"tail at {position}"


@on_devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_number_of_channels(dtype):
    """A channel whose bits depend on its lane, or a write past the last channel."""
    fresh_seed()
    whole = Conv.random(70, 300, 4, dtype)
    batch = ragged([70], [0], [1])
    truth = whole.arena(2)
    start = truth.clone()
    outputs = whole.run(truth, batch)
    for begin, end in [(0, 1), (0, 7), (3, 11), (5, 20), (1, 34), (0, 257), (31, 300)]:
        arena = start[..., begin:end].contiguous()
        part = Conv(
            whole.x[:, begin:end].contiguous(),
            whole.weight[begin:end].contiguous(),
            whole.bias[begin:end].contiguous(),
            dtype,
        )
        assert same_bits(part.run(arena, batch), outputs[:, begin:end]), f"channels {begin} to {end}"
        assert same_bits(arena, truth[..., begin:end]), f"states of channels {begin} to {end}"


@on_devices
@pytest.mark.parametrize("b", [1, 2, 17, 33])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_batch_of_ragged_sequences(b, dtype):
    """A sequence that changes with its batch mates, or a slot changed that no sequence names."""
    generator = random.Random(fresh_seed())
    lengths = [generator.choice(LENGTHS[:11]) for _ in range(b)]
    inputs = Conv.random(sum(lengths), 40, 4, dtype)
    initial = [generator.choice([-1, s]) for s in range(b)]
    final = [generator.choice([-1, s, b + s]) for s in range(b)]
    kept = [[(generator.randint(1, n), 2 * b + s)] if n > 2 else [] for s, n in enumerate(lengths)]
    arena = inputs.arena(4 * b)
    arena[3 * b :] = float("nan")
    before, alone = arena.clone(), arena.clone()
    outputs = inputs.run(arena, ragged(lengths, initial, final, kept))
    begin = 0
    for s, length in enumerate(lengths):
        one = inputs.tokens(begin, begin + length)
        single = one.run(alone, ragged([length], initial[s : s + 1], final[s : s + 1], kept[s : s + 1]))
        assert same_bits(single, outputs[begin : begin + length]), f"sequence {s}"
        begin += length
    assert same_bits(arena, alone)
    named = {*final, *(slot for pairs in kept for _, slot in pairs)}
    for slot in set(range(4 * b)) - named:
        assert same_bits(arena[slot], before[slot]), f"slot {slot} was written"


def test_threads_change_nothing():
    """A result that depends on how the work is split over threads, by channels or by tokens; a state that is written
    before it is read."""
    fresh_seed()
    lengths = [1, 90, 3, 200, 7]
    inputs = Conv.random(sum(lengths), 400)
    start = inputs.arena(8)
    batch = ragged(lengths, [0, 1, -1, 3, 4], range(5), [[], [(64, 5)], [], [(1, 6), (200, 7)], []])
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 8, 16):
            torch.set_num_threads(threads)
            arena = start.clone()
            results.append((inputs.run(arena, batch), arena))
    finally:
        torch.set_num_threads(before)
    for outputs, arena in results[1:]:
        assert same_bits(outputs, results[0][0])
        assert same_bits(arena, results[0][1])


REFUSED = {
    "x must be (4, d_inner)": {"x": torch.zeros(3, 24)},
    "with a stride of 1 within a row": {"x": torch.zeros(24, 4).t()},
    "weight must be contiguous of shape (24, 4)": {"weight": torch.zeros(23, 4)},
    "weight must have 1 to 8 columns": {"weight": torch.zeros(24, 9)},
    "weight must be float32 or bfloat16": {"weight": torch.zeros(24, 4).half(), "bias": torch.zeros(24).half()},
    "bias must be contiguous of shape (24,) and torch.float32": {"bias": torch.zeros(24).bfloat16()},
    "state must be torch.float32 of shape (num_slots, 3, 24)": {"state": torch.zeros(9, 3, 24).bfloat16()},
    "state must have slot 7": {"state": torch.zeros(7, 3, 24)},
    "x must be on the CPU": {"x": torch.zeros(4, 24, device="meta")},
    "state must be on the CPU": {"state": torch.zeros(9, 3, 24, device="meta")},
}


@pytest.mark.parametrize("message", REFUSED)
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
