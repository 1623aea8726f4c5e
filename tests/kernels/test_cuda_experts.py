"""The experts of decode passes on a CUDA device: right against float64, and a token's bits its own."""

from __future__ import annotations

import random

import pytest
import torch

from apcbatch.kernels.cuda.backend import CudaBackend
from apcbatch.kernels.cuda.experts import FewTokens
from apcbatch.kernels.cuda.feed_forward import DeviceMixture
from apcbatch.kernels.layer import Expert, PreNorm

ops = CudaBackend(torch.device("cuda", 0), exact=True)

pytestmark = pytest.mark.cuda
SHAPES = [(16, 16), (64, 96), (80, 1072), (512, 1040), (1536, 528), (4096, 128)]  # hidden, inner
COUNTS = [1, 7, 8, 9, 16, 17, 33, 64, 256]  # tokens: every shape of tile, and several tiles of an expert


def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def make(experts: int, hidden: int, inner: int) -> tuple[FewTokens, torch.Tensor, torch.Tensor]:
    gate_up, down = draw(experts, 2 * inner, hidden, scale=hidden**-0.5), draw(experts, hidden, inner)
    few = FewTokens([ops.pack_linear(part) for part in gate_up], [ops.pack_linear(part) for part in down])
    return few, gate_up, down


def make_mixture(gate_up: torch.Tensor, down: torch.Tensor, k: int, exact: bool) -> DeviceMixture:
    """Of these experts, k for each token."""
    pack = CudaBackend(gate_up.device, exact).pack_linear
    experts, _, hidden = gate_up.shape
    parts = [Expert(pack(a), pack(b)) for a, b in zip(gate_up, down, strict=True)]
    return DeviceMixture(PreNorm(torch.ones(hidden, device="cuda"), 1e-6), pack(draw(experts, hidden)), parts, k)


def expected(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """One expert in float64, but for the rounding of what its second product takes."""
    gate, up = (x.double() @ gate_up.double().t()).chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up).bfloat16().double() @ down.double().t()


def close(actual: torch.Tensor, exact: torch.Tensor) -> bool:
    return bool((actual.double() - exact).norm() <= 1e-2 * exact.norm() + 1e-6)  # gate and up are rounded, too


@pytest.mark.parametrize(("hidden", "inner"), SHAPES)
@pytest.mark.parametrize("t", COUNTS)
def test_one_expert(t: int, hidden: int, inner: int) -> None:
    """Catches tails of rows, of inputs and of tokens that are left out, and a token that depends on its company."""
    few, gate_up, down = make(1, hidden, inner)
    x = draw(t, hidden)
    ones, first = torch.ones(t, 1, device="cuda"), torch.zeros(t, 1, dtype=torch.int64, device="cuda")
    y = few.mixture(x, ones, first, None)
    assert close(y, expected(x, gate_up[0], down[0]))
    one = random.randrange(t)
    assert torch.equal(few.mixture(x[one : one + 1].clone(), ones[:1], first[:1], None), y[one : one + 1])


