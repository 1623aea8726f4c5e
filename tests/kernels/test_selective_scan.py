"""The selective scan against float64, and what its bits may not depend on."""

from __future__ import annotations

import random

import pytest
import torch

from apcbatch.kernels.cpu.backend import CpuBackend
from tests.kernels.recurrent import DTYPES, Scan, assert_close, fresh_seed, on_devices, ragged, same_bits

ops = CpuBackend()

LENGTHS = [1, 2, 3, 4, 5, 63, 64, 65, 128, 129, 151, 372, 1024, 1134, 4096]
D_STATES = [8, 16, 64, 128]


@on_devices
@pytest.mark.parametrize(
    "dtype, d_state, options",
    [(dtype, n, (i + j) % 2 == 0) for i, dtype in enumerate(DTYPES) for j, n in enumerate(D_STATES)],
    ids=str,
)
def test_matches_float64(dtype, d_state, options):
    """A wrong term, a lost token at a tile's edge, or a state that begins or ends in the wrong slot."""
    fresh_seed()
    inputs = Scan.random(sum(LENGTHS), 24, d_state, dtype, options)
    b = len(LENGTHS)
    initial = [s if s % 3 else -1 for s in range(b)]
    batch = ragged(LENGTHS, initial, range(b), [[((n + 1) // 2, b + s)] for s, n in enumerate(LENGTHS)])
    arena = inputs.arena(2 * b)
    wide = arena.double()
    outputs = inputs.run(arena, batch)
    assert_close(outputs, inputs.expect(wide, batch), dtype)
    assert_close(arena, wide, dtype)


@on_devices
@pytest.mark.parametrize("d_state", [1, 2, 3, 5, 7, 11, 23, 31, 96, 255, 256])
def test_any_number_of_states(d_state, device):
    """A number of states that the register blocks do not divide."""
    fresh_seed()
    inputs = Scan.random(70, 20, d_state)
    batch = ragged([70], [0], [1])
    arena = inputs.arena(2)
    if device == "cuda" and d_state > 128:
        with pytest.raises(ValueError, match="A must have 1 to 128 rows on a CUDA device"):
            inputs.run(arena, batch)
        return
    wide = arena.double()
    assert_close(inputs.run(arena, batch), inputs.expect(wide, batch), torch.float32)
    assert_close(arena, wide, torch.float32)


@on_devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_number_of_channels(dtype):
    """A channel whose bits depend on its lane or tile, or on a partial vector; a write past the last one."""
    fresh_seed()
    whole = Scan.random(70, 150, 16, dtype)
    batch = ragged([70], [0], [1], [[(33, 2)]])
    truth = whole.arena(3)
    start = truth.clone()
    outputs = whole.run(truth, batch)
    for begin, end in [(0, 1), (0, 7), (3, 11), (5, 20), (1, 34), (0, 64), (0, 65), (31, 150), (149, 150)]:
        arena = start[..., begin:end].contiguous()
        part = whole.channels(begin, end).run(arena, batch)
        assert same_bits(part, outputs[:, begin:end]), f"outputs of channels {begin} to {end}"
        assert same_bits(arena, truth[..., begin:end]), f"states of channels {begin} to {end}"


@on_devices
@pytest.mark.parametrize("b", [1, 2, 5, 17, 33])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_batch_of_ragged_sequences(b, dtype):
    """A sequence that changes with its batch mates, or a slot changed that no sequence names."""
    generator = random.Random(fresh_seed())
    lengths = [generator.choice(LENGTHS[:11]) for _ in range(b)]
    inputs = Scan.random(sum(lengths), 40, 16, dtype)
    initial = [generator.choice([-1, s]) for s in range(b)]
    final = [generator.choice([-1, s, b + s]) for s in range(b)]
    kept = [[(generator.randint(1, n), 2 * b + s)] if n > 2 else [] for s, n in enumerate(lengths)]
    arena = inputs.arena(4 * b)
    arena[3 * b :] = float("nan")
    before = arena.clone()
    outputs = inputs.run(arena, ragged(lengths, initial, final, kept))
    alone = before.clone()
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


@on_devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode_equals_prefill(dtype):
    """A path for single tokens whose arithmetic differs from that of long sequences."""
    fresh_seed()
    b, length = 9, 30
    inputs = Scan.random(b * length, 40, 16, dtype)
    arena = inputs.arena(2 * b)
    prefill = inputs.run(arena, ragged([length] * b, [-1] * b, range(b)))
    for t in range(length):
        rows = torch.arange(b) * length + t
        step = Scan(
            inputs.x[rows],
            inputs.dt[rows],
            inputs.A,
            inputs.B[rows],
            inputs.C[rows],
            inputs.D,
            inputs.z[rows],
            inputs.dt_bias,
            dtype,
        )
        slots = range(b, 2 * b)
        decoded = step.run(arena, ragged([1] * b, slots if t else [-1] * b, slots))
        assert same_bits(decoded, prefill[rows]), f"token {t}"
    assert same_bits(arena[b:], arena[:b])


@on_devices
def test_same_slot_first_and_last():
    """A state overwritten before all of it was read, when a sequence goes on in its own slot."""
    fresh_seed()
    for d in (24, 37):
        inputs = Scan.random(150, d, 23)
        arena = inputs.arena(3)
        outputs = inputs.run(arena, ragged([150], [0], [1]))
        again = inputs.run(arena, ragged([150], [0], [0], [[(64, 2)]]))
        assert same_bits(again, outputs)
        assert same_bits(arena[0], arena[1])


def test_threads_change_nothing():
    """A result that depends on how the work is split over threads."""
    fresh_seed()
    lengths = [1, 90, 3, 200, 7]
    inputs = Scan.random(sum(lengths), 200, 16)
    batch = ragged(lengths, [0, 1, -1, 3, 4], range(5), [[], [(64, 5)], [], [(1, 6), (200, 7)], []])
    start = inputs.arena(8)
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            arena = start.clone()
            results.append((inputs.run(arena, batch), arena))
    finally:
        torch.set_num_threads(before)
    for outputs, arena in results[1:]:
        assert same_bits(outputs, results[0][0])
        assert same_bits(arena, results[0][1])


@on_devices
def test_large_steps():
    """Steps whose decay underflows: wrong there, or moving channels beside them to other bits."""
    fresh_seed()
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
    fresh_seed()
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


@pytest.mark.parametrize("message", REFUSED)
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


@pytest.mark.parametrize("tokens", [1, 2])
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
