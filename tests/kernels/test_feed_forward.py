"""The MLP and the mixture in one call: the bits of the kernels one by one, however other tokens are routed."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from apcbatch.kernels import reference
from apcbatch.kernels.cpu.backend import CpuBackend
from apcbatch.kernels.layer import Expert, PreNorm, SigmoidRouting
from apcbatch.kernels.processor import set_isa
from tests.effort import table
from tests.kernels.recurrent import DTYPES, poison, same_bits

ops = CpuBackend()

pytestmark = pytest.mark.pairwise

SHAPES = [(16, 24), (33, 45), (40, 44), (70, 130)]  # h, f


def make_mlp(h: int, f: int, dtype: torch.dtype, is_gated: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """gate_up (2f, h), without a gate (f, h), and down (h, f)."""
    rows = 2 * f if is_gated else f
    return (torch.randn(rows, h) * h**-0.5).to(dtype), (torch.randn(h, f) * f**-0.5).to(dtype)


def normed(norm, sums, dtype, k=ops):
    """What a part makes its result of."""
    return k.rms_norm(sums, norm.weight.to(sums.dtype), norm.eps, dtype)


def make_norm(h: int) -> PreNorm:
    return PreNorm(1 + 0.2 * torch.randn(h), 1e-5)


def pack(experts) -> list[Expert]:
    return [
        Expert(ops.pack_linear(gate_up), ops.pack_linear(down), len(gate_up) == 2 * down.shape[1])
        for gate_up, down in experts
    ]


def run(part, sums):
    """What a fused part leaves to be added to sums."""
    poison((sums.shape[0], 4096), torch.float32)
    residual = ops.residual(sums.clone())
    part(residual, None)
    return residual.delta


def one_by_one(x, gate_up, down, k=ops):
    """Product, gate or squared ReLU, product: the definition of the MLP."""
    f = down.shape[1]
    pack = k.pack_linear
    both = k.linear(x, pack(gate_up))
    y = k.relu_square(both) if both.shape[1] == f else k.silu_mul(both[:, :f], both[:, f:])
    return k.linear(y, pack(down), out_dtype=torch.promote_types(x.dtype, torch.float32))


def mixed(x, router, experts, per_token, k=ops, is_normalised=False, sigmoid=None, latent=()):
    """Each token on its own, its experts in ascending order: the definition of the mixture."""
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = []
    for row in x.split(1):
        logits = k.linear(row, k.pack_linear(router), out_dtype=wide)
        weights, chosen = k.route(logits, per_token, False, None if sigmoid is None else replace(sigmoid, scale=1.0))
        if is_normalised:
            eps = 0.0 if sigmoid is None else sigmoid.eps
            weights = weights / (sum(weights[0].tolist()[1:], weights[0, 0]) + eps)
        weights = weights * (1.0 if sigmoid is None else sigmoid.scale)
        part = k.linear(row, k.pack_linear(latent[0])) if latent else row
        total = torch.zeros(part.shape, dtype=wide)
        for weight, expert in sorted(zip(weights[0], chosen[0].tolist(), strict=True), key=lambda pair: pair[1]):
            total += one_by_one(part, *experts[expert], k) * weight
        rows.append(k.linear(total, k.pack_linear(latent[1])) if latent else total)
    return torch.cat(rows)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_gated", [True, False])
def test_mlp_equals_its_ops_one_by_one(shape, dtype, is_gated, isa):
    """The product in place overwrites a value that is still to be read, or the down projection reads beside."""
    gate_up, down = make_mlp(*shape, dtype, is_gated)
    norm = make_norm(shape[0])
    mlp = ops.sub_block("mlp", norm, *pack([(gate_up, down)]))
    for t in (1, 5, 37):
        sums = torch.randn(t, shape[0])
        assert same_bits(run(mlp, sums), one_by_one(normed(norm, sums, dtype), gate_up, down))


@table("shape", SHAPES)
@table("dtype", DTYPES)
def test_a_gated_mlp_equals_its_ops_one_by_one(shape, dtype, isa):
    """A gate of another token, of what the MLP left in place of its input, or whose sigmoid has other bits in the last
    rows than in whole vectors."""
    gate_up, down = make_mlp(*shape, dtype)
    norm, gate = make_norm(shape[0]), torch.randn(1, shape[0]).to(dtype)
    [expert], packed = pack([(gate_up, down)]), ops.pack_linear(gate)
    sums = torch.randn(37, shape[0])
    x = normed(norm, sums, dtype)
    logits = ops.linear(x, packed, out_dtype=torch.float32).expand(-1, shape[0]).contiguous()
    expected = ops.sigmoid_mul(one_by_one(x, gate_up, down), logits)
    mlp = ops.sub_block("mlp", norm, expert, packed)
    for rows in (slice(0, 1), slice(3, 8), slice(0, 37)):
        assert same_bits(run(mlp, sums[rows]), expected[rows])
    wide = [x.double(), gate_up.double(), down.double()]
    exact = reference.sigmoid_mul(one_by_one(*wide, reference), (x.double() @ gate.double().t()).expand(-1, shape[0]))
    assert (expected - exact).abs().max() <= (1e-5 if dtype == torch.float32 else 2e-2) * exact.abs().max()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("per_token", [1, 2, 5])
@pytest.mark.parametrize("is_normalised", [False, True])
def test_mixture_equals_each_token_on_its_own(shape, dtype, per_token, is_normalised, isa):
    """A token that gets another's expert or weight, a sum in the order of likelihood instead of experts, a part that
    was fused into the sum unrounded; an expert that no token chose."""
    experts = [make_mlp(*shape, dtype) for _ in range(5)]
    router = torch.randn(5, shape[0]).to(dtype)
    router[3] = -100 * router[1]  # hardly ever chosen
    norm, sums = make_norm(shape[0]), torch.randn(41, shape[0])
    mixture = ops.sub_block("mixture", norm, ops.pack_linear(router), pack(experts), per_token, is_normalised)
    expected = mixed(normed(norm, sums, dtype), router, experts, per_token, is_normalised=is_normalised)
    for rows in (slice(0, 1), slice(3, 8), slice(0, 41)):
        assert same_bits(run(mixture, sums[rows]), expected[rows])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "router_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)],
    ids=str,
)
@pytest.mark.parametrize(("per_token", "groups", "top_groups"), [(1, 1, 1), (3, 3, 2), (6, 2, 2), (2, 3, 1)])
@pytest.mark.parametrize("is_normalised", [False, True])
@pytest.mark.parametrize("columns", [0, 8, 37])
def test_sigmoid_mixture_equals_each_token_on_its_own(
    shape, dtype, router_dtype, per_token, groups, top_groups, is_normalised, columns, isa
):
    """A bias that reaches the weights, an expert of a group that is left out, a factor before the sum, sums of latent
    columns that are rounded once too often, and a router that is rounded to the experts' dtype."""
    h, f = shape
    experts = [make_mlp(columns or h, f, dtype, is_gated=False) for _ in range(6)]
    router = torch.randn(6, h).to(router_dtype)
    latent = [torch.randn(columns, h).to(dtype) * h**-0.5, torch.randn(h, columns).to(dtype)] if columns else []
    sigmoid = SigmoidRouting(torch.randn(6) * 0.3, groups, top_groups, 2.5, random.choice([1e-20, 1e-6, 0.1]))
    norm, sums = make_norm(h), torch.randn(41, h)
    projections = tuple(map(ops.pack_linear, latent))
    rule = per_token, is_normalised, sigmoid, projections
    mixture = ops.sub_block("mixture", norm, ops.pack_linear(router), pack(experts), *rule)
    x = normed(norm, sums, dtype)
    expected = mixed(x, router, experts, per_token, is_normalised=is_normalised, sigmoid=sigmoid, latent=latent)
    for rows in (slice(0, 1), slice(3, 8), slice(0, 41)):
        assert same_bits(run(mixture, sums[rows]), expected[rows])


