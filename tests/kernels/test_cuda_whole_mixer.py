"""A mixer whose ops are launched by one call: the bits of the ops one by one, over any batch."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import pytest
import torch

from apcbatch.kernels.cuda import whole_mixer
from apcbatch.kernels.cuda.scan import batch_on
from apcbatch.kernels.cuda.whole_mixer import WholeMixer
from apcbatch.kernels.layer import Residual
from apcbatch.kernels.ragged import Ragged
from tests.kernels.recurrent import fresh_seed, ragged, same_bits
from tests.kernels.test_cuda_decode import CUDA, NORMS, Stack

pytestmark = pytest.mark.cuda
# h, d, n, r, w, v: one piece and several of the products with few rows, taps and states of every kind
SIZES = [
    (16, 32, 16, 16, 1, 11),
    (64, 112, 8, 16, 4, 11),
    (768, 1536, 16, 48, 4, 11),
    (2560, 5120, 16, 160, 4, 11),
    (48, 9232, 24, 32, 3, 11),
]
DTYPES = [torch.bfloat16, torch.float32]
LENGTHS = [
    [3],  # few rows, of one sequence
    [1] * 19,  # more single tokens than a mixer of few rows takes
    [200, 1, 37, 1, 1, 5],
    [1100, 1, 64, 1],  # many rows: the library adds up two pieces in turn
]


@pytest.fixture(autouse=True)
def on_cuda() -> Iterator[None]:
    """Tensors are made on the CUDA device."""
    with torch.device(CUDA):
        yield


def stack_of(size: tuple[int, ...], dtype: torch.dtype, norms: str, layers: int = 1) -> Stack:
    """Mixers of exact weights, without the biases that only the ops add."""
    stack = Stack(size, dtype, norms, layers=layers, exact=True)
    bare = {"in_bias": None, "out_bias": None}
    stack.layers = [(norm, dataclasses.replace(weights, **bare)) for norm, weights in stack.layers]
    return stack


def batch_of(lengths: list[int]) -> Ragged:
    """Sequences from a slot or from nothing, into the same slot or none, some with two snapshots or one."""
    count, source = len(lengths), random.Random(torch.initial_seed())
    slots = source.sample(range(24), min(24, 3 * count))
    final = [slots.pop() if source.random() < 0.8 and slots else -1 for _ in lengths]
    initial = [slot if source.random() < 0.7 else -1 for slot in final]
    snapshots = []
    for length in lengths:
        places = sorted(source.sample(range(1, length + 1), min(length, source.randrange(3), len(slots))))
        snapshots.append([(place, slots.pop()) for place in places])
    return ragged(lengths, initial, final, snapshots)


def poisoned(*arguments: object, **options: object) -> torch.Tensor:
    """torch.empty, filled with bytes that are NaN in every dtype."""
    memory = torch.zeros(*arguments, **options)
    memory.view(torch.uint8).fill_(0xFF)
    return memory


def passed(
    stack: Stack, begin: torch.Tensor, batch: Ragged, patch: pytest.MonkeyPatch, whole: bool
) -> tuple[torch.Tensor, ...]:
    """The residual stream after the stack, what is left to add to it, and the states. whole: as one call a mixer, or
    else as its ops."""
    ssm, conv = stack.arena()
    residual, ran = Residual(begin.clone(), begin), []
    with patch.context() as during:
        run = WholeMixer.__call__
        during.setattr(WholeMixer, "__call__", lambda *arguments: whole and (ran.append(run(*arguments)) or ran[-1]))
        during.setattr(whole_mixer.torch, "empty", poisoned)
        during.setattr(whole_mixer.torch, "empty_like", lambda like: poisoned(like.shape, dtype=like.dtype))
        for mixer in stack.mixers((ssm, conv)):
            mixer(residual, batch)
    assert all(ran) and bool(ran) == whole
    return residual.sum, residual.delta, ssm, conv


@pytest.mark.parametrize("norms", NORMS)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_has_the_bits_of_the_ops_one_by_one(
    dtype: torch.dtype, size: tuple[int, ...], norms: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A size, an address, a stride or a kernel that is mistaken, arrays that overlap, a residual that is not added, an
    op that is left out."""
    fresh_seed()
    stack = stack_of(size, dtype, norms, layers=2)
    for lengths in LENGTHS:
        batch, begin = batch_of(lengths), torch.randn(sum(lengths), size[0])
        expected = passed(stack, begin, batch, monkeypatch, whole=False)
        found = passed(stack, begin, batch, monkeypatch, whole=True)
        assert all(same_bits(one, other) for one, other in zip(found, expected, strict=True)), lengths


def test_leaves_to_the_ops_what_it_does_not_take() -> None:
    """Products without chains, biases of projections, parts of rows that do not lie aligned, kernels that are yet to be
    found, a slot that no state has."""
    fresh_seed()
    size, few, many = SIZES[1], ragged([5, 2]), ragged([90])

    def taken(stack: Stack, batch: Ragged, **changed: object) -> bool:
        norm, weights = stack.layers[0]
        ssm, conv = stack.arena()
        mixer = WholeMixer(norm, dataclasses.replace(weights, **changed), ssm[:, 0], conv[:, 0])
        begin = torch.randn(batch.num_tokens, stack.size[0])
        return mixer(Residual(begin, begin), batch_on(CUDA, batch))

    stack = stack_of(size, torch.bfloat16, "none")
    assert taken(stack, few)
    assert not taken(stack, many)
    assert not taken(stack, ragged([1], final=[24]))
    assert not taken(stack, few, in_bias=torch.randn(224))
    assert not taken(stack, few, out_bias=torch.randn(64))
    assert not taken(Stack(size, torch.bfloat16), few)
    odd = (64, 112, 3, 16, 4, 11)
    assert not taken(stack_of(odd, torch.bfloat16, "none"), few)
    assert taken(stack_of(odd, torch.bfloat16, "plain"), few)
