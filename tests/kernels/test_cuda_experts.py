"""Experts on a CUDA device: right against float64, and a token's bits its own."""

from __future__ import annotations

import random

import pytest
import torch

from apcbatch.kernels import reference
from apcbatch.kernels.cuda.backend import CudaBackend
from apcbatch.kernels.cuda.experts import GroupedExperts
from apcbatch.kernels.cuda.extension import current_stream, extension
from apcbatch.kernels.cuda.feed_forward import DeviceMixture
from apcbatch.kernels.layer import Expert, PreNorm, SigmoidRouting

ops = CudaBackend(torch.device("cuda", 0), exact=True)

pytestmark = pytest.mark.cuda
SHAPES = [(16, 16), (64, 96), (80, 1072), (512, 1040), (1536, 528), (4096, 128)]  # hidden, inner
COUNTS = [1, 7, 8, 9, 16, 17, 33, 64, 256]  # tokens: every shape of tile, and several tiles of an expert


def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def draw_experts(
    experts: int, hidden: int, inner: int, is_gated: bool, exact: bool = True
) -> tuple[list[Expert], torch.Tensor, torch.Tensor]:
    """Experts, and their weights: gate and up, or up alone, (experts, 2f or f, h), and down (experts, h, f), which the
    experts hold as a quarter of it with a scale of 4, or as it is."""
    pack = CudaBackend(torch.device("cuda", 0), exact).pack_linear
    gate_up = draw(experts, (2 if is_gated else 1) * inner, hidden, scale=hidden**-0.5)
    down = draw(experts, hidden, inner)
    scale = torch.full((hidden,), 4.0, device="cuda") if random.random() < 0.5 else None
    held = down if scale is None else down / 4
    return [Expert(pack(a), pack(b, scale), is_gated) for a, b in zip(gate_up, held, strict=True)], gate_up, down


def make_mixture(experts: list[Expert], k: int, exact: bool = True) -> DeviceMixture:
    """Of these experts, k for each token."""
    hidden = experts[0].down.out_features
    router = CudaBackend(torch.device("cuda", 0), exact).pack_linear(draw(len(experts), hidden))
    return DeviceMixture(PreNorm(torch.ones(hidden, device="cuda"), 1e-6), router, experts, k)


