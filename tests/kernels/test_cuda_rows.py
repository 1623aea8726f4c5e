"""Products, norms, choices and attention on a CUDA device: right against float64, and a row's bits its own."""

from __future__ import annotations

import random

import pytest
import torch

from apcbatch.kernels import reference
from apcbatch.kernels.arguments import PAGE_TOKENS
from apcbatch.kernels.cpu.backend import CpuBackend
from apcbatch.kernels.cuda.backend import CudaBackend
from apcbatch.kernels.cuda.linear import FIXED_ORDER_ROWS
from apcbatch.kernels.layer import PreNorm

EXACT, ops = (CudaBackend(torch.device("cuda", 0), exact) for exact in (True, False))

pytestmark = pytest.mark.cuda
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).cuda()


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    """By the norm of the difference."""
    difference = (actual.double().cpu() - expected.double().cpu()).norm()
    return bool(difference <= TOLERANCE[dtype] * expected.double().cpu().norm() + 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [3, 16, 257, 768, 2560, 4097])
def test_norms(columns: int, dtype: torch.dtype) -> None:
    """Catches a tail that is left out, a residual that is rounded, a row that depends on its neighbours."""
    rows = random.randrange(1, 70)
    wide = draw(rows, columns + 8, dtype=dtype)
    x, weight, eps = wide[:, 4 : 4 + columns], draw(columns), 1e-5
    normed = ops.rms_norm(x, weight, eps, dtype)
    exact = x.double() * (x.double().pow(2).mean(1, keepdim=True) + eps).rsqrt() * weight.double()
    assert close(normed, exact, dtype)
    assert torch.equal(ops.rms_norm(x[-1:], weight, eps, dtype), normed[-1:])
    residual, kept = draw(rows, columns), None
    kept = residual.clone()
    normed = ops.add_rms_norm_(residual, x, None, eps, dtype)
    assert torch.equal(residual, kept + x.float())
    exact = residual.double() * (residual.double().pow(2).mean(1, keepdim=True) + eps).rsqrt()
    assert close(normed, exact, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [16, 257, 768, 2560, 4096, 4100])
