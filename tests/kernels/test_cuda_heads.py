"""The CUDA kernels over heads: against the references in float64, and the same bits however sequences are cut."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from apcbatch.kernels import reference
from apcbatch.kernels.cuda.ops import ops as cuda
from apcbatch.kernels.layer import rotary_steps
from apcbatch.kernels.ragged import Ragged
from apcbatch.model.devices import backend_for
from tests.kernels.heads import RULES, SIZES, Rule
from tests.kernels.recurrent import DTYPES, assert_close, ragged, same_bits
from tests.kernels.test_cuda import mixed_batch

pytestmark = pytest.mark.cuda
CUDA = torch.device("cuda", 0)
LENGTHS = [1, 2, 7, 8, 9, 16, 31, 65, 300]
ALL_SIZES = [*SIZES, (1, 3, 160, 64), (1, 2, 256, 128)]


@pytest.fixture(autouse=True)
def on_cuda() -> Iterator[None]:
    """Tensors are made on the CUDA device."""
    with torch.device(CUDA):
        yield


def scan(inputs: Rule, state: torch.Tensor, batch: Ragged) -> torch.Tensor:
    """o (t, Hv, V) of the recurrence, by threads that own some columns each, which changes no bit."""
    return inputs.run(state, batch, random.choice((0, 1, 2, 4)))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("size", ALL_SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_scan_matches_float64(rule, size, dtype):
    """A row of the state in another lane, an absent column that counts, a snapshot of another token."""
    inputs, batch = RULES[rule].random(sum(LENGTHS), size, dtype), mixed_batch(LENGTHS)
    arena = inputs.arena(4 * len(LENGTHS))
    wide = arena.double()
    assert_close(scan(inputs, arena, batch), inputs.expect(wide, batch), dtype)
    assert_close(arena, wide, dtype)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("size", [SIZES[1], SIZES[5], (1, 2, 256, 128)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuts_change_no_bit(rule, size, dtype):
    """A state that is rounded between two chunks, a tile that begins elsewhere, or a decoded token that is not the
    prefilled one."""
    inputs, total = RULES[rule].random(523, size, dtype), 523
    start = inputs.arena(4)
    whole = start.clone()
    snapshots = sorted(random.sample(range(1, total), 2))
    y = scan(inputs, whole, ragged([total], [0], [1], [[(snapshots[0], 2), (snapshots[1], 3)]]))
    cuts = sorted({*random.sample(range(1, total), 5), 1, 2, 3, 300, 301, *snapshots})
    pieces, cut = [], start.clone()
    for begin, end in zip([0, *cuts], [*cuts, total], strict=True):
        pieces.append(scan(inputs.tokens(begin, end), cut, ragged([end - begin], [1 if begin else 0], [1])))
        if end in snapshots:
            assert same_bits(cut[1], whole[2 + snapshots.index(end)])
    assert same_bits(torch.cat(pieces), y)
    assert same_bits(cut[1], whole[1]) and same_bits(whole[0], start[0])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "size", [(1, 4, 128, 64), (2, 4, 128, 128), (1, 3, 128, 32), (1, 2, 256, 64), (1, 2, 128, 96)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_step_has_the_bits_of_the_scan(rule, size, dtype):
    """Of single tokens, which have a kernel of their own: a state of another block, slot or sequence, a sum in another
    order, a snapshot or a final state that is lost or before its token, a key that is not normed."""
    initial, final, kept = [0, -1, 1, 2, 3], [0, 1, -1, 4, 3], [[], [(1, 5)], [(1, 6)], [], []]
    inputs = RULES[rule].random(2 * len(initial), size, dtype)
    start = inputs.arena(8)
    whole, steps, scanned, own = start.clone(), start.clone(), [], []
    for i, (begin, end) in enumerate(zip(initial, final, strict=True)):  # in turn: slot 1 is written, then read
        scanned.append(scan(inputs.tokens(2 * i, 2 * i + 2), whole, ragged([2], [begin], [end], [kept[i]])))
        for token in range(2):
            first = ragged([1], [begin], [7], [kept[i]])
            batch = ragged([1], [7], [end]) if token else first
            own.append(scan(inputs.tokens(2 * i + token, 2 * i + token + 1), steps, batch))
    whole[7] = steps[7]  # between two tokens
    assert same_bits(torch.cat(own), torch.cat(scanned)) and same_bits(steps, whole)

    start, count = inputs.arena(16), 2 * len(initial)
    alone, together, slots = start.clone(), start.clone(), random.sample(range(16), count)
    parts = [
        scan(inputs.tokens(i, i + 1), alone, ragged([1], [slot], [slot if i else -1])) for i, slot in enumerate(slots)
    ]
    batch = ragged([1] * count, slots, [-1, *slots[1:]])
    assert same_bits(scan(inputs, together, batch), torch.cat(parts)) and same_bits(together, alone)


@pytest.mark.parametrize("rule", RULES)
def test_company_changes_no_bit(rule):
    """A sequence that reads another one's state, or whose bits depend on how many there are."""
    inputs, batch = RULES[rule].random(sum(LENGTHS), SIZES[5], torch.bfloat16), mixed_batch(LENGTHS)
    arena = inputs.arena(4 * len(LENGTHS))
    start = arena.clone()
    y, begin = scan(inputs, arena, batch), 0
    for sequence, length in enumerate(LENGTHS):
        initial = int(batch.initial_slots[sequence])
        alone = start.clone()
        made = scan(inputs.tokens(begin, begin + length), alone, ragged([length], [initial], [0]))
        assert same_bits(made, y[begin : begin + length])
        begin += length


