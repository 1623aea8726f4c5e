"""The SwiGLU MLP and the mixture in one call: the bits of the ops one by one, whatever else is routed where."""

from __future__ import annotations

import pytest
import torch

from apcbatch.kernels import reference
from apcbatch.kernels.cpu.backend import CpuBackend
from apcbatch.kernels.layer import Expert, PreNorm
from tests.kernels.recurrent import DTYPES, poison, same_bits

ops = CpuBackend()

pytestmark = pytest.mark.pairwise

SHAPES = [(16, 24), (33, 45), (40, 44), (70, 130)]  # h, f


def make_mlp(h: int, f: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """gate_up (2f, h) and down (h, f)."""
    return (torch.randn(2 * f, h) * h**-0.5).to(dtype), (torch.randn(h, f) * f**-0.5).to(dtype)


def normed(norm, sums, dtype, k=ops):
    """What a part makes its result of."""
    return k.rms_norm(sums, norm.weight.to(sums.dtype), norm.eps, dtype)


def make_norm(h: int) -> PreNorm:
    return PreNorm(1 + 0.2 * torch.randn(h), 1e-5)


def pack(experts) -> list[Expert]:
    return [Expert(ops.pack_linear(gate_up), ops.pack_linear(down)) for gate_up, down in experts]


def run(part, sums):
    """What a fused part leaves to be added to sums."""
    poison((sums.shape[0], 4096), torch.float32)
    residual = ops.residual(sums.clone())
    part(residual, None)
    return residual.delta


def one_by_one(x, gate_up, down, k=ops):
    """Product, gate, product: the definition of the MLP."""
    f = down.shape[1]
    pack = k.pack_linear
    both = k.linear(x, pack(gate_up))
    y = k.silu_mul(both[:, :f], both[:, f:])
    return k.linear(y, pack(down), out_dtype=torch.promote_types(x.dtype, torch.float32))


def mixed(x, router, experts, per_token, k=ops, is_normalised=False):
    """Each token on its own, its experts in ascending order: the definition of the mixture."""
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = []
    for row in x.split(1):
        logits = k.linear(row, k.pack_linear(router), out_dtype=wide)
        weights, chosen = k.softmax_topk(logits, per_token)
        if is_normalised:
            weights = weights / sum(weights[0].tolist()[1:], weights[0, 0])
        total = torch.zeros(row.shape, dtype=wide)
        for weight, expert in sorted(zip(weights[0], chosen[0].tolist(), strict=True), key=lambda pair: pair[1]):
            total += one_by_one(row, *experts[expert], k) * weight
        rows.append(total)
    return torch.cat(rows)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mlp_equals_its_ops_one_by_one(shape, dtype, isa):
    """The gated product in place overwrites a value that is still to be read, or the down projection reads beside."""
    gate_up, down = make_mlp(*shape, dtype)
    norm = make_norm(shape[0])
    mlp = ops.sub_block("mlp", norm, *pack([(gate_up, down)]))
    for t in (1, 5, 37):
        sums = torch.randn(t, shape[0])
        assert same_bits(run(mlp, sums), one_by_one(normed(norm, sums, dtype), gate_up, down))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("per_token", [1, 2, 5])
@pytest.mark.parametrize("is_normalised", [False, True])
def test_mixture_equals_each_token_on_its_own(shape, dtype, per_token, is_normalised, isa):
    """A token that gets another's expert or weight, a sum in the order of likelihood instead of experts, a part that
    was fused into the sum unrounded; an expert that nobody chose."""
    experts = [make_mlp(*shape, dtype) for _ in range(5)]
    router = torch.randn(5, shape[0]).to(dtype)
    router[3] = -100 * router[1]  # hardly ever chosen
    norm, sums = make_norm(shape[0]), torch.randn(41, shape[0])
    mixture = ops.sub_block("mixture", norm, ops.pack_linear(router), pack(experts), per_token, is_normalised)
    expected = mixed(normed(norm, sums, dtype), router, experts, per_token, is_normalised=is_normalised)
    for rows in (slice(0, 1), slice(3, 8), slice(0, 41)):
        assert same_bits(run(mixture, sums[rows]), expected[rows])


def test_mixture_is_close_to_float64():
    """Kernels that are wrong in the same way as the fused call."""
    experts = [make_mlp(33, 45, torch.float32) for _ in range(4)]
    router, norm, sums = torch.randn(4, 33), make_norm(33), torch.randn(20, 33)
    wide = [(gate_up.double(), down.double()) for gate_up, down in experts]
    x = normed(norm, sums.double(), torch.float64, reference)
    expected = mixed(x, router.double(), wide, 2, reference)
    y = run(ops.sub_block("mixture", norm, ops.pack_linear(router), pack(experts), 2), sums)
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-5)


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
    for experts in ([expert, narrower], [expert, half], [half, half], []):
        with pytest.raises(ValueError, match="experts must have one shape"):
            ops.sub_block("mixture", norm, router, experts, 1)
    for experts, per_token in (([expert] * 2, 0), ([expert] * 2, 3), ([expert], 1), ([expert] * 3, 1)):
        with pytest.raises(ValueError, match=r"experts_per_token must lie in 1 to [123];"):
            ops.sub_block("mixture", norm, router, experts, per_token)