def test_a_norm_finishes_what_sub_blocks_left(columns: int, dtype: torch.dtype) -> None:
    """Catches a factor that is left out or taken from another column, an output in parallel that is lost or scaled, a
    rounding that is moved, and a norm that is shared although the sum has changed."""
    rows, norm, other = random.randrange(1, 70), PreNorm(draw(columns), 1e-5), PreNorm(draw(columns), 1e-5)
    sums, first, left, right = (draw(rows, columns) for _ in range(4))
    own, factors = draw(columns), draw(columns)
    residual = ops.residual(sums.clone())
    residual.leave(first, own)
    plain = sums + first * own
    normed = ops.normed(residual, norm, dtype)
    assert torch.equal(residual.sum, plain)
    assert torch.equal(normed, ops.rms_norm(plain, norm.weight, norm.eps, dtype))
    residual.leave(left, own)
    before = residual.beside()
    assert ops.normed(residual, norm, dtype) is normed
    assert torch.equal(ops.normed(residual, other, dtype), ops.rms_norm(plain, other.weight, other.eps, dtype))
    residual.leave(right, factors)
    residual.join(before)
    plain += left * own + right * factors
    chosen = residual.rows(torch.tensor([rows - 1], device="cuda"))
    for stream, expected in ((chosen, plain[-1:]), (residual, plain)):
        normed = ops.normed(stream, norm, dtype)
        assert torch.equal(stream.sum, expected)
        assert torch.equal(normed, ops.rms_norm(expected, norm.weight, norm.eps, dtype))
    residual.leave(left, factors)
    residual.join(first)
    assert torch.equal(residual.settled(), plain + (first + left * factors))
    assert torch.equal(ops.normed(residual, norm, dtype), ops.rms_norm(residual.sum, norm.weight, norm.eps, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [16, 300, 768, 2048, 4096, 4100])
def test_a_norm_sums_experts_and_gates_rows(columns: int, dtype: torch.dtype) -> None:
    """Catches an expert that is left out or added out of order, an output of padding that is added, a gate of another
    row, and a rounding that is moved: of a mixture alone, beside a gated output, and beside another mixture."""
    rows, k, norm = random.randrange(2, 70), random.choice((1, 2, 7, 10)), PreNorm(draw(columns), 1e-5)
    there = random.randrange(1, rows)
    sums, right, factors, gate = draw(rows, columns), draw(rows, columns), draw(columns), draw(rows, 1)
    experts = draw(rows, k, columns)
    mixed = experts[:, 0].clone()
    for i in range(1, k):
        mixed += experts[:, i]
    mixed[there:] = 0.0
    experts[there:] = torch.nan
    gated = right * factors * gate.sigmoid()
    for gates, doubles in ((False, False), (True, False), (True, True)):
        streams = [ops.residual(sums.clone(), torch.tensor([there], device="cuda")) for _ in range(2)]
        for stream in streams:
            stream.leave_experts(experts)
            if gates:
                before = stream.beside()
                stream.leave(right, factors, gate)
                stream.join(before)
            if doubles:
                before = stream.beside()
                stream.leave_experts(experts)
                stream.join(before)
        plain = sums + (mixed + gated + mixed if doubles else mixed + gated if gates else mixed)
        assert torch.equal(streams[0].rows(torch.arange(rows, device="cuda")).settled(), plain)
        normed = ops.normed(streams[0], norm, dtype)
        assert torch.equal(streams[0].sum, plain) and torch.equal(streams[1].settled(), plain)
        assert torch.equal(normed, ops.rms_norm(plain, norm.weight, norm.eps, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [(256, 16, 16), (5, 7, 300), (160, 16)])
def test_norms_at_once(columns: tuple[int, ...], dtype: torch.dtype) -> None:
    """Catches parts that are mixed up, one that is left out, and a part too wide for a launch of all."""
    rows, first = random.randrange(1, 70), 0
    wide, parts = draw(rows, sum(columns), dtype=dtype), []
    for width in columns:
        parts.append(wide[:, first : first + width])
        first += width
    weights = [None if i == 1 else draw(width) for i, width in enumerate(columns)]
    normed = ops.rms_norms(parts, weights, 1e-5, dtype)
    for found, part, weight in zip(normed, parts, weights, strict=True):
        assert torch.equal(found, ops.rms_norm(part, weight, 1e-5, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 33, 64, 1000])
def test_silu_mul(columns: int, dtype: torch.dtype) -> None:
    """Catches halves of one projection that are read with the wrong stride."""
    both = draw(random.randrange(1, 40), 2 * columns, dtype=dtype)
    gate, up = both[:, :columns], both[:, columns:]
    exact = torch.nn.functional.silu(gate.double()) * up.double()
    assert close(ops.silu_mul(gate, up), exact, dtype)


@pytest.mark.parametrize(
    ("columns", "k"),
    [(1, 1), (4, 2), (16, 2), (33, 33), (60, 6), (130, 40), (256, 8), (257, 5), (512, 512), (1024, 8), (1024, 70)],
)
def test_a_softmax_route(columns: int, k: int) -> None:
    """Catches a tie that goes to the higher index, a softmax over the chosen ones alone, a choice that is left out,
    made twice or out of order, the weight of another one, and a weight that is normalised by some of them."""
    logits = draw(random.randrange(1, 99), columns).round(decimals=1)
    for is_normalised in (False, True):
        weights, indices = ops.route(logits, k, is_normalised)
        expected_weights, order = CpuBackend().route(logits.cpu(), k, is_normalised)
        ascending, places = order.sort(dim=1)
        assert torch.equal(indices.cpu(), ascending)
        torch.testing.assert_close(weights.cpu(), expected_weights.gather(1, places), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("columns", [1, 31, 1024, 50280])
def test_greedy(columns: int) -> None:
    """Catches a tie that goes to the higher index, and a log-probability of other logits."""
    logits = draw(random.randrange(1, 40), columns).round(decimals=1)
    tokens, logprobs = ops.greedy(logits)
    expected, expected_logprobs = CpuBackend().greedy(logits.cpu())
    assert torch.equal(tokens.cpu(), expected)
    assert torch.equal(ops.argmax(logits).cpu(), expected)
    torch.testing.assert_close(logprobs.cpu(), expected_logprobs, rtol=1e-5, atol=1e-5)
    token = random.randrange(columns)
    one = ops.token_logprobs(logits[:1], torch.tensor([token], device="cuda"))
    assert one.item() == pytest.approx(torch.log_softmax(logits[0].double(), 0)[token].item(), rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_not_finite_have_no_token(wrong: float) -> None:
    """Catches a token that is drawn from them, and rows beside that lose theirs."""
    logits = draw(9, 5000)
    logits[4, random.randrange(5000)] = wrong
    tokens, logprobs = ops.greedy(logits)
    others = torch.arange(9) != 4
    assert tokens[4] == ops.argmax(logits)[4] == -1
    assert logprobs[4].isnan()
    assert torch.equal(tokens.cpu()[others], logits.cpu().argmax(1)[others])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_products_do_not_depend_on_the_rows_beside(dtype: torch.dtype) -> None:
    """Catches a product whose bits change with how many rows come together, where exactness was asked for: with inputs
    which bfloat16 does not multiply in fixed order, too."""
    weight, x = draw(305, 264, dtype=dtype), draw(300, 264, dtype=dtype)
    packed = EXACT.pack_linear(weight)
    y = ops.linear(x, packed, out_dtype=torch.float32)
    assert close(y, x.double() @ weight.double().t(), dtype)
    for begin, end in [(0, 1), (7, 24), (100, 300), (128, 128 + 127)]:
        assert torch.equal(ops.linear(x[begin:end], packed, out_dtype=torch.float32), y[begin:end])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [264, 272])  # bfloat16 is multiplied in fixed order only with the second
def test_fast_products_of_few_rows_are_the_exact_ones(dtype: torch.dtype, inputs: int) -> None:
    """Catches few rows that are left to the library, and more rows that are not: their products are its own."""
    weight, x = draw(305, inputs, dtype=dtype), draw(300, inputs, dtype=dtype)
    fast, exact = ops.pack_linear(weight), EXACT.pack_linear(weight)
    assert torch.equal(ops.linear(x, fast), x @ weight.t())
    for few in (x[:1], x[:FIXED_ORDER_ROWS]):
        y = ops.linear(few, fast, out_dtype=torch.float32)
        assert close(y, few.double() @ weight.double().t(), dtype)
        assert exact.fixed_order is None or torch.equal(y, ops.linear(few, exact, out_dtype=torch.float32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(4, 2, 10), (8, 1, 64), (6, 3, 96), (32, 8, 128), (2, 2, 256), (5, 5, 16), (16, 1, 80), (17, 1, 112)],
)
def test_paged_attention(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """Catches keys of another sequence, of the future or beyond the end, and bits that depend on the piece: all
    at once, one by one behind what was cached, in between, across the borders of splits, and alone."""
    lengths = [random.randrange(1, 1300), random.randrange(500, 530), 1, 64]
    pages = sum(-(-length // PAGE_TOKENS) for length in lengths)
    order = torch.randperm(pages).split([-(-length // PAGE_TOKENS) for length in lengths])
    table = torch.zeros(len(lengths), max(map(len, order)), dtype=torch.int64)
    for row, own in zip(table, order, strict=True):
        row[: len(own)] = own
    cache = [torch.full((pages, PAGE_TOKENS, kv_heads, head_dim), torch.nan, dtype=dtype).cuda() for _ in "kv"]
    k, v = (draw(sum(lengths), kv_heads, head_dim, dtype=dtype) for _ in "kv")
    q = draw(sum(lengths), heads, head_dim, dtype=dtype)
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    places = torch.cat(
        [row[torch.arange(n) // 64] * 64 + torch.arange(n) % 64 for row, n in zip(table, lengths, strict=True)]
    )
    ops.write_kv(k, v, *cache, places.cuda())
    scale = head_dim**-0.5

    def attend(begins: list[int], ends: list[int]) -> list[torch.Tensor]:
        rows = [q[o + b : o + e] for o, b, e in zip(offsets.tolist(), begins, ends, strict=False)]
        cu = torch.tensor([0, *torch.tensor([len(r) for r in rows]).cumsum(0).tolist()]).cuda()
        out = ops.paged_attention(torch.cat(rows), *cache, table.cuda(), cu, torch.tensor(begins).cuda(), scale)
        return list(out.split([len(r) for r in rows]))

    whole = attend([0] * len(lengths), lengths)
    expected = reference.paged_attention(
        q.double().cpu(),
        *(part.cpu() for part in cache),
        table,
        offsets,
        torch.zeros(len(lengths), dtype=torch.int64),
        scale,
    )
    assert close(torch.cat(whole), expected, dtype)
    last = attend([n - 1 for n in lengths], lengths)
    assert all(torch.equal(part, all_[-1:]) for part, all_ in zip(last, whole, strict=True))
    cuts = [random.randrange(0, n) for n in lengths]
    rest = attend(cuts, lengths)
    assert all(torch.equal(part, all_[cut:]) for part, all_, cut in zip(rest, whole, cuts, strict=True))
    end = random.randrange(cuts[0] + 1, lengths[0] + 1)
    assert torch.equal(attend(cuts[:1], [end])[0], whole[0][cuts[0] : end])
