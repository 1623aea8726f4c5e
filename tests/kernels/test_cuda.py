"""What is the CUDA kernels' own: lanes, rows that cannot be read in groups, batches that stay in place.

The tables of the single ops run on a CUDA device too, in test_selective_scan, test_causal_conv and test_recurrent_cuts.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import pytest
import torch

from apcbatch.kernels.cuda import batch as batch_module
from apcbatch.kernels.cuda.batch import SHORT, DeviceBatch, batch_on
from apcbatch.kernels.cuda.ops import CudaOps
from apcbatch.kernels.cuda.ops import ops as cuda
from tests.kernels.recurrent import DTYPES, Conv, Scan, assert_close, ragged, same_bits

pytestmark = pytest.mark.cuda
LENGTHS = [1, 2, 3, 4, 5, 15, 16, 17, 23, 24, 25, 63, 64, 65, 129, 372, 1134]
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def on_cuda() -> Iterator[None]:
    """Tensors are made on the CUDA device."""
    with torch.device(CUDA):
        yield


def mixed_batch(lengths: list[int], most: int = 2):
    """Some sequences with an initial state, a final slot, at most `most` snapshots; slots 0 to (2 + most) b."""
    b = len(lengths)
    initial = [random.choice([-1, s]) for s in range(b)]
    final = [random.choice([-1, s, b + s]) for s in range(b)]
    kept: list[list[tuple[int, int]]] = []
    for s, n in enumerate(lengths):
        positions = sorted(random.sample(range(1, n + 1), random.randint(0, min(n, most))))
        kept.append([(position, (2 + i) * b + s) for i, position in enumerate(positions)])
    return ragged(lengths, initial, final, kept)


@pytest.mark.parametrize("d_state", [8, 16, 64, 128])
def test_bfloat16_scan_matches_float64(d_state):
    """bfloat16 that is widened wrongly, or a state that is not float32 beside it."""
    inputs = Scan.random(sum(LENGTHS), 24, d_state, torch.bfloat16)
    batch = mixed_batch(LENGTHS)
    arena = inputs.arena(4 * len(LENGTHS))
    wide = arena.double()
    assert_close(inputs.run(arena, batch), inputs.expect(wide, batch), torch.bfloat16)
    assert_close(arena, wide, torch.bfloat16)


def test_bfloat16_convolution_matches_float64():
    """A weight that is read as bfloat16, like its inputs, or bfloat16 that is rounded twice."""
    inputs = Conv.random(sum(LENGTHS), 24, 4, torch.bfloat16)
    batch = mixed_batch(LENGTHS)
    arena = inputs.arena(4 * len(LENGTHS))
    wide = arena.double()
    assert_close(inputs.run(arena, batch), inputs.expect(wide, batch), torch.bfloat16)
    assert same_bits(arena, wide.bfloat16())


@pytest.mark.parametrize("d_state", [3, 8, 16, 31, 32, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lanes_change_nothing(dtype, d_state):
    """A sum whose order depends on how many lanes share a channel, or a lane that loses a token at a tile's edge."""
    inputs = Scan.random(sum(LENGTHS), 152, d_state, dtype)
    batch = mixed_batch(LENGTHS)
    start = inputs.arena(4 * len(LENGTHS))
    results = []
    for lanes in (1, 2, 4, 8):
        arena = start.clone()
        fixed = CudaOps()
        fixed.lanes = lanes
        out = fixed.selective_scan(
            inputs.x,
            inputs.dt,
            inputs.A,
            inputs.B,
            inputs.C,
            inputs.D,
            inputs.z,
            inputs.dt_bias,
            arena,
            batch,
        )
        results.append((out, arena))
    for out, arena in results[1:]:
        assert same_bits(out, results[0][0])
        assert same_bits(arena, results[0][1])


