"""The recurrences over heads and their gated norm: right against float64, and what their bits may not depend on."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from apcbatch.kernels import reference
from apcbatch.kernels.cpu.backend import CpuBackend
from apcbatch.kernels.processor import set_isa
from apcbatch.layout import value_lanes
from tests.effort import table, tries
from tests.kernels.heads import RULES, SIZES, DeltaRule, Ssd
from tests.kernels.recurrent import (
    DTYPES,
    THREADED,
    assert_isas_change_no_bit,
    assert_mates_change_no_bit,
    assert_threads_change_no_bit,
    in_pieces,
    one_shot,
    poison,
    ragged,
    same_bits,
)

ops = CpuBackend()
LENGTHS = [1, 2, 3, 63, 64, 65, 129, 151]

pytestmark = pytest.mark.pairwise


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_float64(kind, dtype, size, isa):
    """A wrong term, a token lost at a tile's edge, a head that uses another's key, or a state that begins or ends in
    the wrong slot, block or lane."""
    lengths = LENGTHS if isa != "plain" else [1, 3, 65, 70]
    rule, b = RULES[kind].random(sum(lengths), size, dtype), len(lengths)
    initial = [s if s % 3 else -1 for s in range(b)]
    batch = ragged(lengths, initial, range(b), [[((n + 1) // 2, b + s)] for s, n in enumerate(lengths)])
    arena = rule.arena(2 * b)
    wide = arena.double()
    for found, expected in ((rule.run(arena, batch), rule.expect(wide, batch)), (arena, wide)):
        # Of sums of up to 128 products the small ones have the errors of the large ones: at most 9e-7 of the largest.
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=3e-6 * expected.abs().max().item())


def test_the_reference_of_the_delta_rule_is_the_equation():
    """A reference that is wrong in the kernel's way: S_t = S_(t-1) d (I - beta k k^T) + beta v k^T, o = S q, with S
    (V, K) as in equation 10 of the paper."""
    hk, hv, k_dim, v_dim = size = 2, 4, 5, 24
    rule = DeltaRule.random(9, size, torch.float64)
    state = rule.arena(2).double()
    S = state[0].permute(0, 1, 3, 2).reshape(hv, v_dim, k_dim).clone()  # (Hv, blocks, K, lanes) -> (Hv, V, K)
    expected = torch.empty(9, hv, v_dim, dtype=torch.float64)
    for head in range(hv):
        for t in range(9):
            q, k = (x[t, head * hk // hv] for x in (rule.q, rule.k))
            q, k = (x / (x @ x + 1e-6).sqrt() for x in (q, k))
            d = (rule.A[head].double() * torch.log1p((rule.a[t, head] + rule.dt_bias[head].double()).exp())).exp()
            beta = 1 / (1 + (-rule.b[t, head]).exp())
            S[head] = d * S[head] @ (torch.eye(k_dim) - beta * torch.outer(k, k))
            S[head] += beta * torch.outer(rule.v[t, head], k)
            expected[t, head] = S[head] @ q / k_dim**0.5
    actual = rule.expect(state, ragged([9], [0], [1]))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state[1].permute(0, 1, 3, 2).reshape(S.shape), S, rtol=1e-12, atol=1e-12)


def test_the_reference_of_ssd_is_the_equation():
    """A reference that is wrong in the kernel's way: h_t = exp(A s) h_(t-1) + s B x, y = C h + D x, for each column."""
    g, h, n, p = size = 2, 4, 5, 24
    rule = Ssd.random(9, size, torch.float64)
    state = rule.arena(2).double()
    S = state[0].permute(0, 1, 3, 2).reshape(h, p, n).clone()  # (H, blocks, N, lanes) -> (H, P, N)
    expected = torch.empty(9, h, p, dtype=torch.float64)
    for head in range(h):
        for t in range(9):
            B, C = (value[t, head * g // h] for value in (rule.B, rule.C))
            s = float(torch.log1p((rule.dt[t, head] + rule.dt_bias[head].double()).exp()))
            s = min(max(s, rule.dt_limits[0]), rule.dt_limits[1])
            S[head] = torch.exp(rule.A[head].double() * s) * S[head] + torch.outer(s * rule.x[t, head], B)
            expected[t, head] = S[head] @ C + rule.D[head].double() * rule.x[t, head]
    actual = rule.expect(state, ragged([9], [0], [1]))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state[1].permute(0, 1, 3, 2).reshape(S.shape), S, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_instruction_set_gives_the_same_bits(kind, every_isa, dtype, size):
    """An operation that one instruction set contracts or reorders, or a sum across lanes."""
    rule = RULES[kind].random(72, size, dtype)
    start, batch = rule.arena(4), ragged([65, 6, 1], [0, -1, 2], [0, 1, 2], [[(7, 3)], [], []])
    assert_isas_change_no_bit(rule, start, batch, every_isa)


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuts_change_no_bit(kind, dtype, size, isa):
    """A read at the beginning of a pass or a tile that is another sum than the read in the update before it; a
    snapshot that is not the carry at its token."""
    length = 40 if isa == "plain" else 200
    rule, kept = RULES[kind].random(length, size, dtype), range(1, length + 1)
    outputs, truth = one_shot(rule, length, kept)
    for _ in range(tries(20)):
        ends = sorted({*random.sample(kept, random.choice([1, 2, 7, length // 2])), length})
        arena = rule.arena(length + 1)
        wanted = {p for p in kept if random.random() < random.choice([0.02, 0.5, 1])}
        pieces = in_pieces(rule, ends, arena, length, lambda p, wanted=wanted: p - 1 if p in wanted else None)
        assert same_bits(pieces, outputs), ends
        assert same_bits(arena[length], truth[length])
        assert all(same_bits(arena[p - 1], truth[p - 1]) for p in wanted)
    plain = rule.arena(1)
    assert same_bits(rule.run(plain, ragged([length], [-1], [0])), outputs), "without snapshots"
    assert same_bits(plain[0], truth[length])


@table("kind", RULES)
def test_a_snapshot_may_take_the_slot_that_the_sequence_began_with(kind):
    """A state that is overwritten before all of its blocks were read."""
    for size in SIZES:
        rule = RULES[kind].random(70, size)
        start = rule.arena(3)
        apart, one = start.clone(), start.clone()
        expected = rule.run(apart, ragged([70], [0], [1], [[(5, 2)]]))
        assert same_bits(rule.run(one, ragged([70], [0], [1], [[(5, 0)]])), expected)
        assert same_bits(one[0], apart[2]) and same_bits(one[1], apart[1])


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("b", [1, 2, 17])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_batch_of_ragged_sequences(kind, b, dtype, size):
    """A sequence that changes with its batch mates, or a slot changed that no sequence names."""
    lengths = [random.choice(LENGTHS) for _ in range(b)]
    outputs = assert_mates_change_no_bit(RULES[kind].random(sum(lengths), size, dtype), lengths)
    assert outputs.isfinite().all()


@table("kind", RULES)
@table("size", SIZES)
def test_threads_change_nothing(kind, size):
    """A result that depends on how heads and blocks are split over threads."""
    assert_threads_change_no_bit(RULES[kind].random(sum(THREADED), size))


def test_steps_at_their_edges():
    """A step of 0 or beyond float32, a limit that does not bind, and NaN, which must not be lost in a limit."""
    rule = Ssd.random(8, (1, 2, 8, 24))
    rule.dt[1], rule.dt[2] = 1e4, -1e4
    for limits in ((0.0, float("inf")), (0.5, 0.5), (0.0, 1e-3)):
        rule.dt_limits = limits
        state = rule.arena(2)
        wide, batch = state.double(), ragged([8], [0], [1])
        torch.testing.assert_close(rule.run(state, batch).double(), rule.expect(wide, batch), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(state.double(), wide, rtol=1e-4, atol=1e-4)
        for name in rule.inputs:
            broken = replace(rule, **{name: getattr(rule, name).clone()})
            getattr(broken, name)[6] = float("nan")
            state = rule.arena(2)
            outputs = broken.run(state, batch)
            assert outputs[:6].isfinite().all() and outputs[6].isnan().all(), name
            assert name == "C" or not state[1].isfinite().all(), name


def test_gates_at_their_edges():
    """A decay of 0 or 1, a beta of 0 or 1, a key of zeros, and NaN, which must not be lost."""
    rule = DeltaRule.random(8, (1, 2, 8, 24))
    rule.a[1], rule.a[2], rule.b[3], rule.b[4], rule.k[5] = 1e4, -1e4, 1e4, -1e4, 0.0
    state = rule.arena(2)
    wide, batch = state.double(), ragged([8], [0], [1])
    torch.testing.assert_close(rule.run(state, batch).double(), rule.expect(wide, batch), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state.double(), wide, rtol=1e-4, atol=1e-4)
    for name in ("q", "k", "v", "b", "a"):
        broken = replace(rule, **{name: getattr(rule, name).clone()})
        getattr(broken, name)[6] = float("nan")
        state = rule.arena(2)
        outputs = broken.run(state, batch)
        assert outputs[:6].isfinite().all() and outputs[6].isnan().all(), name
        assert name == "q" or not state[1].isfinite().all(), name


@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("weights", ["of all heads", "of each head", "none"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_norm(every_isa, dtype, size, weights, gate_first):
    """A head's mean over other columns, a gate or a weight that is not this column's; bits that depend on the
    instruction set or the rows around."""
    _, heads, _, columns = size
    wide = torch.randn(23, 3 * heads * columns + 5)
    x, gate = wide[:, 5 : 5 + heads * columns], wide.to(dtype)[:, -heads * columns :]
    weight = {"of all heads": torch.randn(columns), "of each head": torch.randn(heads * columns)}.get(weights)
    wide = None if weight is None else weight.double()
    expected = reference.gated_norm(x.double(), gate.double(), heads, wide, 1e-6, gate_first)
    results = []
    for name in every_isa:
        set_isa(name)
        poison(x.shape, dtype)
        results.append(ops.gated_norm(x, gate, heads, weight, 1e-6, gate_first))
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(results[-1].double(), expected, rtol=tolerance, atol=tolerance)
        assert same_bits(results[-1], results[0]), name
        assert same_bits(ops.gated_norm(x[7:9], gate[7:9], heads, weight, 1e-6, gate_first), results[0][7:9])


def test_lanes_of_a_block():
    """A block that is larger than the L1 cache, or columns that no block has."""
    lanes = {v: value_lanes(128, v) for v in (1, 8, 24, 40, 64, 67, 96, 128, 256)}
    assert lanes == {1: 1, 8: 8, 24: 24, 40: 40, 64: 64, 67: 1, 96: 48, 128: 64, 256: 64}
    assert [value_lanes(256, v) for v in (24, 64, 67, 96)] == [24, 32, 1, 32]


def test_refuses_what_does_not_fit():
    """Addresses handed to the kernel for tensors of another shape, dtype or number of slots."""
    x, gates, vector = torch.randn(5, 2 * 2 * 6 + 4 * 24), torch.randn(5, 8), -torch.rand(4)
    state, batch = torch.zeros(1, 4, 1, 6, 24), ragged([5], [-1], [0])
    good = {"x": x, "gates": gates, "key_heads": 2, "A": vector, "dt_bias": vector, "state": state, "ragged": batch}
    assert ops.head_scan(**good).shape == (5, 96)
    columns, mamba2 = "x must have the columns of q, k and v, 2 x . x 6", {"D": vector, "gates": gates[:, :4]}
    for change, sentence in (
        ({"x": x[:4]}, r"x must be \(5, d_inner\)"),
        ({"x": x[:, :-1]}, columns),
        ({"key_heads": 3}, columns),
        ({"key_heads": 0}, columns),
        ({"key_heads": 4}, columns),
        ({"x": x.half()}, "x must be float32 or bfloat16"),
        ({"gates": gates[:, :7]}, r"gates must be torch.float32 \(like x\) of shape \(5, 8\)"),
        ({"gates": gates.bfloat16()}, r"gates must be torch.float32 \(like x\) of shape \(5, 8\)"),
        ({**mamba2, "gates": gates}, r"gates must be torch.float32 \(like x\) of shape \(5, 4\)"),
        ({"dt_bias": vector.double()}, "dt_bias must be contiguous of shape"),
        ({"A": vector.double()}, "A must be contiguous of shape"),
        ({**mamba2, "D": vector[:3]}, "D must be contiguous of shape"),
        ({"ragged": ragged([5], [-1], [1])}, "must have slot 1, which the batch names"),
        ({"state": state[0]}, r"state must be \(slots, heads, blocks, columns of k, lanes\)"),
        ({"state": state[:, :3]}, "state must be torch.float32 of shape"),
        ({"state": state.double()}, "state must be torch.float32 of shape"),
        ({"state": torch.zeros(1, 4, 1, 24, 6).transpose(3, 4)}, "state must be torch.float32 of shape"),
        ({"x": x.to("meta")}, "x must be on the CPU"),
    ):
        with pytest.raises(ValueError, match=sentence):
            ops.head_scan(**{**good, **change})
    x = torch.randn(5, 96)
    for arguments, sentence in (
        ((x, x, 4, torch.ones(72), 1e-6, True), "weight must be contiguous of shape"),
        ((x, x[:, :72], 4, torch.ones(24), 1e-6), "gate must have the shape of x"),
        ((x.bfloat16(), x, 4, torch.ones(24), 1e-6), "x must be float32"),
        ((x, x, 5, None, 1e-6), "the columns of 5 heads"),
        ((x, x, 0, None, 1e-6), "the columns of 0 heads"),
        ((x, x, 4, torch.ones(23), 1e-6), "weight must be contiguous of shape"),
    ):
        with pytest.raises(ValueError, match=sentence):
            ops.gated_norm(*arguments)
