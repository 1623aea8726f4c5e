"""A whole pass in one call: the bits of its ops one by one, with any threads, and errors of that call alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from apcbatch import _C
from apcbatch.kernels.layer import Residual
from apcbatch.kernels.processor import set_isa
from apcbatch.model.batch import Batch
from tests.effort import table
from tests.kernels.recurrent import ragged, same_bits
from tests.model.passes import PASSES, Loaded
from tests.tiny import VOCAB

pytestmark = pytest.mark.pairwise

# Large enough that the threads of a pool share the work of one row.
WIDE = {
    "mamba": {"hidden_size": 192, "time_step_rank": 12},
    "falcon_mamba": {"hidden_size": 192, "time_step_rank": 12},
    "jamba": {"hidden_size": 160, "intermediate_size": 416},
    "mamba2": {"hidden_size": 192, "num_heads": 6, "head_dim": 64},
    "falcon_h1": {"hidden_size": 160, "intermediate_size": 416, "head_dim": 24, "mamba_d_ssm": 192},
    "bamba": {"hidden_size": 160, "intermediate_size": 416, "mamba_n_heads": 4},
    "nemotron_h": {"hidden_size": 160, "intermediate_size": 416, "moe_latent_size": 96, "moe_intermediate_size": 200},
    "qwen3_5": {"hidden_size": 160, "intermediate_size": 416, "head_dim": 24, "linear_value_head_dim": 40},
    "lfm2": {"hidden_size": 192, "intermediate_size": 420},
    "lfm2_moe": {"hidden_size": 192, "intermediate_size": 420, "moe_intermediate_size": 130},
    "qwen3_5_moe": {"hidden_size": 160, "moe_intermediate_size": 130, "shared_expert_intermediate_size": 416},
}
FAMILIES = tuple(WIDE)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PASSES)
def test_equals_its_ops_one_by_one(
    family: str, dtype: torch.dtype, name: str, threads: int, tiny_checkpoint: Callable[..., Path]
) -> None:
    """Catches a part that is given another address, order or state than the single ops are, and rows that two threads
    write: logits, hidden states, states, snapshots or keys and values differ in a bit."""
    loaded = Loaded(tiny_checkpoint(family, **WIDE[family]), dtype)
    loaded.assert_one_call_is_its_ops(loaded.batch(*PASSES[name]))


@pytest.mark.slow
@table("family", FAMILIES)
def test_every_instruction_set(family: str, every_isa: list[str], tiny_checkpoint: Callable[..., Path]) -> None:
    """Catches kernels of another instruction set than the one in use."""
    for isa in every_isa:
        set_isa(isa)
        loaded = Loaded(tiny_checkpoint(family), torch.bfloat16)
        batch = loaded.batch([0, 0], [9, 4])
        assert same_bits(loaded.op_by_op(batch)[0], loaded.model.forward(batch)), isa


@pytest.mark.slow
@table("family", FAMILIES)
def test_threads_change_no_bit(family: str, tiny_checkpoint: Callable[..., Path]) -> None:
    """Catches sums whose order follows the cut of the work."""
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


@pytest.mark.drawn(1)
@pytest.mark.slow
@table("refused", range(1, 12))
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
    """Catches a device's call for all mixers that is not made, mixers that run twice, and a call that hides layers from
    an observer of the ops or of each layer."""
    loaded, asked, moved = Loaded(tiny_checkpoint("mamba")), [], []
    model = loaded.model
    mixers = [entry.block.part for layer in model.layers for entry in layer]

    def at_once(residual: Residual, batch: Batch) -> None:
        asked.append(batch.ragged.num_tokens)
        for mixer in mixers:
            mixer(residual, batch.ragged)

    for lengths in ([4, 1], [20, 3]):
        batch, before = loaded.batch([0, 7], lengths), {name: part.clone() for name, part in loaded.states.items()}
        expected = model.forward(batch).clone(), {name: part.clone() for name, part in loaded.states.items()}
        for on_layer in (None, lambda: moved.append(None)):
            for name, part in loaded.states.items():
                part.copy_(before[name])
            with monkeypatch.context() as patch:
                for name, value in (("_stack", None), ("_layer_stack", at_once), ("on_layer", on_layer)):
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


@pytest.mark.drawn(1)
@table("family", FAMILIES)
def test_chooses_what_the_logits_say(family: str, threads: int, tiny_checkpoint: Callable[..., Path]) -> None:
    """Catches a token, or a log-probability, that is another one than the op gives, and a row that is not finite."""
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