@pytest.mark.parametrize("offset", [1, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_at_any_address(dtype, offset):
    """A group read across a row's end, or other bits where rows cannot be read in groups."""
    scan, conv = Scan.random(sum(LENGTHS), 48, 16, dtype), Conv.random(sum(LENGTHS), 48, 4, dtype)
    batch = mixed_batch(LENGTHS)

    def moved(rows: torch.Tensor) -> torch.Tensor:
        wide = torch.full((rows.shape[0], rows.shape[1] + offset + 5), float("nan"), dtype=dtype)
        wide[:, offset : offset + rows.shape[1]] = rows
        return wide[:, offset : offset + rows.shape[1]]

    names = {"x", "dt", "B", "C", "z"}
    for inputs in (scan, conv):
        changed = {name: moved(getattr(inputs, name)) for name in names if hasattr(inputs, name)}
        start = inputs.arena(4 * len(LENGTHS))
        first, second = start.clone(), start.clone()
        assert same_bits(inputs.run(first, batch), dataclasses.replace(inputs, **changed).run(second, batch))
        assert same_bits(first, second)


def short_batches(count: int, most: int):
    """Short sequences, at most `most` snapshots each; and the same batch as one of long ones."""
    lengths = [random.randint(1, SHORT) for _ in range(count)] if most > 1 else [1] * count
    short = mixed_batch(lengths, most)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_module, "SHORT", 0)
        long = dataclasses.replace(short)
        batch_on(CUDA, long)
    return short, long


@pytest.mark.parametrize(("count", "most"), [(1, SHORT), (5, SHORT), (401, 2), (401, 1)])
@pytest.mark.parametrize("d_state", [5, 16, 17])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scans_of_short_sequences(dtype, d_state, count, most):
    """A sequence that continues with the inputs of the one before it in its block, a snapshot after another token, or
    other bits than in tiles, or where channels do not lie in pairs."""
    short, long = short_batches(count, most)
    inputs = Scan.random(short.num_tokens, 1026, d_state, dtype)
    wide = torch.zeros(short.num_tokens, 1027, dtype=dtype)
    wide[:, 1:] = inputs.x
    start = inputs.arena((2 + most) * count)
    together, apart, tiled = start.clone(), start.clone(), start.clone()
    y = inputs.run(together, short)
    assert same_bits(y, dataclasses.replace(inputs, x=wide[:, 1:]).run(apart, short))
    assert same_bits(y, inputs.run(tiled, long))
    assert same_bits(together, apart) and same_bits(together, tiled)


@pytest.mark.parametrize(("count", "most"), [(1, SHORT), (5, SHORT), (401, 2), (401, 1)])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_convolutions_of_short_sequences(dtype, width, count, most):
    """A sequence that continues with the inputs of the one before it in its block, a snapshot after another token, taps
    of another channel, or other bits where channels do not lie in fours."""
    short, long = short_batches(count, most)
    inputs = Conv.random(short.num_tokens, 1028, width, dtype)
    wide = torch.zeros(short.num_tokens, 1029, dtype=dtype)
    wide[:, 1:] = inputs.x
    start = inputs.arena((2 + most) * count)
    together, apart, in_runs, exact = start.clone(), start.clone(), start.clone(), start.double()
    y = inputs.run(together, short)
    assert same_bits(y, dataclasses.replace(inputs, x=wide[:, 1:]).run(apart, short))
    assert same_bits(y, inputs.run(in_runs, long))
    assert same_bits(together, apart) and same_bits(together, in_runs)
    assert_close(y, inputs.expect(exact, short), dtype)
    assert_close(together, exact, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_agrees_with_the_cpu_kernels(dtype):
    """CPU and CUDA that compute different functions: they may differ by roundings alone."""
    batch = mixed_batch(LENGTHS)
    with torch.device("cpu"):
        for inputs in (Scan.random(sum(LENGTHS), 24, 16, dtype), Conv.random(sum(LENGTHS), 24, 4, dtype)):
            arena = inputs.arena(4 * len(LENGTHS))
            there = arena.to(CUDA)
            moved = {
                field.name: value.to(CUDA)
                for field in dataclasses.fields(inputs)
                if isinstance(value := getattr(inputs, field.name), torch.Tensor)
            }
            out = dataclasses.replace(inputs, **moved).run(there, batch)
            assert_close(out.cpu(), inputs.run(arena, batch).double(), dtype)
            assert_close(there.cpu(), arena.double(), dtype)


def test_batch_in_place():
    """A batch whose old slots are used when others are written into it."""
    inputs = Scan.random(6, 40, 16, torch.bfloat16)
    first = ragged([1] * 6, range(6), range(6))
    other = ragged([1] * 6, range(6, 12), range(6, 12))
    expected, arena = inputs.arena(12), inputs.arena(12)
    arena[:] = expected
    outputs = inputs.run(expected, other)
    batch = DeviceBatch(first, CUDA)
    batch.slots.copy_(torch.stack([other.initial_slots, other.final_slots]))
    again = cuda.selective_scan(
        inputs.x, inputs.dt, inputs.A, inputs.B, inputs.C, inputs.D, inputs.z, inputs.dt_bias, arena, batch
    )
    assert same_bits(again, outputs)
    assert same_bits(arena, expected)


def test_captured_graph_follows_its_batch():
    """A launch that cannot be captured, or a replay that continues with the slots of the capture."""
    scan, conv = Scan.random(4, 48, 16, torch.bfloat16), Conv.random(4, 48, 4, torch.bfloat16)
    batches = [ragged([1] * 4, slots, slots) for slots in ([0, 1, 2, 3], [7, 5, 4, 6])]
    start = [scan.arena(8), conv.arena(8)]
    truth, arenas = [one.clone() for one in start], [one.clone() for one in start]
    expected = [
        [inputs.run(arena, batch) for inputs, arena in zip((scan, conv), truth, strict=True)] for batch in batches
    ]
    device_batch = DeviceBatch(batches[0], CUDA)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [
            cuda.selective_scan(
                scan.x, scan.dt, scan.A, scan.B, scan.C, scan.D, scan.z, scan.dt_bias, arenas[0], device_batch
            ),
            cuda.causal_conv(conv.x, conv.weight, conv.bias, arenas[1], device_batch),
        ]
    for batch, wanted in zip(batches, expected, strict=True):
        device_batch.slots.copy_(torch.stack([batch.initial_slots, batch.final_slots]))
        graph.replay()
        assert all(same_bits(out, want) for out, want in zip(outputs, wanted, strict=True))
    assert all(same_bits(arena, wanted) for arena, wanted in zip(arenas, truth, strict=True))


REFUSED = {
    "x must be (4, d_inner)": {"x": (5, 24)},
    "dt must be torch.float32 on cuda:0 (like x) of shape (4, 24)": {"dt": (4, 23)},
    "A must have 1 to 128 rows on cuda": {"A": (129, 24)},
    "D must be contiguous of shape (24,) and torch.float32 on cuda:0": {"D": (23,)},
    "state must be torch.float32 on cuda:0 of shape (num_slots, 16, 24)": {"state": (9, 24, 16)},
    "state must have slot 7": {"state": (7, 16, 24)},
}


@pytest.mark.parametrize("message", REFUSED)
def test_refuses_what_it_cannot_read(message):
    """Memory read or written out of bounds because an argument was not what the kernel takes it for."""
    shapes = {
        "x": (4, 24),
        "dt": (4, 24),
        "A": (16, 24),
        "B": (4, 16),
        "C": (4, 16),
        "D": (24,),
        "z": (4, 24),
        "dt_bias": (24,),
        "state": (9, 16, 24),
    }
    good = {name: torch.zeros(shape) for name, shape in shapes.items()}
    batch = ragged([3, 1], [7, -1], [7, 2])
    cuda.selective_scan(**good, ragged=batch)
    bad = {name: torch.zeros(shape) for name, shape in REFUSED[message].items()}
    with pytest.raises(ValueError) as error:
        cuda.selective_scan(**{**good, **bad}, ragged=batch)
    assert message in str(error.value)
    for name in ("dt", "A", "state"):
        with pytest.raises(ValueError, match=f"{name} must be .* on cuda:0"):
            cuda.selective_scan(**{**good, name: good[name].cpu()}, ragged=batch)
