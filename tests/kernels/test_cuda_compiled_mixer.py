"""Mixers whose ops are launched by one call: the bits of the ops one by one, over any batch."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import pytest
import torch

from apcbatch.kernels.cuda import compiled_mamba
from apcbatch.kernels.cuda.compiled_mamba import CompiledMambaStack
from apcbatch.kernels.cuda.mamba import DeviceMamba, DeviceMambaStack
from apcbatch.kernels.layer import Residual
from apcbatch.kernels.ragged import Ragged
from tests.kernels.recurrent import ragged, same_bits
from tests.kernels.test_cuda_few_rows import CUDA, NORMS, RandomMixer

pytestmark = pytest.mark.cuda
# h, d, n, r, w: one piece and several of the products with few weights, taps and states of every kind
SIZES = [
    (16, 32, 16, 16, 1),
    (64, 112, 8, 16, 4),
    (768, 1536, 16, 48, 4),
    (2560, 5120, 16, 160, 4),
    (48, 9232, 24, 32, 3),
]
DTYPES = [torch.bfloat16, torch.float32]
LENGTHS = [
    [3],  # few rows, of one sequence
    [1] * 19,  # more single tokens than a mixer of few rows takes
    [40, 2, 1, 30],
    [200, 1, 37, 1, 1, 5],
    [1100, 1, 64, 1],  # many rows: the library adds up two pieces in turn
]
PROJECTIONS = ("in_proj", "x_proj", "dt_proj", "out_proj")
States = list[tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(autouse=True)
def on_cuda() -> Iterator[None]:
    """Tensors are made on the CUDA device."""
    with torch.device(CUDA):
        yield


def random_mixer(size: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, norms: str = "none") -> RandomMixer:
    """Without biases of the projections, which the ops alone add."""
    mixer = RandomMixer(size, norms, dtype)
    mixer.weights = dataclasses.replace(mixer.weights, out_bias=None)
    return mixer


def device_mixers(mixers: list[RandomMixer]) -> tuple[list[DeviceMamba], States]:
    """The mixers, each over an arena of its own."""
    states = [mixer.arena() for mixer in mixers]
    return [
        DeviceMamba(mixer.norm, mixer.weights, ssm[:, 0], conv[:, 0])
        for mixer, (ssm, conv) in zip(mixers, states, strict=True)
    ], states


def batch_of(lengths: list[int]) -> Ragged:
    """Sequences from a slot or from nothing, into the same slot or none, some with two snapshots or one."""
    count, source = len(lengths), random.Random(torch.initial_seed())
    slots = source.sample(range(24), min(24, 3 * count))
    final = [slots.pop() if source.random() < 0.8 else -1 for _ in lengths]
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
    mixers: list[RandomMixer], begin: torch.Tensor, batch: Ragged, patch: pytest.MonkeyPatch, calls: int
) -> list[torch.Tensor]:
    """The residual stream after the mixers, what is left to add to it, and the states. calls: one for all, one for
    each, or 0 for their ops."""
    parts, states = device_mixers(mixers)
    residual, taken = Residual(begin.clone(), begin), []
    with patch.context() as during:
        run = CompiledMambaStack.__call__
        during.setattr(
            CompiledMambaStack,
            "__call__",
            lambda *arguments: calls > 0 and (taken.append(run(*arguments)) or taken[-1]),
        )
        during.setattr(compiled_mamba.torch, "empty", poisoned)
        during.setattr(compiled_mamba.torch, "empty_like", lambda like: poisoned(like.shape, dtype=like.dtype))
        if calls == 1:
            DeviceMambaStack(parts)(residual, batch)
        else:
            for part in parts:
                part(residual, batch)
    assert taken == [True] * calls
    return [residual.sum, residual.delta, *(part for arena in states for part in arena)]


@pytest.mark.parametrize("norms", NORMS)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_have_the_bits_of_the_ops_one_by_one(
    dtype: torch.dtype, size: tuple[int, ...], norms: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A size, an address, a stride or a kernel that is mistaken, arrays that overlap, a residual that is not added, an
    op that is left out, a mixer that reads what another has left before it is there."""
    mixers = [random_mixer(size, dtype, norms) for _ in range(2)]
    for lengths in LENGTHS:
        batch, begin = batch_of(lengths), torch.randn(sum(lengths), size[0])
        expected = passed(mixers, begin, batch, monkeypatch, 0)
        for calls in (1, len(mixers)):
            found = passed(mixers, begin, batch, monkeypatch, calls)
            assert all(same_bits(one, other) for one, other in zip(found, expected, strict=True)), (lengths, calls)


def test_leave_to_the_ops_what_they_do_not_take() -> None:
    """Biases of projections, rows that do not lie aligned, kernels that are yet to be found, free products, a slot that
    no state has, single tokens that other kernels take, mixers that differ."""
    size, odd, few, many = (64, 112, 16, 16, 4), (64, 112, 3, 16, 4), ragged([5, 2]), ragged([300])

    def taken(batch: Ragged, *mixers: RandomMixer) -> bool:
        begin = torch.randn(batch.num_tokens, size[0])
        return DeviceMambaStack(device_mixers(list(mixers))[0])(Residual(begin, begin), batch)

    plain = random_mixer(size)
    assert taken(few, plain) and taken(few, plain, random_mixer(size))
    assert not taken(few, plain, random_mixer(size, norms="plain"))
    assert not taken(ragged([1] * 8), plain) and taken(ragged([1] * 9), plain)
    assert not taken(ragged([5], final=[24]), plain)
    assert taken(few, random_mixer(odd, norms="plain")) and not taken(few, random_mixer(odd))
    assert not taken(many, plain)
    plain.passed(torch.randn(300, 64), many)
    assert taken(many, plain)
    free = {name: dataclasses.replace(getattr(plain.weights, name), exact=False) for name in PROJECTIONS}
    plain.weights = dataclasses.replace(plain.weights, **free)
    assert taken(few, plain) and not taken(many, plain)
    for name, columns in (("in_bias", 224), ("out_bias", 64)):
        biased = random_mixer(size)
        biased.weights = dataclasses.replace(biased.weights, **{name: torch.randn(columns)})
        assert not taken(few, biased)