def expected(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """One expert in float64, but for the rounding of what its second product takes."""
    sums = x.double() @ gate_up.double().t()
    if len(gate_up) == down.shape[1]:  # no gate
        inner = sums.relu().square()
    else:
        gate, up = sums.chunk(2, dim=1)
        inner = torch.nn.functional.silu(gate) * up
    return inner.bfloat16().double() @ down.double().t()


def mixed(
    x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """The mixture in float64."""
    exact = torch.zeros(len(x), down.shape[1], dtype=torch.float64, device="cuda")
    for expert in chosen.unique().tolist():
        rows = (chosen == expert).any(1)
        weight = (weights * (chosen == expert)).sum(dim=1, keepdim=True).double()
        exact[rows] += weight[rows] * expected(x[rows], gate_up[expert], down[expert])
    return exact


def close(actual: torch.Tensor, exact: torch.Tensor) -> bool:
    return bool((actual.double() - exact).norm() <= 1e-2 * exact.norm() + 1e-6)  # gate and up are rounded, too


@pytest.mark.parametrize(("hidden", "inner"), SHAPES)
@pytest.mark.parametrize("t", COUNTS)
@pytest.mark.parametrize("is_gated", [True, False])
def test_one_expert(is_gated: bool, t: int, hidden: int, inner: int) -> None:
    """Catches tails of rows, of inputs and of tokens that are left out, and a token that depends on its company."""
    experts, gate_up, down = draw_experts(1, hidden, inner, is_gated)
    grouped = GroupedExperts(experts)
    x = draw(t, hidden)
    ones, first = torch.ones(t, 1, device="cuda"), torch.zeros(t, 1, dtype=torch.int64, device="cuda")
    y = grouped.mixture(x, ones, first, None)
    assert close(y, expected(x, gate_up[0], down[0]))
    one = random.randrange(t)
    assert torch.equal(grouped.mixture(x[one : one + 1].clone(), ones[:1], first[:1], None), y[one : one + 1])


@pytest.mark.parametrize(
    ("experts", "k"), [(4, 2), (16, 2), (128, 2), (5, 1), (3, 3), (16, 4), (128, 6), (257, 8), (512, 10)]
)
@pytest.mark.parametrize("t", [*COUNTS, 1500])
def test_mixture(t: int, experts: int, k: int) -> None:
    """Catches a token that goes to another expert or takes another's weight, tokens that are not there and are not
    zero, and a token that depends on its company."""
    hidden, inner = 64, 32
    parts, gate_up, down = draw_experts(experts, hidden, inner, random.random() < 0.5)
    grouped, x = GroupedExperts(parts), draw(t, hidden)
    weights, chosen = ops.route(torch.randn(t, experts, device="cuda") * 2, k)
    there = random.randrange(1, t + 1)
    y = grouped.mixture(x, weights, chosen, torch.tensor([there], device="cuda"))
    assert close(y[:there], mixed(x[:there], weights[:there], chosen[:there], gate_up, down))
    assert not y[there:].any()
    assert torch.equal(grouped.mixture(x, weights, chosen, None)[:there], y[:there])
    one = random.randrange(there)
    alone = grouped.mixture(x[one : one + 1].clone(), weights[one : one + 1], chosen[one : one + 1], None)
    assert torch.equal(alone, y[one : one + 1])


@pytest.mark.parametrize(("hidden", "inner"), [(64, 16), (272, 96), (80, 1072), (512, 1040), (1536, 528)])
@pytest.mark.parametrize("is_gated", [True, False])
def test_experts_of_uneven_numbers_of_tokens(is_gated: bool, hidden: int, inner: int) -> None:
    """Catches experts without tokens, with one more or less than a tile or a part of it has, tails of rows and of
    inputs in tiles of many tokens, and a token whose bits such a tile changes."""
    counts = [0, 1, 15, 16, 17, 0, 127, 128, 129, 1000, 31, 33, 160, 161, 320, 321, 0]
    parts, gate_up, down = draw_experts(len(counts), hidden, inner, is_gated)
    chosen = torch.arange(len(counts), device="cuda").repeat_interleave(torch.tensor(counts, device="cuda"))
    chosen = chosen[torch.randperm(len(chosen), device="cuda")].unsqueeze(1)
    x, weights, grouped = draw(len(chosen), hidden), torch.rand(chosen.shape, device="cuda"), GroupedExperts(parts)
    y = grouped.mixture(x, weights, chosen, None)
    assert close(y, mixed(x, weights, chosen, gate_up, down))
    few = [grouped.mixture(*some, None) for some in zip(x.split(8), weights.split(8), chosen.split(8), strict=True)]
    assert torch.equal(torch.cat(few), y)


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("t", [7, 300])
def test_one_expert_after_the_other(t: int, is_gated: bool, is_exact: bool) -> None:
    """Catches a token that goes to another expert, and experts without tokens."""
    experts, k, hidden = 6, 2, 64
    parts, gate_up, down = draw_experts(experts, hidden, 96, is_gated, is_exact)
    x, weights = draw(t, hidden), torch.rand(t, k, device="cuda")
    chosen = torch.randint(5, (t, k), device="cuda")
    chosen[:, 1] = (chosen[:, 0] + 1 + chosen[:, 1] % 4) % 5
    made = make_mixture(parts, k, is_exact)._one_by_one(x, weights, chosen)
    assert close(made, mixed(x, weights, chosen, gate_up, down))


@pytest.mark.parametrize(("hidden", "inner"), [(64, 96), (512, 1040), (1536, 528), (4096, 128), (80, 2064)])
@pytest.mark.parametrize("t", [*COUNTS, 5, 100])
@pytest.mark.parametrize("is_gated", [True, False])
def test_experts_at_once_equal_one_by_one(is_gated: bool, t: int, hidden: int, inner: int) -> None:
    """Catches products in another order than the library's, a gate that is not rounded as it is there, experts that are
    added otherwise, and a token that depends on its company: of few tokens and of many."""
    experts, k = 7, 2
    mixture = make_mixture(draw_experts(experts, hidden, inner, is_gated)[0], k)
    assert mixture.can_capture
    x, (weights, chosen) = draw(t, hidden), ops.route(torch.randn(t, experts, device="cuda") * 2, k)
    y = mixture._grouped.mixture(x, weights, chosen, None)
    assert torch.equal(y, mixture._one_by_one(x, weights, chosen))
    one = slice(random.randrange(t), None)
    assert torch.equal(mixture._grouped.mixture(x[one].clone(), weights[one], chosen[one], None), y[one])
    many = [torch.cat([part, part.roll(1, 0), part.flip(0)]) for part in (x, weights, chosen)]
    assert torch.equal(mixture._one_by_one(*many)[:t], y)
    assert torch.equal(mixture._grouped.mixture(*many, None)[:t], y)


def test_a_row_of_nan_stays_alone() -> None:
    """Catches a token without a sensible choice that spoils the others' or is counted twice where there is no room."""
    for is_gated in (True, False):
        grouped = GroupedExperts(draw_experts(8, 64, 96, is_gated)[0])
        x, logits = draw(8, 64), torch.randn(8, 8, device="cuda")
        clean = grouped.mixture(x, *ops.route(logits, 2), None)
        logits[3] = torch.nan
        x[3] = torch.nan
        spoiled = grouped.mixture(x, *ops.route(logits, 2), None)
        others = torch.arange(8, device="cuda") != 3
        assert torch.equal(spoiled[others], clean[others]) and bool(spoiled[3].isnan().all())


@pytest.mark.parametrize(("hidden", "inner", "dtype"), [(36, 64, torch.bfloat16), (64, 64, torch.float32)])
def test_what_the_kernels_do_not_take(hidden: int, inner: int, dtype: torch.dtype) -> None:
    """Catches shapes and dtypes that would be read beyond their rows."""
    gate_up, down = (torch.zeros(shape, dtype=dtype, device="cuda") for shape in ((2 * inner, hidden), (hidden, inner)))
    grouped = GroupedExperts([Expert(ops.pack_linear(gate_up), ops.pack_linear(down))])
    assert not grouped.is_supported


def test_scales_that_the_kernels_do_not_take() -> None:
    """Catches a factor of a projection that is left out."""
    gate_up, down = draw(64, 64), draw(64, 32)
    one, two = (torch.full((64,), factor, device="cuda") for factor in (1.5, 2.0))
    pack = ops.pack_linear
    assert GroupedExperts([Expert(pack(gate_up), pack(down, one))] * 2).is_supported
    for scales in ((one, two), (one, None), (None, one)):
        assert not GroupedExperts([Expert(pack(gate_up), pack(down, scale)) for scale in scales]).is_supported
    assert not GroupedExperts([Expert(pack(gate_up, one), pack(down))]).is_supported


@pytest.mark.parametrize(
    ("experts", "groups", "top_groups"), [(1, 1, 1), (6, 3, 2), (128, 1, 1), (36, 9, 4), (20, 2, 2), (1024, 8, 3)]
)
@pytest.mark.parametrize("is_normalised", [True, False])
def test_sigmoid_routing_matches_the_reference(experts: int, groups: int, top_groups: int, is_normalised: bool) -> None:
    """Catches a group or an expert that is left out wrongly, another order, a bias in the weights, and a row that
    depends on its company."""
    bias = torch.randn(experts, device="cuda") * 0.5
    logits = torch.randn(301, experts, device="cuda") * 2
    scores = logits.double().sigmoid() + bias.double()
    sums = scores.view(301, groups, -1).sort(descending=True).values[:, :, :2].sum(2)
    gaps = [values.sort().values.diff() > 1e-6 for values in (scores, sums)]  # float32 may order closer ones otherwise
    clear = gaps[0].all(1) & gaps[1].all(1)
    assert clear.sum() > 20
    for k in {1, min(22, top_groups * experts // groups)}:
        routing = SigmoidRouting(bias, groups, top_groups, 2.5, 1e-6)
        weights, chosen = ops.route(logits, k, is_normalised, routing)
        exact, order = reference.sigmoid_topk(logits.double(), k, bias.double(), groups, top_groups)
        if is_normalised:
            exact = exact / (exact.sum(1, keepdim=True) + 1e-6)
        ascending, places = order.sort(dim=1)
        assert torch.equal(chosen[clear], ascending[clear])
        exact = 2.5 * exact.gather(1, places)
        torch.testing.assert_close(weights[clear].double(), exact[clear], rtol=2e-6, atol=1e-30)
        one = random.randrange(301)
        alone = ops.route(logits[one : one + 1].clone(), k, is_normalised, routing)
        assert torch.equal(alone[0][0], weights[one]) and torch.equal(alone[1][0], chosen[one])


@pytest.mark.parametrize(("experts", "k"), [(6, 2), (64, 6), (72, 32), (128, 6), (512, 10)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_few_tokens_are_grouped_where_they_are_chosen(experts: int, k: int, has_bias: bool) -> None:
    """Catches a pair of another expert or out of order, one that is lost or of padding, an expert listed twice, and
    weights that depend on where the grouping is made."""
    sigmoid = (
        SigmoidRouting(torch.randn(experts, device="cuda"), 2, 1 if k <= experts // 4 else 2) if has_bias else None
    )
    for t in (1, 2, 9, 31, 32, 33):
        logits = torch.randn(t, experts, device="cuda")
        logits[random.randrange(t)] = random.choice((float("nan"), 0.0))  # no choice is better; ties
        present = torch.tensor([random.choice((t, random.randrange(t + 1)))], device="cuda")
        made, expected = (torch.full_like(GroupedExperts.groups(t, k, logits.device), 0xFF) for _ in range(2))
        weights, chosen = ops.route(logits, k, True, sigmoid, present, made)
        alone = ops.route(logits, k, True, sigmoid)
        assert torch.equal(weights.view(torch.int32), alone[0].view(torch.int32)) and torch.equal(chosen, alone[1])
        assert (chosen.diff(dim=1) > 0).all()
        addresses = chosen.data_ptr(), present.data_ptr(), expected.data_ptr()
        extension().group(t, k, experts, *addresses, current_stream())
        most, made, expected = extension().MOST_EXPERTS, made.view(torch.int32), expected.view(torch.int32)
        count, pairs = int(expected[0]), int(present) * k
        assert int(made[0]) == count == len(chosen[: int(present)].unique())
        for begin, length in ((1, count), (1 + most, count + 1), (2 + 2 * most, pairs)):
            assert torch.equal(made[begin : begin + length], expected[begin : begin + length]), (t, begin)


def test_softmax_routing_is_normalised() -> None:
    """Catches weights of the whole softmax where those of the chosen experts are due, and the other way round."""
    logits = torch.randn(77, 60, device="cuda") * 3
    whole, order = ops.route(logits, 6)
    weights, chosen = ops.route(logits, 6, True, None)
    assert torch.equal(chosen, order)
    torch.testing.assert_close(weights, whole / whole.sum(1, keepdim=True), rtol=1e-6, atol=0)
    weights, chosen = ops.route(logits, 6, False, None)
    assert torch.equal(chosen, order) and torch.equal(weights, whole)


def test_the_lower_expert_and_group_come_first_on_ties() -> None:
    """Catches experts that depend on the order of a search."""
    logits, bias = torch.zeros(1, 6, device="cuda"), torch.zeros(6, device="cuda")
    for k, groups, top_groups, chosen in ((3, 1, 1, [0, 1, 2]), (2, 3, 1, [0, 1]), (4, 3, 2, [0, 1, 2, 3])):
        assert ops.route(logits, k, False, SigmoidRouting(bias, groups, top_groups))[1].tolist() == [chosen]
    bias[5] = 0.1
    assert ops.route(logits, 2, False, SigmoidRouting(bias, 3, 1))[1].tolist() == [[4, 5]]


def test_a_routing_that_does_not_fit_is_refused() -> None:
    """Catches a choice beyond the experts, whose indices would be read as an expert's."""
    logits = torch.zeros(2, 6, device="cuda")
    with pytest.raises(ValueError, match="k must lie in 1 to 6"):
        ops.route(logits, 7, False, None)
    with pytest.raises(ValueError, match="k must lie in 1 to 2, the columns of 1 groups"):
        ops.route(logits, 3, False, SigmoidRouting(torch.zeros(6, device="cuda"), 3, 1))
    with pytest.raises(ValueError, match="logits must have at most 1024 columns"):
        ops.route(torch.zeros(2, 1025, device="cuda"), 1, False, None)
