"""A whole pass in one call: the bits of its ops one by one, whatever the threads, and errors of that call alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from apcbatch import _C
from apcbatch.kernels.backend import backend_for
from apcbatch.kernels.isa import available_isas, set_isa
from apcbatch.kernels.isa import isa as isa_in_use
from apcbatch.kernels.layer import Residual
from apcbatch.kernels.ragged import Ragged
from apcbatch.layout import PAGE_TOKENS
from apcbatch.model.arena import StateArena
from apcbatch.model.batch import Batch
from apcbatch.model.causal_lm import CausalLM
from apcbatch.model.families import load_model_config, state_layout
from tests.kernels.recurrent import fresh_seed, ragged, same_bits
from tests.tiny import VOCAB

CPU = torch.device("cpu")
FAMILIES = ("mamba", "falcon_mamba", "jamba")
# Large enough that the threads of a crew share the work of one row.
WIDE = {
    "mamba": {"hidden_size": 192, "time_step_rank": 12},
    "falcon_mamba": {"hidden_size": 192, "time_step_rank": 12},
    "jamba": {"hidden_size": 160, "intermediate_size": 416},
}
# Tokens that each sequence has before the pass, and in it.
PASSES = {
    "one token": ([7], [1]),
    "a decode pass": ([3, 64, 130, 1, 0], [1, 1, 1, 1, 1]),
    "prompts and decodes": ([0, 64, 70, 0, 1], [70, 1, 60, 3, 129]),
}


@pytest.fixture(params=available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that this processor has."""
    before = isa_in_use()
    set_isa(request.param)
    yield request.param
    set_isa(before)


