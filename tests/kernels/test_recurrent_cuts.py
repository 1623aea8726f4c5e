"""Cases 1 to 4: where a sequence is cut, and which boundaries are kept, changes no bit of anything."""

from __future__ import annotations

import pytest
import torch

from apcbatch.prefix import boundaries_in
from tests.effort import tries
from tests.kernels.recurrent import (
    DTYPES,
    Inputs,
    assert_close,
    both,
    in_pieces,
    on_devices,
    one_shot,
    ragged,
    same_bits,
)

BLOCKS = [1, 16, 64, 128, 256, 512, 528, 544, 560, 1024, 1600, 2048, 4096]
BUDGETS = [1, 7, 100, 364, 512, 800, 900, 1599, 1600, 1601, 2000, 2048]


@on_devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_block_is_published_at_its_end(dtype):
    """A block of 2048 published with the state that the second pass began with (1866), or with that of its end."""
    assert list(boundaries_in(1866, 1866 + 1100, 2048)) == [2048]
    for length in (1866 + 1100, 3026):
        for inputs in both(length, 24, 16, dtype):
            _, truth = one_shot(inputs, length, [1866, 2048])
            arena = inputs.arena(3)
            untouched = arena[2].clone()
            in_pieces(inputs, [1866, length], arena, 0, {2048: 1}.get)
            assert same_bits(arena[1], truth[1]) and not same_bits(arena[1], truth[0])
            assert same_bits(arena[0], truth[2]) and same_bits(arena[2], untouched)


@pytest.fixture(scope="module")
def made_on() -> dict[str, list[tuple[Inputs, torch.Tensor, torch.Tensor]]]:
    """What every_position has made on each device."""
    return {}


@pytest.fixture
def every_position(device, made_on) -> list[tuple[Inputs, torch.Tensor, torch.Tensor]]:
    """Arguments, outputs and the states at each of 4500 positions, after checking them against float64."""
    if device in made_on:
        return made_on[device]
    made = made_on[device] = []
    for inputs in both(4500, 24, 8):
        positions = list(boundaries_in(0, 4500, 1))
        outputs, arena = one_shot(inputs, 4500, positions)
        wide = torch.zeros(4501, *arena.shape[1:], dtype=torch.float64)
        batch = ragged([4500], [-1], [4500], [[(position, position - 1) for position in positions]])
        expected = inputs.expect(wide, batch)
        assert_close(outputs, expected, torch.float32)
        assert_close(arena, wide, torch.float32)
        made.append((inputs, outputs, arena))
    return made


@on_devices
@pytest.mark.parametrize("block_size", BLOCKS)
def test_grid_of_4500_tokens(every_position, block_size):
    """A grid that divides no tile, or exceeds every tile, moves a snapshot or disturbs the running state."""
    for inputs, outputs, states in every_position:
        positions = list(boundaries_in(0, 4500, block_size))
        again, arena = one_shot(inputs, 4500, positions)
        assert same_bits(again, outputs)
        for slot, position in enumerate(positions):
            assert same_bits(arena[slot], states[position - 1]), f"snapshot at {position}"
        assert same_bits(arena[-1], states[-1])


@on_devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_way_of_cutting(dtype):
    """A stored byte that depends on the budgets a prefill was cut with, whether or not they meet the grid."""
    length, positions = 3602, [1600, 3200]
    singles = range(3200 - tries(3199), 3200)  # budget 1, at effort 1 before a boundary alone
    for inputs in both(length, 24, 8, dtype):
        outputs, truth = one_shot(inputs, length, positions)
        for budget in BUDGETS:
            arena = inputs.arena(len(positions) + 1)
            ends = [*(singles if budget == 1 else range(budget, length, budget)), length]
            slot_of = {position: slot for slot, position in enumerate(positions)}.get
            pieces = in_pieces(inputs, ends, arena, len(positions), slot_of)
            assert same_bits(pieces, outputs), f"outputs at budget {budget}"
            assert same_bits(arena, truth), f"states at budget {budget}"