@table("is_sigmoid", [False, True])
def test_mixture_is_close_to_float64(is_sigmoid):
    """Kernels that are wrong in the same way as the fused call."""
    latent = [torch.randn(24, 33) * 33**-0.5, torch.randn(33, 24) * 24**-0.5] if is_sigmoid else []
    experts = [make_mlp(24 if latent else 33, 45, torch.float32, is_gated=not is_sigmoid) for _ in range(6)]
    router, norm, sums = torch.randn(6, 33), make_norm(33), torch.randn(20, 33)
    sigmoid = SigmoidRouting(torch.randn(6) * 0.3, 3, 2, 2.5) if is_sigmoid else None
    x = normed(norm, sums.double(), torch.float64, reference)
    wide = [(up.double(), down.double()) for up, down in experts]
    expected = mixed(x, router.double(), wide, 3, reference, is_sigmoid, sigmoid, [one.double() for one in latent])
    rule = 3, is_sigmoid, sigmoid, tuple(map(ops.pack_linear, latent))
    y = run(ops.sub_block("mixture", norm, ops.pack_linear(router), pack(experts), *rule), sums)
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-5)


def test_weights_that_are_all_zero_stay_so():
    """Sigmoids of 0 that are divided by their sum."""
    router = ops.pack_linear(torch.full((4, 16), -1e30))
    experts, norm = pack([make_mlp(16, 24, torch.float32, is_gated=False)] * 4), make_norm(16)
    mixture = ops.sub_block("mixture", norm, router, experts, 2, True, SigmoidRouting(torch.zeros(4)))
    assert not run(mixture, torch.rand(3, 16)).any()