@pytest.mark.parametrize(("experts", "k"), [(4, 2), (16, 2), (128, 2), (5, 1), (3, 3), (16, 4)])
@pytest.mark.parametrize("t", COUNTS)
def test_mixture(t: int, experts: int, k: int) -> None:
    """Catches a token that goes to another expert or takes another's weight, experts added in the order of their
    likelihood, tokens that are not there and are not zero, and a token that depends on its company."""
    t, hidden, inner = min(t, 512 // k), 64, 96
    few, gate_up, down = make(experts, hidden, inner)
    x = draw(t, hidden)
    weights, chosen = ops.softmax_topk(torch.randn(t, experts, device="cuda") * 2, k)
    there = random.randrange(1, t + 1)
    y = few.mixture(x, weights, chosen, torch.tensor([there], device="cuda"))
    exact = torch.zeros(t, hidden, dtype=torch.float64, device="cuda")
    for expert in range(experts):
        weight = (weights * (chosen == expert)).sum(dim=1, keepdim=True).double()
        exact += weight * expected(x, gate_up[expert], down[expert])
    assert close(y[:there], exact[:there])
    assert not y[there:].any()
    assert torch.equal(few.mixture(x, weights, chosen, None)[:there], y[:there])
    one = random.randrange(there)
    alone = few.mixture(x[one : one + 1].clone(), weights[one : one + 1], chosen[one : one + 1], None)
    assert torch.equal(alone, y[one : one + 1])


def test_everyone_wants_the_same_experts() -> None:
    """Catches an expert with more tokens than a tile has, and experts without any."""
    few, gate_up, down = make(16, 64, 96)
    x, weights = draw(200, 64), torch.rand(200, 2, device="cuda")
    chosen = torch.tensor([[9, 3]], device="cuda").repeat(200, 1)
    exact = sum(weights[:, i : i + 1].double() * expected(x, gate_up[e], down[e]) for i, e in ((0, 9), (1, 3)))
    assert close(few.mixture(x, weights, chosen, None), exact)


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("t", [7, 300, 1000, 2000])
def test_many_tokens(t: int, is_exact: bool) -> None:
    """Catches a token that goes to another expert, a filled-up row that is taken for one, and experts without tokens
    or without any to fill up."""
    experts, k, hidden = 6, 2, 64
    _, gate_up, down = make(experts, hidden, 96)
    mixture = make_mixture(gate_up, down, k, is_exact)
    x, weights = draw(t, hidden), torch.rand(t, k, device="cuda")
    chosen = torch.randint(5, (t, k), device="cuda")
    chosen[:, 1] = (chosen[:, 0] + 1 + chosen[:, 1] % 4) % 5
    exact = torch.zeros(t, hidden, dtype=torch.float64, device="cuda")
    for expert in range(experts):
        weight = (weights * (chosen == expert)).sum(dim=1, keepdim=True).double()
        exact += weight * expected(x, gate_up[expert], down[expert])
    assert close(mixture._one_by_one(x, weights, chosen, None), exact)


@pytest.mark.parametrize(("hidden", "inner"), [(64, 96), (512, 1040), (1536, 528), (4096, 128), (80, 2064)])
@pytest.mark.parametrize("t", [*COUNTS, 5, 100])
def test_experts_at_once_equal_one_by_one(t: int, hidden: int, inner: int) -> None:
    """Catches products in another order than the library's, a gate that is not rounded as it is there, experts that are
    added otherwise, and a token that depends on its company: of few tokens and of many."""
    experts, k = 7, 2
    _, gate_up, down = make(experts, hidden, inner)
    mixture = make_mixture(gate_up, down, k, exact=True)
    assert mixture.most_captured == 256
    x, (weights, chosen) = draw(t, hidden), ops.softmax_topk(torch.randn(t, experts, device="cuda") * 2, k)
    y = mixture._few.mixture(x, weights, chosen, None)
    assert torch.equal(y, mixture._one_by_one(x, weights, chosen, None))
    one = slice(random.randrange(t), None)
    assert torch.equal(mixture._few.mixture(x[one].clone(), weights[one], chosen[one], None), y[one])
    many = [torch.cat([part, part.roll(1, 0), part.flip(0)]) for part in (x, weights, chosen)]
    assert torch.equal(mixture._one_by_one(*many, None)[:t], y)


def test_a_row_of_nan_stays_alone() -> None:
    """Catches a token without a sensible choice that spoils the others' or is counted twice where there is no room."""
    few, _, _ = make(8, 64, 96)
    x, logits = draw(8, 64), torch.randn(8, 8, device="cuda")
    clean = few.mixture(x, *ops.softmax_topk(logits, 2), None)
    logits[3] = torch.nan
    x[3] = torch.nan
    spoiled = few.mixture(x, *ops.softmax_topk(logits, 2), None)
    others = torch.arange(8, device="cuda") != 3
    assert torch.equal(spoiled[others], clean[others])


@pytest.mark.parametrize(("hidden", "inner", "dtype"), [(36, 64, torch.bfloat16), (64, 64, torch.float32)])
def test_what_the_kernels_do_not_take(hidden: int, inner: int, dtype: torch.dtype) -> None:
    """Catches shapes and dtypes that would be read beyond their rows."""
    gate_up, down = (torch.zeros(shape, dtype=dtype, device="cuda") for shape in ((2 * inner, hidden), (hidden, inner)))
    assert FewTokens([ops.pack_linear(gate_up)], [ops.pack_linear(down)]).most_pairs == 0
