"""The selective scan against float64, and what its bits may not depend on."""

from __future__ import annotations

import pytest
import torch

from apcbatch.kernels.cpu.backend import CpuBackend
from tests.effort import table
from tests.kernels.recurrent import DTYPES, Scan, assert_close, on_devices, ragged, same_bits

ops = CpuBackend()


@on_devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode_equals_prefill(dtype):
    """A path for single tokens whose arithmetic differs from that of long sequences."""
    b, length = 9, 30
    inputs = Scan.random(b * length, 40, 16, dtype)
    arena = inputs.arena(2 * b)
    prefill = inputs.run(arena, ragged([length] * b, [-1] * b, range(b)))
    for t in range(length):
        rows = torch.arange(b) * length + t
        step = inputs.at(rows)
        slots = range(b, 2 * b)
        decoded = step.run(arena, ragged([1] * b, slots if t else [-1] * b, slots))
        assert same_bits(decoded, prefill[rows]), f"token {t}"
    assert same_bits(arena[b:], arena[:b])


@on_devices
def test_same_slot_first_and_last():
    """A state overwritten before all of it was read, when a sequence continues in its own slot."""
    for d in (24, 37):
        inputs = Scan.random(150, d, 23)
        arena = inputs.arena(3)
        outputs = inputs.run(arena, ragged([150], [0], [1]))
        again = inputs.run(arena, ragged([150], [0], [0], [[(64, 2)]]))
        assert same_bits(again, outputs)
        assert same_bits(arena[0], arena[1])


@on_devices
def test_large_steps():
    """Steps whose decay underflows: wrong there, or moving channels beside them to other bits."""
    calm = Scan.random(100, 24, 16)
    wild = Scan.random(100, 24, 16)
    wild.dt[:, 3] = 40 + 30 * torch.randn(100)
    wild.dt[50, 4] = 1e4
    batch = ragged([100], [0], [1])
    arena = wild.arena(2)
    wide = arena.double()
    assert_close(wild.run(arena, batch), wild.expect(wide, batch), torch.float32)
    assert_close(arena, wide, torch.float32)
    disturbed = Scan(**vars(calm))
    disturbed.dt = calm.dt.clone()
    disturbed.dt[:, 3] = 1000.0
    start = calm.arena(2)
    first, second = start.clone(), start.clone()
    beside = torch.arange(24) != 3
    outputs, others = calm.run(first, batch), disturbed.run(second, batch)
    assert same_bits(outputs[:, beside], others[:, beside])
    assert same_bits(first[:, :, beside], second[:, :, beside])


@on_devices
def test_nan_stays_in_its_channel_and_sequence():
    """A NaN that spreads to another channel or sequence, or that is lost."""
    inputs = Scan.random(60, 24, 16)
    inputs.x[5, 7] = float("nan")
    inputs.dt[9, 8] = float("nan")
    arena = inputs.arena(2)
    outputs = inputs.run(arena, ragged([30, 30], None, [0, 1]))
    lost = torch.zeros(60, 24, dtype=torch.bool)
    lost[5:30, 7] = lost[9:30, 8] = True
    assert torch.equal(outputs.isnan(), lost)
    assert torch.equal(arena[0].isnan().all(0), lost[29])
    assert not arena[1].isnan().any()


@on_devices
def test_no_sequences():
    """An empty batch that fails instead of giving no rows."""
    inputs = Scan.random(0, 24, 16)
    assert inputs.run(inputs.arena(1), ragged([])).shape == (0, 24)


REFUSED = {
    "x must be (4, d_inner)": {"x": torch.zeros(5, 24)},
    "dt must be torch.float32 (like x) of shape (4, 24)": {"dt": torch.zeros(4, 24, dtype=torch.bfloat16)},
    "B must be torch.float32 (like x) of shape (4, 16)": {"B": torch.zeros(4, 15)},
    "C must be torch.float32 (like x) of shape (4, 16) with a stride of 1": {"C": torch.zeros(16, 4).t()},
    "z must be torch.float32 (like x) of shape (4, 24)": {"z": torch.zeros(3, 24)},
    "A must be contiguous of shape (16, 24) and torch.float32": {"A": torch.zeros(24, 16).t()},
    "A must have 1 to 256 rows": {"A": torch.zeros(257, 24)},
    "the states of a channel; it has 0": {"A": torch.zeros(0, 24)},
    "D must be contiguous of shape (24,) and torch.float32": {"D": torch.zeros(24, dtype=torch.float64)},
    "dt_bias must be contiguous of shape (24,)": {"dt_bias": torch.zeros(23)},
    "state must be torch.float32 of shape (num_slots, 16, 24)": {"state": torch.zeros(9, 24, 16)},
    "each slot contiguous": {"state": torch.zeros(9, 24, 16).transpose(1, 2)},
    "state must have slot 7": {"state": torch.zeros(7, 16, 24)},
    "x must be float32 or bfloat16": {
        name: torch.zeros(4, size, dtype=torch.float16)
        for name, size in (("x", 24), ("dt", 24), ("B", 16), ("C", 16), ("z", 24))
    },
    "x must be on the CPU": {"x": torch.zeros(4, 24, device="meta")},
    "D must be on the CPU": {"D": torch.zeros(24, device="meta")},
    "state must be on the CPU": {"state": torch.zeros(9, 16, 24, device="meta")},
}


@table("message", REFUSED)
def test_refuses_what_it_cannot_read(message):
    """Memory read or written out of bounds because an argument was not what the kernel takes it for."""
    good = {
        "x": torch.zeros(4, 24),
        "dt": torch.zeros(4, 24),
        "A": torch.zeros(16, 24),
        "B": torch.zeros(4, 16),
        "C": torch.zeros(4, 16),
        "D": torch.zeros(24),
        "z": torch.zeros(4, 24),
        "dt_bias": torch.zeros(24),
        "state": torch.zeros(9, 16, 24),
        "ragged": ragged([3, 1], [7, -1], [7, 2]),
    }
    ops.selective_scan(**good)
    with pytest.raises(ValueError) as error:
        ops.selective_scan(**{**good, **REFUSED[message]})
    assert message in str(error.value)


@table("tokens", [1, 2])
def test_decays_about_the_smallest_normal_number(isa, tokens):
    """A bound of the short power beyond 126: its bits wrap around, and a state that has decayed to nothing comes
    back as a number near 2^100."""
    d, n, dt = 64, 8, 30.0
    powers = torch.linspace(100.0, 160.0, n * d, dtype=torch.float64).view(n, d).flip(0)  # of 2, negative
    powers[:, :16] = powers[:, :16].clamp(max=126.5)  # vectors whose largest lies between the bounds
    a = (-powers / dt * torch.tensor(2.0, dtype=torch.float64).log()).float()
    state = torch.full((2, n, d), 2.0**100)
    nothing, raw = torch.zeros(tokens, d), torch.full((tokens, d), -1000.0)
    raw[0] = dt
    batch = ragged([tokens], [0], [1])
    ops.selective_scan(nothing, raw, a, torch.zeros(tokens, n), torch.zeros(tokens, n), None, None, None, state, batch)
    expected = (a.double() * dt).exp() * 2.0**100
    torch.testing.assert_close(state[1].double(), expected, rtol=1e-5, atol=2.0**-49)
