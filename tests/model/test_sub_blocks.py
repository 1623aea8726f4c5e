"""Layers as lists of sub-blocks: arrangements that no family has yet, of the kinds that are there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from apcbatch.kernels.backend import NOT_FUSED, KindOnDevice
from apcbatch.kernels.cpu.backend import CpuBackend
from apcbatch.kernels.layer import Residual
from apcbatch.model.attention import Attention
from apcbatch.model.causal_lm import CausalLM
from apcbatch.model.delta_net import DeltaNet
from apcbatch.model.feed_forward import Mixture, Mlp
from apcbatch.model.mamba import Mamba
from apcbatch.model.short_conv import ShortConv
from apcbatch.model.sub_blocks import SubBlock
from tests.kernels.recurrent import ragged, same_bits
from tests.model.passes import PASSES, Loaded, arranged

pytestmark = pytest.mark.pairwise

MAMBA = Mamba(
    d_inner=80, d_state=8, d_conv=4, dt_rank=3, conv_bias=True, proj_bias=False, mixer_norm="weighted",
    mixer_norm_eps=1e-6,
)  # fmt: skip
DELTA_NET = DeltaNet(key_heads=2, value_heads=4, key_dim=8, value_dim=24, d_conv=4, is_grouped=False)
ATTENTION, MLP, SHORT_CONV = Attention(4, 2, 10), Mlp(44), ShortConv(40, 4)
MIXTURE = Mixture(experts=4, per_token=2, expert=MLP, router="router")
KINDS = {"M": MAMBA, "D": DELTA_NET, "*": ATTENTION, "-": MLP, "E": MIXTURE, "C": SHORT_CONV}
ONE = {name: (SubBlock("norm", "mixer", kind),) for name, kind in KINDS.items()}
BOTH = (SubBlock("input_layernorm", "mamba", MAMBA), SubBlock("input_layernorm", "self_attn", ATTENTION))
MIXED = (SubBlock("norm_2", "block_sparse_moe", MIXTURE), SubBlock("norm_2", "shared_mlp", MLP))
# The sub-blocks of each layer: one each, attention beside Mamba under one norm, a shared MLP beside experts.
ARRANGEMENTS = {
    "nemotron_h": [ONE[name] for name in "M-*EM"],
    "falcon_h1": [(*BOTH, SubBlock("pre_ff_layernorm", "feed_forward", MLP))] * 2,
    "granite": [
        (SubBlock("norm_1", "mamba", MAMBA), *MIXED),
        (SubBlock("norm_1", "self_attn", ATTENTION), *reversed(MIXED)),
    ],
    "qwen3_5": [
        (SubBlock("norm_1", "linear_attn", DELTA_NET), SubBlock("norm_2", "mlp", MLP)),
        (SubBlock("norm_1", "self_attn", ATTENTION), SubBlock("norm_2", "mlp", MLP)),
    ],
    "qwen3_5_moe": [
        (
            SubBlock("norm_1", "linear_attn", DELTA_NET),
            SubBlock("norm_2", "mlp", replace(MIXTURE, router="gate", is_normalised=True)),
            SubBlock("norm_2", "mlp", Mlp(28, token_gate="shared_expert_gate")),
        )
    ],
    "lfm2": [ONE["C"], ONE["*"], ONE["C"], ONE["-"]],
    "three_beside": [(*BOTH, SubBlock("input_layernorm", "feed_forward", MLP))],
}


class RandomTensors:
    """A checkpoint that has every tensor that it is asked for. taken: their names."""

    def __init__(self) -> None:
        self.taken: list[str] = []

    def __contains__(self, name: str) -> bool:
        return False

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        self.taken.append(name)
        return torch.randn(shape) * shape[-1] ** -0.5 + (1 if "norm" in name else 0)


Load = Callable[..., Loaded]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """load(the sub-blocks of each layer, dtype, backend): a model of a family that has them so."""

    def make(
        layers: list[tuple[SubBlock, ...]], dtype: torch.dtype = torch.float32, backend: CpuBackend | None = None
    ) -> Loaded:
        return arranged(monkeypatch, layers, 40, dtype, RandomTensors(), backend)

    return make


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PASSES)
def test_one_call_has_the_bits_of_the_ops(
    arrangement: str, dtype: torch.dtype, name: str, threads: int, load: Load
) -> None:
    """Catches a stack that takes a layer for one mixer and a feed-forward part, norms a sub-block that is beside
    another after that one's result, or loses one of the two."""
    loaded = load(ARRANGEMENTS[arrangement], dtype)
    assert loaded.model.runs_whole
    loaded.assert_one_call_is_its_ops(loaded.batch(*PASSES[name]))


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_ops_are_the_definition(arrangement: str, load: Load) -> None:
    """Catches an order, a norm or a sum that is wrong in one call and op by op alike."""
    loaded = load(ARRANGEMENTS[arrangement])
    batch = loaded.batch([0, 64, 3], [70, 1, 9])
    begin = {role: part.clone() for role, part in loaded.states.items()}
    x = loaded.model._embed(batch.tokens)
    for layer, entries in zip(ARRANGEMENTS[arrangement], loaded.model.layers, strict=True):
        for _, group in groupby(zip(layer, entries, strict=True), key=lambda pair: pair[0].norm):
            left = []  # x + f(norm(x)), and for sub-blocks under one norm x + f + g
            for _, entry in group:
                own = loaded.model.backend.residual(x.clone())
                entry.block(own, batch)
                left.append(own.delta)
            x = x + sum(left[1:], left[0])
    loaded.restore(begin)
    expected = loaded.model.head(loaded.model._normed(Residual(x, x), batch.logits_rows))
    assert same_bits(loaded.op_by_op(batch)[0], expected)