class Loaded:
    """A model, and passes over random states."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        config = load_model_config(folder)
        layout = state_layout(config, str(dtype).removeprefix("torch."))
        self.arena = StateArena(layout, 16, 24, CPU)
        self.model = CausalLM(folder, config, dtype, self.arena, backend_for(CPU))
        self.num_layers = len(config.mixers)
        for part in (*self.arena.slots.values(), *self.arena.pages.values()):
            part.copy_(torch.randn(part.shape))

    @property
    def states(self) -> dict[str, torch.Tensor]:
        """Every slot and page."""
        return {**self.arena.slots, **self.arena.pages}

    def batch(self, before: list[int], lengths: list[int]) -> Batch:
        """Sequences that go on after so many tokens each, with a snapshot of the last one."""
        b, total = len(lengths), sum(lengths)
        initial = [i if context else -1 for i, context in enumerate(before)]
        keeps = [[]] * (b - 1) + [[(lengths[-1], b)]]
        pages = torch.arange(4 * b).view(b, 4)  # of 64 tokens each
        owner = torch.arange(b).repeat_interleave(torch.tensor(lengths))
        positions = torch.cat([torch.arange(n) + context for n, context in zip(lengths, before, strict=True)])
        ends = torch.tensor(lengths).cumsum(0)
        return Batch(
            token_ids=torch.randint(VOCAB, (total,)),
            ragged=ragged(lengths, initial, list(range(b)), keeps),
            logits_rows=ends - 1,
            page_table=pages,
            context=torch.tensor(before),
            token_slots=pages[owner, positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS,
            scored_rows=torch.arange(0, total, 2),
        )

    def op_by_op(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The pass as whoever observes the backend sees it."""
        seen = set()

        def around(name: str, op: Callable[..., object], *args: object, **kwargs: object) -> object:
            seen.add(name)
            return op(*args, **kwargs)

        with self.model.backend.observed(around):
            answer = self.model.forward_scored(batch)
        assert {"run_mixer", "linear", "normed"} <= seen
        return answer


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PASSES)
def test_equals_its_ops_one_by_one(
    family: str, dtype: torch.dtype, name: str, threads: int, tiny_checkpoint: Callable[..., Path]
) -> None:
    """Catches a part that is given another address, order or state than the single ops are, and rows that two threads
    write: logits, hidden states, states, snapshots or keys and values differ in a bit."""
    fresh_seed()
    loaded = Loaded(tiny_checkpoint(family, **WIDE[family]), dtype)
    batch = loaded.batch(*PASSES[name])
    begin = {role: part.clone() for role, part in loaded.states.items()}
    expected = loaded.op_by_op(batch)
    after = {role: part.clone() for role, part in loaded.states.items()}
    for role, part in loaded.states.items():
        part.copy_(begin[role])
    answer = loaded.model.forward_scored(batch)
    assert all(same_bits(one, other) for one, other in zip(answer, expected, strict=True))
    assert all(same_bits(part, after[role]) for role, part in loaded.states.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_instruction_set(family: str, isa: str, tiny_checkpoint: Callable[..., Path]) -> None:
    """Catches kernels of another instruction set than the one in use."""
    fresh_seed()
    loaded = Loaded(tiny_checkpoint(family), torch.bfloat16)
    batch = loaded.batch([0, 0], [9, 4])
    assert same_bits(loaded.op_by_op(batch)[0], loaded.model.forward(batch))


@pytest.mark.parametrize("family", FAMILIES)
def test_threads_change_no_bit(family: str, tiny_checkpoint: Callable[..., Path]) -> None:
    """Catches sums whose order follows the cut of the work."""
    fresh_seed()
    loaded = Loaded(tiny_checkpoint(family, **WIDE[family]))
    batch = loaded.batch([0] * 5, [1, 40, 1, 90, 7])
    before, answers = torch.get_num_threads(), []
    for threads in (1, 2, 3, 7, 16):
        torch.set_num_threads(threads)
        answers.append(loaded.model.forward(batch).clone())
    torch.set_num_threads(before)
    assert all(same_bits(answer, answers[0]) for answer in answers)


def test_layers_are_told_and_may_fail(threads: int, tiny_checkpoint: Callable[..., Path]) -> None:
    """Catches a watcher that is not told of each layer, and an error of it that ends the process, is lost, or leaves
    threads waiting."""
    loaded = Loaded(tiny_checkpoint("jamba"))
    batch = loaded.batch([0], [130])
    expected, told = loaded.model.forward(batch).clone(), []
    loaded.model.on_layer = lambda: told.append(None)
    assert same_bits(loaded.model.forward(batch), expected)
    assert len(told) == loaded.num_layers

    def fail() -> None:
        raise RuntimeError("enough")

    loaded.model.on_layer = fail
    for _ in range(3):
        with pytest.raises(RuntimeError, match="enough"):
            loaded.model.forward(batch)
    loaded.model.on_layer = None
    assert same_bits(loaded.model.forward(batch), expected)


@pytest.mark.parametrize("refused", range(1, 12))
def test_memory_runs_out(refused: int, threads: int, tiny_checkpoint: Callable[..., Path]) -> None:
    """Catches threads that wait for one which has no memory, and a pass that is silently not whole."""
    loaded = Loaded(tiny_checkpoint("jamba", **WIDE["jamba"]))
    batch = loaded.batch([0, 0], [70, 60])
    expected = loaded.model.forward(batch).clone()
    _C.refuse_scratch(refused)
    try:
        assert same_bits(loaded.model.forward(batch), expected), "a thread without memory leaves its work to others"
    except MemoryError:
        pass
    finally:
        _C.refuse_scratch(0)
    assert same_bits(loaded.model.forward(batch), expected)


def test_refuses_what_does_not_fit(tiny_checkpoint: Callable[..., Path]) -> None:
    """Catches numbers that the kernels would follow out of the model's tensors."""
    loaded = Loaded(tiny_checkpoint("jamba"))

    def forward(**changes: torch.Tensor) -> None:
        batch = loaded.batch([3], [4])
        loaded.model.forward(Batch(**{**vars(batch), **changes}))

    forward()
    for changes, sentence in (
        ({"token_ids": torch.tensor([0, 1, 2, VOCAB])}, "tokens must lie in"),
        ({"token_ids": torch.tensor([0, 1, 2])}, "tokens must be int64 of shape"),
        ({"logits_rows": torch.tensor([4])}, "logits_rows must lie in"),
        ({"token_slots": torch.tensor([-1, 0, 1, 2])}, "token_slots must lie in"),
        ({"page_table": torch.full((1, 4), 24)}, "page_table must name pages"),
        ({"context": torch.tensor([400])}, "page_table must have a column"),
        ({"ragged": ragged([4], [0], [16])}, "must have slot 16"),
    ):
        with pytest.raises(ValueError, match=sentence):
            forward(**changes)


def test_a_call_for_all_mixers_stands_for_the_layers(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a device's call for all mixers that is not made, mixers that run twice or not at all, and a call that
    hides layers from whoever observes the ops or is told of each layer."""
    fresh_seed()
    loaded, asked, moved = Loaded(tiny_checkpoint("mamba")), [], []
    model = loaded.model
    mixers = [layer.mixer.part for layer in model.layers]

    def at_once(residual: Residual, batch: Ragged) -> bool:
        asked.append(batch.num_tokens)
        for mixer in mixers if batch.num_tokens < 10 else []:
            mixer(residual, batch)
        return batch.num_tokens < 10

    for lengths in ([4, 1], [20, 3]):
        batch, before = loaded.batch([0, 7], lengths), {name: part.clone() for name, part in loaded.states.items()}
        expected = model.forward(batch).clone(), {name: part.clone() for name, part in loaded.states.items()}
        for on_layer in (None, lambda: moved.append(None)):
            for name, part in loaded.states.items():
                part.copy_(before[name])
            with monkeypatch.context() as patch:
                for name, value in (("_stack", None), ("_mixers", at_once), ("on_layer", on_layer)):
                    patch.setattr(model, name, value)
                assert same_bits(model.forward(batch), expected[0])
                assert all(same_bits(part, expected[1][name]) for name, part in loaded.states.items())
                loaded.op_by_op(batch)
    assert asked == [5, 23] and len(moved) == 4 * loaded.num_layers


def test_refuses_numbers_that_have_changed(tiny_checkpoint: Callable[..., Path]) -> None:
    """Catches numbers that are looked at in the first of several passes of the same tensors alone, and a pass that
    computes with those of the one before."""
    loaded = Loaded(tiny_checkpoint("jamba"))
    batch = loaded.batch([0], [4])
    expected = loaded.model.forward(batch).clone()
    for name, place, sentence in (
        ("token_ids", (2,), "tokens must lie in"),
        ("logits_rows", (0,), "logits_rows must lie in"),
        ("scored_rows", (1,), "hidden_rows must lie in"),
        ("token_slots", (3,), "token_slots must lie in"),
        ("page_table", (0, 0), "page_table must name pages"),
        ("context", (0,), "page_table must have a column|context must not be negative"),
    ):
        numbers = getattr(batch, name)
        sound = numbers[place].item()
        for wrong in (-1, 1 << 40):
            numbers[place] = wrong
            with pytest.raises(ValueError, match=sentence):
                loaded.model.forward(batch)
        numbers[place] = sound
    batch.token_ids[:] = (batch.token_ids + 1) % VOCAB
    other = loaded.model.forward(batch).clone()
    assert not torch.equal(other, expected)
    assert same_bits(loaded.op_by_op(batch)[0], other)


@pytest.mark.parametrize("family", FAMILIES)
def test_chooses_what_the_logits_say(family: str, threads: int, tiny_checkpoint: Callable[..., Path]) -> None:
    """Catches a token, or a log-probability, that is another one than the op gives, and a row that is not finite."""
    fresh_seed()
    loaded = Loaded(tiny_checkpoint(family))
    batch = loaded.batch([0] * 5, [1, 40, 1, 90, 7])
    for with_logprobs in (True, False, True):
        passed = loaded.model.passed(Batch(**{**vars(batch), "with_logprobs": with_logprobs}))
        tokens, logprobs = loaded.model.backend.greedy(passed.logits)
        assert passed.likeliest == tokens.tolist()
        assert passed.logprobs == (logprobs.tolist() if with_logprobs else None)
    loaded.model.final_norm.weight[0] = torch.inf
    passed = loaded.model.passed(Batch(**{**vars(batch), "with_logprobs": True}))
    assert passed.likeliest == [-1] * 5 and passed.logprobs is not None and all(map(math.isnan, passed.logprobs))
