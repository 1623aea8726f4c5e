"""Sub-blocks whose ops are launched by one call: the bits of the ops one by one, over any batch."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from apcbatch.kernels.backend import StackEntry
from apcbatch.kernels.cuda import program
from apcbatch.kernels.cuda.mamba import DeviceMamba
from apcbatch.kernels.cuda.program import DeviceStack, Program
from apcbatch.kernels.cuda.residual import DeviceResidual
from apcbatch.kernels.ragged import Ragged
from apcbatch.model.arena import StateArena
from apcbatch.model.batch import Batch
from apcbatch.model.causal_lm import CausalLM
from apcbatch.model.devices import backend_for
from apcbatch.model.families import family_of, load_model_config, state_layout
from tests.kernels.recurrent import ragged, same_bits
from tests.kernels.test_cuda_few_rows import CUDA, NORMS, RandomMixer
from tests.model.passes import Loaded

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


def stack_of(parts: list[DeviceMamba], hidden: int) -> DeviceStack:
    return DeviceStack([StackEntry(part, False, lambda *_: pytest.fail("op by op")) for part in parts], hidden, CUDA)


def passed(
    mixers: list[RandomMixer], begin: torch.Tensor, batch: Ragged, patch: pytest.MonkeyPatch, calls: int
) -> list[torch.Tensor]:
    """The residual stream after the mixers, what is left to add to it, and the states. calls: one for all, one for
    each, or 0 for their ops."""
    parts, states = device_mixers(mixers)
    residual = DeviceResidual(begin.clone(), begin)
    with patch.context() as during:
        during.setattr(program.torch, "empty", poisoned)
        during.setattr(program.torch, "empty_like", lambda like: poisoned(like.shape, dtype=like.dtype))
        for group in [parts] if calls == 1 else [[part] for part in parts]:
            run = stack_of(group, begin.shape[1]) if calls else group[0]
            run(residual, SimpleNamespace(ragged=batch) if calls else batch)
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
    no state has, single tokens, for which there are other kernels."""
    size, odd, few, many = (64, 112, 16, 16, 4), (64, 112, 3, 16, 4), ragged([5, 2]), ragged([300])

    def taken(batch: Ragged, *mixers: RandomMixer) -> bool:
        begin, launches = torch.randn(batch.num_tokens, size[0]), Program(size[0], CUDA)
        are_listed = [launches.add(part) for part in device_mixers(list(mixers))[0]]
        return all(are_listed) and launches(DeviceResidual(begin, begin), SimpleNamespace(ragged=batch))

    plain = random_mixer(size)
    assert taken(few, plain) and taken(few, plain, random_mixer(size, norms="plain"))
    assert not taken(ragged([1] * 9), plain)
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


# Sizes that fixed-order products take. Mixtures, of jamba, are not listed.
EVEN = {"hidden_size": 64, "intermediate_size": 96}
MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 1}
WHOLE: dict[str, tuple[str, dict[str, object]]] = {
    "qwen3_5": ("qwen3_5", {**EVEN, "linear_num_value_heads": 4, "linear_num_key_heads": 2}),
    "granite": ("granitemoehybrid", {**EVEN, **MAMBA, "num_local_experts": 0, "shared_intermediate_size": 96}),
    "bamba": ("bamba", {**EVEN, **MAMBA, "head_dim": 16}),
    "mamba2": ("mamba2", {"hidden_size": 64, "num_heads": 8, "head_dim": 16, "state_size": 16}),
    "lfm2": ("lfm2", {"hidden_size": 64, "num_attention_heads": 4, "block_multiple_of": 16}),
    "jamba": ("jamba", {**EVEN, "mamba_dt_rank": 16, "mamba_d_state": 16}),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", WHOLE)
def test_a_model_has_the_bits_of_its_ops(
    name: str, dtype: torch.dtype, tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An op, a scale or a rotation that a program leaves out, keys of another position, a buffer that is used again
    too early, a delta that is added twice between a call and an op."""
    family, overrides = WHOLE[name]
    with torch.device("cpu"):
        folder = tiny_checkpoint(family, **overrides)
        config = load_model_config(folder)
        arena = StateArena(state_layout(config, str(dtype).removeprefix("torch.")), 16, 24, CUDA)
        with family_of(config).checkpoint(folder, CUDA) as checkpoint:
            model = CausalLM(checkpoint, config, dtype, arena, backend_for(CUDA))
    parts = [*arena.slots.values(), *arena.pages.values()]
    before = [torch.randn(part.shape).to(part.dtype) for part in parts]
    stack, taken = model._layer_stack, []
    run = Program.__call__
    monkeypatch.setattr(Program, "__call__", lambda *given: taken.append(run(*given)) or taken[-1])

    def states_after(batch: Batch) -> list[torch.Tensor]:
        for part, start in zip(parts, before, strict=True):
            part.copy_(start)
        return [model.forward(batch), *(part.clone() for part in parts)]

    for lengths in ([5, 1, 70], [3, 129], [1, 2]):
        with torch.device("cpu"):
            batch = Loaded.batch(None, [7, 64, 0][: len(lengths)], lengths).on(CUDA)
        model._layer_stack = None
        expected = states_after(batch)
        model._layer_stack, taken[:] = stack, []
        found = states_after(batch)
        assert all(same_bits(one, other) for one, other in zip(found, expected, strict=True)), lengths
        assert taken and all(taken)
    calls, sub_blocks = len(taken), sum(len(layer) for layer in model.layers)
    assert calls == 1 or (name == "jamba" and 1 < calls < sub_blocks)
