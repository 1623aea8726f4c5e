"""A mixer's products for a few rows together with the ops after them: the bits of the ops one by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from apcbatch.kernels.cuda.few_rows import FewRows
from apcbatch.kernels.cuda.scan import batch_on
from apcbatch.kernels.ragged import Ragged
from tests.kernels.recurrent import fresh_seed, poison, ragged, same_bits
from tests.kernels.test_cuda_decode import CUDA, NORMS, Stack, mixed

pytestmark = pytest.mark.cuda
# h, d, n, r, w, v: a block of one row, every width of a stage, more rows in a block than it multiplies at once
SIZES = [
    (16, 32, 16, 16, 1, 11),
    (64, 112, 16, 16, 4, 97),
    (768, 1536, 16, 48, 4, 11),
    (2560, 5120, 16, 160, 4, 11),
    (4096, 8192, 16, 256, 3, 11),
    (48, 9232, 16, 32, 2, 11),
]


@pytest.fixture(autouse=True)
def on_cuda() -> Iterator[None]:
    """Tensors are made on the CUDA device."""
    with torch.device(CUDA):
        yield


def exact_stack(size: tuple[int, ...], norms: str) -> Stack:
    """One mixer of exact weights, without the bias that the product would have to add."""
    stack = Stack(size, torch.bfloat16, norms, layers=1, exact=True)
    norm, weights = stack.layers[0]
    stack.layers[0] = norm, dataclasses.replace(weights, in_bias=None)
    return stack


def passed(stack: Stack, begin: torch.Tensor, batch: Ragged) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the mixer leaves, and its states after it."""
    ssm, conv = stack.arena()
    residual = stack.ops.residual(begin.clone())
    for shape in ((2, len(begin), stack.size[1]), (len(begin), stack.size[1])):
        poison(shape, torch.bfloat16)
    stack.mixers((ssm, conv))[0](residual, batch)
    return residual.delta, ssm, conv


@pytest.mark.parametrize("norms", NORMS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_have_the_bits_of_the_ops_one_by_one(
    size: tuple[int, ...], norms: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row or a column that is left out, another sequence's slot or state, a rounding that is left out, a wrong
    half of in_proj, states that are read before they are there."""
    fresh_seed()
    stack = exact_stack(size, norms)
    few_rows = FewRows(stack.layers[0][1], *(part[:, 0] for part in stack.arena()))
    for rows in range(1, 9):
        begin, batch = torch.randn(rows, size[0]), mixed(rows)
        assert few_rows.takes(batch_on(CUDA, batch))
        found = passed(stack, begin, batch)
        with monkeypatch.context() as patch:
            patch.setattr(FewRows, "takes", lambda *_: False)
            expected = passed(stack, begin, batch)
        assert all(same_bits(one, other) for one, other in zip(found, expected, strict=True)), rows


def test_take_only_what_they_can() -> None:
    """A batch of longer sequences or of more than a block multiplies, products that are free, of float32 or with a
    bias, and states that the kernel does not have."""
    one, exact = ragged([1]), exact_stack(SIZES[1], "plain")

    def taken(stack: Stack, batch: Ragged) -> bool:
        ssm, conv = stack.arena()
        return FewRows(stack.layers[0][1], ssm[:, 0], conv[:, 0]).takes(batch_on(CUDA, batch))

    assert taken(exact, ragged([1] * 8))
    assert not taken(exact, ragged([1] * 9)) and not taken(exact, ragged([2, 1]))
    assert not taken(Stack(SIZES[1], torch.bfloat16), one)
    assert not taken(Stack(SIZES[1], torch.float32, exact=True), one)
    assert not taken(Stack(SIZES[1], torch.bfloat16, "plain", exact=True), one)
    for n, w in ((15, 4), (16, 5)):
        assert not taken(Stack((64, 112, n, 16, w, 97), torch.bfloat16, exact=True), one)
