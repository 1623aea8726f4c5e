"""What is chosen from logits: experts, the likeliest token, log-probabilities."""

from __future__ import annotations

import pytest
import torch

from apcbatch.kernels import reference
from apcbatch.kernels.cpu.backend import CpuBackend
from apcbatch.kernels.processor import set_isa
from tests.effort import table

ops = CpuBackend()

pytestmark = pytest.mark.pairwise


@table("n", [1, 2, 4, 7, 16, 33, 70])
def test_a_softmax_route_matches_the_reference(n, isa):
    """Padding that joins the softmax, weights that are normalised again, a wrong order."""
    logits = torch.randn(40, n + 3)[:, 2 : 2 + n] * 3
    for k in {1, min(2, n), n}:
        weights, experts = ops.route(logits, k)
        expected_weights, expected_experts = reference.route(logits.double(), k)
        assert torch.equal(experts, expected_experts)
        assert torch.allclose(weights.double(), expected_weights, rtol=1e-6, atol=1e-9)


def test_ties_go_to_the_lower_index(isa):
    """An expert or a token that depends on the vector width."""
    logits = torch.zeros(1, 50)
    assert ops.route(logits, 3)[1].tolist() == [[0, 1, 2]]
    logits[0, [9, 17, 41]] = 2.0
    assert ops.route(logits, 4)[1].tolist() == [[9, 17, 41, 0]]
    assert ops.greedy(logits)[0].tolist() == [9]


@table("v", [1, 3, 16, 32, 33, 1000, 50280])
def test_greedy_matches_float64(v, isa):
    """A maximum in the tail that is missed, a sum of exponentials that loses the small ones."""
    logits = torch.randn(5, v) * 4
    logits[3, v - 1] = 60.0
    logits[4] -= 1e4
    tokens, logprobs = ops.greedy(logits)
    expected_tokens, expected = reference.greedy(logits)
    assert torch.equal(tokens, expected_tokens)
    assert torch.equal(ops.argmax(logits), expected_tokens)
    assert torch.allclose(logprobs, expected, rtol=2e-7, atol=3e-7)


def test_a_token_has_one_logprob(every_isa, threads):
    """A log-probability that differs in a bit between greedy and sampling, between rows, threads or
    processors."""
    torch.manual_seed(0)
    logits = torch.randn(37, 5003)
    chosen = torch.randint(0, 5003, (37,))
    expected = []
    for isa in every_isa:
        set_isa(isa)
        tokens, logprobs = ops.greedy(logits)
        for row in range(0, 37, 5):
            assert ops.token_logprobs(logits[row : row + 1], tokens[row : row + 1]).item() == float(logprobs[row])
        assert torch.equal(ops.token_logprobs(logits, tokens), logprobs)
        several = ops.token_logprobs(logits, chosen)
        assert torch.equal(torch.cat(list(map(ops.token_logprobs, logits.split(1), chosen.split(1)))), several)
        expected = expected or [logprobs, several]
        assert torch.equal(logprobs, expected[0]) and torch.equal(several, expected[1]), isa
    assert torch.allclose(several, reference.token_logprobs(logits, chosen), rtol=1e-6)


def test_masked_logits_have_no_weight(isa):
    """Minus infinity that becomes NaN or a small probability."""
    logits = torch.full((1, 40), -torch.inf)
    logits[0, 7] = 1.5
    weights, experts = ops.route(logits, 2)
    assert weights.tolist() == [[1.0, 0.0]] and experts.tolist() == [[7, 0]]


@table("v", [1, 15, 16, 17, 64, 129, 1000])
def test_rows_that_are_not_finite_have_no_token(v, isa):
    """A number that is not finite in a place where no vector looks, and a row beside it that is marked with it."""
    for wrong in (torch.nan, torch.inf, -torch.inf):
        for place in {0, v // 2, v - 1}:
            logits = torch.randn(3, v)
            logits[1, place] = wrong
            tokens, logprobs = ops.greedy(logits)
            expected, expected_logprobs = reference.greedy(logits)
            assert tokens.tolist() == expected.tolist() == ops.argmax(logits).tolist()
            assert tokens[1] == -1 and logprobs[1].isnan() and expected_logprobs[1].isnan()
            assert logprobs[[0, 2]].isfinite().all()
