"""The scan and the convolution: right against float64, and what their bits may not depend on."""

from __future__ import annotations

import random

import pytest
import torch

from tests.effort import table
from tests.kernels.recurrent import (
    DTYPES,
    THREADED,
    Conv,
    Scan,
    assert_close,
    assert_mates_change_no_bit,
    assert_threads_change_no_bit,
    on_devices,
    ragged,
    same_bits,
)

LENGTHS = [1, 2, 3, 4, 5, 63, 64, 65, 128, 129, 151]
CASES = [  # op, states or taps of a channel, with what may be left out
    *((Scan, 8, True), (Scan, 16, False), (Scan, 64, True), (Scan, 128, False)),
    *((Conv, 2, False), (Conv, 3, True), (Conv, 4, True), (Conv, 4, False)),
]
OPS = [(Scan, 16), (Conv, 4)]

pytestmark = pytest.mark.pairwise


@on_devices
@pytest.mark.parametrize("op, size, options", CASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_float64(dtype, op, size, options):
    """A wrong term or tap, a token lost at a tile's edge, or a state that begins or ends in the wrong slot."""
    lengths = [*LENGTHS, 372, 1134]
    inputs, b = op.random(sum(lengths), 24, size, dtype, options), len(lengths)
    initial = [s if s % 3 else -1 for s in range(b)]
    batch = ragged(lengths, initial, range(b), [[((n + 1) // 2, b + s)] for s, n in enumerate(lengths)])
    arena = inputs.arena(2 * b)
    wide = arena.double()
    outputs = inputs.run(arena, batch)
    assert_close(outputs, inputs.expect(wide, batch), dtype)
    assert_close(arena, wide, dtype)
    assert op is Scan or same_bits(arena, wide.to(dtype))


@on_devices
@pytest.mark.parametrize(
    "op, size", [*((Scan, n) for n in (1, 2, 3, 5, 7, 11, 23, 31, 96, 255, 256)), *((Conv, w) for w in (1, 5, 8))]
)
def test_any_number_of_states_and_taps(op, size, device):
    """A number of states that the register blocks do not divide, one tap, which has no state, or many taps."""
    inputs, batch = op.random(70, 20, size), ragged([65, 5], [0, -1], [1, 2])
    arena = inputs.arena(3)
    if device == "cuda" and op is Scan and size > 128:
        with pytest.raises(ValueError, match="A must have 1 to 128 rows on cuda"):
            inputs.run(arena, batch)
        return
    wide = arena.double()
    assert_close(inputs.run(arena, batch), inputs.expect(wide, batch), torch.float32)
    assert_close(arena, wide, torch.float32)


@on_devices
@pytest.mark.parametrize("op, size", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_number_of_channels(dtype, op, size):
    """A channel whose bits depend on its lane or tile, or on a partial vector; a write past the last one."""
    whole = op.random(70, 300, size, dtype)
    batch = ragged([70], [0], [1], [[(33, 2)]])
    truth = whole.arena(3)
    start = truth.clone()
    outputs = whole.run(truth, batch)
    for begin, end in [(0, 1), (0, 7), (3, 11), (5, 20), (1, 34), (0, 64), (0, 65), (0, 257), (31, 300), (299, 300)]:
        arena = start[..., begin:end].contiguous()
        part = whole.channels(begin, end).run(arena, batch)
        assert same_bits(part, outputs[:, begin:end]), f"outputs of channels {begin} to {end}"
        assert same_bits(arena, truth[..., begin:end]), f"states of channels {begin} to {end}"


@on_devices
@pytest.mark.parametrize("op, size", OPS)
@pytest.mark.parametrize("b", [1, 2, 5, 17, 33])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_batch_of_ragged_sequences(b, dtype, op, size):
    """A sequence that changes with its batch mates, or a slot changed that no sequence names."""
    lengths = [random.choice(LENGTHS) for _ in range(b)]
    assert_mates_change_no_bit(op.random(sum(lengths), 40, size, dtype), lengths)


@table("op, size", OPS)
def test_threads_change_nothing(op, size):
    """A result that depends on how the work is split over threads, by channels or by tokens; a state that is written
    before it is read."""
    assert_threads_change_no_bit(op.random(sum(THREADED), 400, size))