@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("weights", ["of all heads", "of each head", "none"])
# one column of a thread and up to 4, 12, 20 and 32 that it holds, and more
@pytest.mark.parametrize(
    ("heads", "columns"), [(6, 12), (4, 128), *((3, n * 130) for n in (2, 20, 39, 60, 66))], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gated_norm_matches_float64(gate_first, weights, heads, columns, dtype):
    """A norm over other columns, one that is not there, or the gate on the wrong side of it."""
    d = heads * columns
    x, gate = torch.randn(37, d), torch.randn(37, d + 3).to(dtype)[:, 3:]
    weight = {"of all heads": torch.randn(columns), "of each head": torch.randn(d)}.get(weights)
    y = cuda.gated_norm(x, gate, heads, weight, 1e-6, gate_first)
    wide = None if weight is None else weight.double()
    assert_close(y, reference.gated_norm(x.double(), gate.double(), heads, wide, 1e-6, gate_first), dtype)
    assert same_bits(cuda.gated_norm(x[5:6], gate[5:6], heads, weight, 1e-6, gate_first), y[5:6])


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(256, 64), (24, 24), (13, 4), (7, 0), (256, 256)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_rope_and_the_gate_match_float64(head_dim, rotary_dim, dtype):
    """An angle of another position, a column that is not turned with its partner, or a row that depends on others."""
    x = torch.randn(41, 5 * head_dim).to(dtype)[:, head_dim:].view(41, 4, head_dim)
    weight, steps = torch.rand(head_dim) + 0.5, rotary_steps(rotary_dim, 1e7).to(CUDA)
    positions = torch.randint(0, 1 << 18, (41,))
    turned = cuda.norm_rope(x, None, 1e-6, steps, positions)
    assert_close(turned, reference.norm_rope(x.double(), None, 1e-6, steps, positions), dtype)
    y = cuda.norm_rope(x, weight, 1e-6, steps, positions)
    assert_close(y, reference.norm_rope(x.double(), weight.double(), 1e-6, steps, positions), dtype)
    assert same_bits(cuda.norm_rope(x[7:8], weight, 1e-6, steps, positions[7:8]), y[7:8])
    gate = torch.randn(41, 4 * head_dim + 1).to(dtype)[:, 1:]
    gated = cuda.sigmoid_mul(y.view(41, -1), gate)
    assert_close(gated, reference.sigmoid_mul(y.view(41, -1).double(), gate.double()), dtype)
    assert same_bits(cuda.sigmoid_mul(y[3:4].view(1, -1), gate[3:4]), gated[3:4])


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_scale_multiplies_the_float32_sum(exact, dtype):
    """A product that is rounded before its scale, or scaled by another row's."""
    backend = backend_for(CUDA, exact)
    x, weight, scale = torch.randn(67, 96).to(dtype), torch.randn(40, 96).to(dtype), torch.rand(40) + 0.1
    sums = backend.linear(x, backend.pack_linear(weight), torch.float32)
    scaled = backend.pack_linear(weight, scale)
    assert same_bits(backend.linear(x, scaled, torch.float32), sums * scale)
    assert same_bits(backend.linear(x, scaled), (sums * scale).to(dtype))
    assert same_bits(scaled.rows(torch.tensor([3, 1])), weight[[3, 1]])