class Unknown(Attention):
    """Attention as a kind that no backend knows."""

    name = "unknown"


@pytest.mark.parametrize("kind", [Attention, Unknown])
def test_a_kind_without_a_fused_form_runs_by_its_ops(kind: type[Attention], load: Load) -> None:
    """Catches a mixer with `part` None, which its docstring allows, that ends the loading of a model, and a pass that
    is called one call then."""
    layers = [(SubBlock("norm", "mamba", MAMBA),), (SubBlock("norm", "self_attn", kind(4, 2, 10)),)]
    backend = CpuBackend()
    backend.kinds = {**backend.kinds, "attention": NOT_FUSED}
    torch.manual_seed(1)
    loaded = load(layers, backend=backend)
    assert not loaded.model.runs_whole and not backend.runs_whole
    torch.manual_seed(1)
    fused = load([layers[0], (SubBlock("norm", "self_attn", ATTENTION),)])
    assert fused.model.runs_whole and fused.model.backend.runs_whole
    fused.restore(loaded.states)
    batch = loaded.batch(*PASSES["prompts and decodes"])
    assert same_bits(loaded.model.forward(batch), fused.model.forward(batch))


@pytest.mark.parametrize("arrangement", ["falcon_h1", "qwen3_5", "lfm2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_replay_has_the_bits_of_a_pass(arrangement: str, dtype: torch.dtype, threads: int, load: Load) -> None:
    """Catches an input of a recurrence that is not kept for drafted tokens, kept after it was overwritten, or replayed
    from another row, and a tail of inputs that is not shifted: accepted tokens would leave another state."""
    loaded = load(ARRANGEMENTS[arrangement], dtype)
    begin = {role: part.clone() for role, part in loaded.states.items()}
    for accepted in ([1, 3], [5, 2]):
        # Chunks of 6 and 9 tokens, the last 5 of which are drafted: the states before these are in slots 2 and 3.
        batch = loaded.batch([3, 70], [6, 9])
        drafted = torch.tensor([*range(1, 6), *range(10, 15)])
        chunks = ragged([6, 9], [0, 1], [-1, -1], [[(1, 2)], [(4, 3)]])
        loaded.model.passed(replace(batch, ragged=chunks, kept_rows=drafted))
        loaded.model.replay([(2, 0, accepted[0]), (3, 5, accepted[1])])
        replayed = {role: part[2:4].clone() for role, part in loaded.arena.slots.items()}
        loaded.restore(begin)
        kept = [[(1 + accepted[0], 2)], [(4 + accepted[1], 3)]]
        loaded.model.forward(replace(batch, ragged=ragged([6, 9], [0, 1], [-1, -1], kept)))
        assert all(same_bits(part[2:4], replayed[role]) for role, part in loaded.arena.slots.items())
        loaded.restore(begin)


def test_names_are_the_sub_blocks(load: Load) -> None:
    """Catches a norm that two sub-blocks share and that is read twice, and a tensor under a fixed name."""
    taken = load(ARRANGEMENTS["granite"]).taken
    assert [name for name in taken if name.startswith("layers") and ".norm_" in name] == [
        f"layers.{layer}.norm_{i}.weight" for layer in (0, 1) for i in (1, 2)
    ]
    own = {name.split(".")[2] for name in taken if name.startswith("layers")} - {"norm_1", "norm_2"}
    assert own == {"mamba", "self_attn", "block_sparse_moe", "shared_mlp"}


def test_the_name_of_the_arithmetic_is_per_kind() -> None:
    """Catches a change of one kind's arithmetic that forgets the snapshots of models without it, or keeps those of
    models with it, and a kind without a version of its own that changes the name of before."""
    backend = CpuBackend()
    before = backend.numerics(torch.float32)
    assert backend.numerics(torch.float32, ["mamba", "attention", "mixture", "new"]) == before == "f32-fma-1"
    backend.kinds = {**backend.kinds, "delta": KindOnDevice(None, 2), "attention": KindOnDevice(None, 3)}
    assert backend.numerics(torch.float32, ["mamba", "mlp"]) == before
    assert backend.numerics(torch.float32, ["mamba", "delta", "attention"]) == "f32-fma-1-attention3-delta2"


def test_one_part_that_waits_keeps_a_pass_out_of_graphs() -> None:
    """Fault: a graph is captured of a pass in which the host waits for the device."""
    parts = [SimpleNamespace(can_capture=can) for can in (True, False)]
    layers = [[SimpleNamespace(block=SimpleNamespace(part=part))] for part in (*parts, None)]
    model: Any = SimpleNamespace(layers=layers)
    assert not CausalLM.can_capture.fget(model)  # type: ignore[attr-defined]
    model.layers = [layers[0], layers[2]]
    assert CausalLM.can_capture.fget(model)  # type: ignore[attr-defined]