@table("columns", [1, 15, 16, 17, 101])
@table("dtype", DTYPES)
def test_relu_square_is_exact(columns, dtype, every_isa):
    """A tail or an instruction set that rounds otherwise, a negative value that is squared, a NaN that becomes 0."""
    wide = torch.randn(7, columns + 5).to(dtype)
    x = wide[:, 3 : 3 + columns]
    x[0, 0], x[1, 0], x[2, 0] = -0.0, float("nan"), float("inf")
    for isa in every_isa:
        set_isa(isa)
        y = ops.relu_square(x)
        assert y.dtype == dtype and same_bits(y.nan_to_num(7.0), reference.relu_square(x).nan_to_num(7.0))


@pytest.mark.parametrize(
    ("experts", "groups", "top_groups"), [(1, 1, 1), (6, 3, 2), (128, 1, 1), (36, 9, 4), (20, 2, 2)]
)
def test_sigmoid_topk_matches_the_reference(experts, groups, top_groups, every_isa, threads):
    """A group or an expert that is left out wrongly, another order, a bias in the weights, bits of another instruction
    set."""
    wide, bias = torch.randn(301, experts + 3) * 2, torch.randn(experts) * 0.5
    scores = wide[:, 3:].double().sigmoid() + bias.double()
    sums = scores.view(301, groups, -1).sort(descending=True).values[:, :, :2].sum(2)
    gaps = [values.sort().values.diff() > 1e-6 for values in (scores, sums)]  # float32 may order closer ones otherwise
    logits = wide[gaps[0].all(1) & gaps[1].all(1)][:, 3:]
    assert len(logits) > 250
    for k in {1, top_groups * experts // groups}:
        made = []
        for isa in every_isa:
            set_isa(isa)
            made.append(ops.route(logits, k, False, SigmoidRouting(bias, groups, top_groups)))
        (weights, chosen), *others = made
        expected, expected_chosen = reference.sigmoid_topk(logits.double(), k, bias.double(), groups, top_groups)
        assert torch.equal(chosen, expected_chosen)
        torch.testing.assert_close(weights.double(), expected, rtol=1e-6, atol=1e-30)
        assert all(same_bits(weights, other) and torch.equal(chosen, indices) for other, indices in others)


@table("value", [float("nan"), float("inf"), -float("inf")])
def test_a_logit_or_bias_that_is_not_finite_makes_all_weights_nan(value):
    """A broken router whose weights, 0 or 1, look sound."""
    logits, bias = torch.randn(3, 21), torch.randn(21)
    expected, _ = ops.route(logits, 4, False, SigmoidRouting(bias, 3, 2))
    for column in (0, 20):
        broken = logits.clone()
        broken[1, column] = value
        weights, chosen = ops.route(broken, 4, False, SigmoidRouting(bias, 3, 2))
        assert same_bits(weights[::2], expected[::2]) and bool(weights[1].isnan().all())
        assert 0 <= int(chosen.min()) <= int(chosen.max()) < 21
        assert bool(reference.sigmoid_topk(broken, 4, bias, 3, 2)[0][1].isnan().all())
        hurt = bias.clone()
        hurt[column] = value
        assert bool(ops.route(logits, 4, False, SigmoidRouting(hurt, 3, 2))[0].isnan().all())


def test_the_lower_expert_and_group_come_first_on_ties():
    """Experts that depend on the order of a search."""
    logits, bias = torch.zeros(1, 6), torch.zeros(6)
    for k, groups, top_groups, chosen in ((3, 1, 1, [0, 1, 2]), (2, 3, 1, [0, 1]), (4, 3, 2, [0, 1, 2, 3])):
        assert ops.route(logits, k, False, SigmoidRouting(bias, groups, top_groups))[1].tolist() == [chosen]
        assert reference.sigmoid_topk(logits, k, bias, groups, top_groups)[1].tolist() == [chosen]
    bias[5] = 0.1
    assert ops.route(logits, 2, False, SigmoidRouting(bias, 3, 1))[1].tolist() == [[5, 4]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_do_not_change_a_bit(dtype, threads):
    """Two threads that add to one token's sum."""
    experts = [make_mlp(70, 130, dtype) for _ in range(4)]
    router = ops.pack_linear(torch.randn(4, 70).to(dtype))
    mixture = ops.sub_block("mixture", make_norm(70), router, pack(experts), 2)
    sums = torch.randn(3000, 70)
    y = run(mixture, sums)
    torch.set_num_threads(1)
    assert same_bits(run(mixture, sums), y)


def test_refuses_what_does_not_fit():
    """Addresses handed to the kernels for weights or activations of another shape or dtype."""
    gate_up, down = (ops.pack_linear(weight) for weight in make_mlp(16, 24, torch.float32))
    expert, norm = Expert(gate_up, down), make_norm(16)
    with pytest.raises(ValueError, match="gate_up must be"):
        Expert(down, gate_up)
    with pytest.raises(ValueError, match="norm must be contiguous of shape"):
        ops.sub_block("mlp", make_norm(17), expert)
    for gate in (torch.randn(2, 16), torch.randn(1, 17), torch.randn(1, 16).bfloat16()):
        with pytest.raises(ValueError, match="the gate must have one row, and the expert's inputs and dtype"):
            ops.sub_block("mlp", norm, expert, ops.pack_linear(gate))
    with pytest.raises(ValueError, match="must have the part's 16 columns"):
        ops.sub_block("mlp", norm, expert)(ops.residual(torch.randn(2, 17)), None)
    with pytest.raises(ValueError, match="the router must have 2 rows, one for each expert"):
        ops.sub_block("mixture", norm, ops.pack_linear(torch.randn(3, 16)), [expert, expert], 1)
    with pytest.raises(ValueError, match="experts must have one shape"):
        ops.sub_block("mixture", norm, ops.pack_linear(torch.randn(2, 17)), [expert, expert], 1)
    for rows, columns in ((47, 16), (49, 16), (48, 15), (48, 17)):
        with pytest.raises(ValueError, match="gate_up must be"):
            Expert(ops.pack_linear(torch.randn(rows, columns)), down)
    with pytest.raises(ValueError, match="of one dtype"):
        Expert(gate_up, ops.pack_linear(torch.randn(16, 24).bfloat16()))
    router = ops.pack_linear(torch.randn(2, 16))
    narrower, half = pack([make_mlp(16, 23, torch.float32), make_mlp(16, 24, torch.bfloat16)])
    (ungated,) = pack([make_mlp(16, 24, torch.float32, is_gated=False)])
    for experts in ([expert, narrower], [expert, half], [expert, ungated], []):
        with pytest.raises(ValueError, match="experts must have one shape"):
            ops.sub_block("mixture", norm, router, experts, 1)
    with pytest.raises(ValueError, match="experts must have one shape"):
        ops.sub_block("mixture", norm, ops.pack_linear(torch.randn(2, 16).bfloat16()), [expert, expert], 1)
    with pytest.raises(ValueError, match=r"gate_up must be \(f, h\)"):
        Expert(gate_up, down, is_gated=False)
    for shapes in ([(16, 16)], [(16, 16), (16, 15)], [(16, 16), (17, 16)], [(16, 15), (16, 16)], [(16, 16)] * 3):
        latent = tuple(ops.pack_linear(torch.randn(shape)) for shape in shapes)
        with pytest.raises(ValueError, match=r"latent must be \(l, 16\) and \(16, l\)"):
            ops.sub_block("mixture", norm, router, [expert, expert], 1, False, None, latent)
    for experts, per_token in (([expert] * 2, 0), ([expert] * 2, 3), ([expert], 1), ([expert] * 3, 1)):
        with pytest.raises(ValueError, match=r"experts_per_token must lie in 1 to [123];"):
            ops.sub_block("mixture", norm, router, experts, per_token)


@table("k, columns, groups, top_groups, sentence", [
    (0, 6, 1, 1, "k must lie in 1 to 6"), (5, 6, 3, 2, "k must lie in 1 to 4, the columns of 2 groups; it is 5"),
    (1, 6, 4, 2, "groups must divide the 6 columns"), (1, 6, 0, 1, "top_groups must lie in 1 to groups"),
    (1, 6, 3, 4, "top_groups must lie in 1 to groups"), (1, 6, 3, 0, "top_groups must lie in 1 to groups"),
    (1, 6, 6, 5, "into at least 2 each"), (1, 5, 1, 1, "bias must be contiguous of shape"),
])  # fmt: skip
def test_a_routing_that_does_not_fit_is_refused(k, columns, groups, top_groups, sentence):
    """An expert beside the list, read by the kernel."""
    bias, experts = torch.zeros(columns), pack([make_mlp(16, 24, torch.float32)] * 6)
    with pytest.raises(ValueError, match=sentence):
        ops.route(torch.randn(2, 6), k, False, SigmoidRouting(bias, groups, top_groups))
    if k:
        rule = k, False, SigmoidRouting(bias, groups, top_groups)
        with pytest.raises(ValueError, match=sentence):
            ops.sub_block("mixture", make_norm(16), ops.pack_linear(torch.randn(6, 16)), experts, *rule)


@table("call", [ops.relu_square, lambda x: ops.route(x, 1, False, SigmoidRouting(torch.zeros(3)))])
def test_kernels_refuse_what_they_cannot_read(call):
    """An address of another device or type handed to the kernel."""
    for x, sentence in (
        (torch.zeros(2, 3, device="meta"), "must be on the CPU"),
        (torch.zeros(3), "have two dimensions"),
        (torch.zeros(2, 3).half(), "must be float32"),
    ):
        with pytest.raises(ValueError, match=sentence):
            call(x)
    assert len(call(torch.zeros(0, 3))) in (0, 2)
