"""LFM2 against `transformers`, its short convolution alone, and what of its config.json is read or refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from apcbatch.errors import ModelError
from apcbatch.kernels.cpu.backend import CpuBackend
from apcbatch.kernels.layer import PreNorm, ShortConvWeights
from apcbatch.kernels.processor import set_isa
from apcbatch.model.families import load_model_config, state_layout
from tests.effort import tries
from tests.kernels.recurrent import DTYPES, ragged, same_bits
from tests.model.folders import REMOVED, with_config
from tests.model.parity import LENGTHS, assert_equals_oracle, oracle_of
from tests.tiny import save_tiny

Checkpoints = Callable[..., Path]
CASES: dict[str, dict[str, Any]] = {
    "odd sizes": {},
    "wide kernel, untied": {"conv_L_cache": 5, "tie_word_embeddings": False, "norm_eps": 1e-3},
    "two taps, all heads": {
        "conv_L_cache": 2, "num_key_value_heads": 6, "block_auto_adjust_ff_dim": False, "num_hidden_layers": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "no attention": {"layer_types": ["conv"] * 3, "num_hidden_layers": 3, "block_ffn_dim_multiplier": 1.7},
}  # fmt: skip


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """(a checkpoint, the model that transformers makes of it in float64)"""
    folder = tmp_path_factory.mktemp("lfm2")
    save_tiny(folder, "lfm2", 1, CASES[request.param])
    return folder, oracle_of(folder)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("length", LENGTHS)
def test_logits_equal_transformers(length: int, case: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches any departure from the architecture."""
    assert_equals_oracle(*case, length, 1e-5, monkeypatch)


class Mixer:
    """A short convolution of random weights, its states and its definition."""

    def __init__(self, h: int, width: int, dtype: torch.dtype, slots: int = 4) -> None:
        self.ops, self.h, self.dtype = CpuBackend(), h, dtype
        self.in_proj, self.out_proj = ((torch.randn(n * h, h) * h**-0.5).to(dtype) for n in (3, 1))
        self.taps, self.norm = torch.randn(h, width), PreNorm(1 + 0.2 * torch.randn(h), 1e-5)
        pack = self.ops.pack_linear
        weights = ShortConvWeights(pack(self.in_proj), pack(self.out_proj), self.taps)
        self.conv = torch.full((slots, width - 1, h), float("nan"), dtype=dtype)
        self.part = self.ops.sub_block("short_conv", self.norm, weights, self.conv)

    def run(self, x: torch.Tensor, batch: Any) -> torch.Tensor:
        residual = self.ops.residual(x.clone())
        self.part(residual, batch)
        return residual.delta

    def expected(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(the output, all inputs of the convolution) for one sequence, each rounded where the mixer rounds it, by
        sums in float64."""
        normed = self.ops.rms_norm(x, self.norm.weight, self.norm.eps, self.dtype)
        b, c, v = self.ops.linear(normed, self.ops.pack_linear(self.in_proj)).double().chunk(3, 1)
        raw = (b * v).to(self.dtype)
        width = self.taps.shape[1]
        padded = torch.cat([torch.zeros(width - 1, self.h), raw]).double()
        sums = sum(padded[k : k + len(x)] * self.taps[:, k].double() for k in range(width))
        y = (c * sums.to(self.dtype)).to(self.dtype)
        return self.ops.linear(y, self.ops.pack_linear(self.out_proj), out_dtype=torch.float32), raw


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("h", "width"), [(5, 3), (16, 3), (37, 2), (130, 4), (33, 8)])
def test_the_mixer_is_its_definition_however_it_is_cut(dtype: torch.dtype, h: int, width: int, threads: int) -> None:
    """Catches B, C and x in another order, a SiLU that is not there, a tap of another token, a snapshot that is not the
    inputs before it, and a cut of the prompt that changes a bit."""
    for _ in range(tries(20)):
        mixer, length = Mixer(h, width, dtype), random.choice([1, 2, 3, 64, 65, random.randint(1, 300)])
        x, kept = torch.randn(length, h), random.randint(1, length)
        whole = mixer.run(x, ragged([length], [-1], [0], [[(kept, 2)]]))
        expected, raw = mixer.expected(x)
        assert (whole - expected).abs().max() <= (1e-5 if dtype == torch.float32 else 0.05) * expected.abs().max()
        tail = torch.cat([torch.zeros(width - 1, h, dtype=dtype), raw[:kept]])[kept:]
        assert same_bits(mixer.conv[2], tail)
        ends = sorted({*(random.randint(1, length) for _ in range(random.choice([0, 1, 5, 300]))), length})
        pieces = [
            mixer.run(x[begin:end], ragged([end - begin], [1 if begin else -1], [1]))
            for begin, end in zip([0, *ends], ends, strict=False)
        ]
        assert same_bits(torch.cat(pieces), whole) and same_bits(mixer.conv[1], mixer.conv[0]), ends


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_instruction_sets_give_the_same_bits_and_sequences_do_not_meet(
    dtype: torch.dtype, every_isa: list[str]
) -> None:
    """Catches a vector width, or a neighbour in the batch, that changes a bit."""
    mixer, x = Mixer(37, 3, torch.float32), torch.randn(70, 37)
    if dtype != torch.float32:
        mixer = Mixer(37, 3, dtype)
    batch, answers = ragged([40, 1, 29], [-1, -1, -1], [0, 1, 2]), []
    for isa in every_isa:
        set_isa(isa)
        answers.append(mixer.run(x, batch))
        alone = mixer.run(x[41:], ragged([29], [-1], [3]))
        assert same_bits(answers[-1][41:], alone) and same_bits(mixer.conv[2], mixer.conv[3]), isa
    if dtype == torch.float32:
        assert all(same_bits(one, answers[0]) for one in answers)


def test_what_does_not_fit_is_refused() -> None:
    """Catches addresses handed to the kernels for tensors of another shape or dtype."""
    ops, norm = CpuBackend(), PreNorm(torch.ones(8), 1e-5)
    pack, conv = ops.pack_linear, torch.zeros(2, 2, 8)
    good = {"in_proj": torch.randn(24, 8), "out_proj": torch.randn(8, 8), "conv_weight": torch.randn(8, 3)}
    for name, wrong, sentence in [
        ("in_proj", torch.randn(23, 8), r"in_proj must be \(24, 8\)"),
        ("out_proj", torch.randn(8, 7), "out_proj must be"),
        ("out_proj", torch.randn(8, 8).bfloat16(), "out_proj must be .* torch.float32"),
        ("conv_weight", torch.randn(8, 9), "a mixer has 1 to 8 taps; this one 9"),
        ("conv_weight", torch.randn(7, 3), "conv_weight must be"), ("conv_weight", torch.randn(8, 4), "."),
    ]:  # fmt: skip
        tensors = {**good, name: wrong}
        weights = ShortConvWeights(pack(tensors["in_proj"]), pack(tensors["out_proj"]), tensors["conv_weight"])
        with pytest.raises(ValueError, match=sentence):
            ops.sub_block("short_conv", norm, weights, conv)


def test_the_state_is_the_last_inputs_alone(tiny_checkpoint: Checkpoints) -> None:
    """Catches a state that holds more than the tail of each convolution."""
    layout = state_layout(load_model_config(tiny_checkpoint("lfm2")), "bfloat16")
    assert layout.slot_bytes == 3 * 2 * 36 * 2 and layout.token_bytes == 2 * 2 * 6 * 2
    assert {name: tensor.shape for name, tensor in layout.stored().items()} == {
        "conv": (3, 2, 36), "kv": (1, 2, None, 2, 6),
    }  # fmt: skip


OLD = {"layer_types": REMOVED, "full_attn_idxs": [1], "rope_parameters": REMOVED, "rope_theta": 1e4,
       "block_ff_dim": 60, "intermediate_size": 7, "tie_embedding": True, "tie_word_embeddings": False,
       "conv_dim": 36, "conv_dim_out": 36, "block_use_swiglu": True, "use_pos_enc": True}  # fmt: skip


@pytest.mark.parametrize("changes", [OLD, {"architectures": REMOVED}, {"head_dim": 6}])
def test_what_means_the_same_is_the_same_model(
    changes: dict[str, object], tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Catches a key of a released file that is not read."""
    folder = tiny_checkpoint("lfm2")
    assert load_model_config(with_config(folder, tmp_path / "m", **changes)) == load_model_config(folder)


@pytest.mark.parametrize("sizes", [
    {}, {"block_auto_adjust_ff_dim": False}, {"block_ffn_dim_multiplier": 1.3},
    {"block_multiple_of": 1}, {"intermediate_size": 8}, {"intermediate_size": 12288, "block_multiple_of": 256},
])  # fmt: skip
def test_the_inner_columns_are_those_of_transformers(
    sizes: dict[str, object], tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Catches two thirds, a factor or a multiple that is rounded otherwise."""
    from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

    folder = with_config(tiny_checkpoint("lfm2"), tmp_path / "m", **sizes)
    expected = Lfm2MLP(AutoConfig.from_pretrained(folder)).w1.out_features
    assert load_model_config(folder).intermediate_size == expected


@pytest.mark.parametrize("changes, sentence", [
    ({"conv_bias": True}, "conv_bias is True; expected false, the only one supported"),
    ({"conv_L_cache": 1}, "conv_L_cache is 1; expected an integer from 2"),
    ({"conv_dim": 40}, "conv_dim is 40; expected 36, the only one supported"),
    ({"conv_dim_out": 40}, "conv_dim_out is 40; expected 36, the only one supported"),
    ({"block_use_swiglu": False}, "block_use_swiglu is False; expected true"),
    ({"use_pos_enc": False}, "use_pos_enc is False; expected true"),
    ({"layer_types": ["full_attention"] * 4}, "all of 4 layers are attention, .*; expected a conv layer"),
    ({"layer_types": ["sliding_attention"] * 4}, r"layer_types\[0\] is 'sliding_attention'; expected conv or full_att"),
    ({"layer_types": None}, "full_attn_idxs is None; expected a list of numbers of the 4 layers"),
    ({"layer_types": None, "full_attn_idxs": [4]}, r"full_attn_idxs is \[4\]; expected a list of numbers of the 4"),
    ({"layer_types": None, "full_attn_idxs": [True]}, r"full_attn_idxs is \[True\]; expected a list of numbers"),
    ({"num_key_value_heads": 4}, "num_attention_heads is 6; expected a multiple of num_key_value_heads, 4"),
    ({"num_attention_heads": 8}, "hidden_size is 36; expected a multiple of num_attention_heads, 8"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type is 'yarn'; expected \"default\""),
    ({"partial_rotary_factor": 0.34}, "partial_rotary_factor is 0.33.*; expected 1, the only one supported"),
    ({"block_ffn_dim_multiplier": 0}, "block_ffn_dim_multiplier is 0.0; expected a factor that takes 40 to 1 or more"),
    ({"block_ffn_dim_multiplier": 1e300}, "block_ffn_dim_multiplier is 1e.300; expected a number from"),
    ({"block_multiple_of": 0}, "block_multiple_of is 0; expected an integer from 1"),
    ({"intermediate_size": 1}, "block_ffn_dim_multiplier is 1.0; expected a factor that takes 0 to 1 or more columns"),
    ({"tie_embedding": 1}, "tie_embedding is 1; expected true or false"),
])  # fmt: skip
def test_what_is_not_implemented_is_refused_by_name(
    changes: dict[str, object], sentence: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Catches a switch or a size that is passed over in silence."""
    with pytest.raises(ModelError, match=f"config.json: .*{sentence}"):
        load_model_config(with_config(tiny_checkpoint("lfm2"), tmp_path / "m", **changes))


def test_a_file_that_says_nothing_is_the_family_itself(tmp_path: Path) -> None:
    """Fault: a default, of a key that checkpoints seldom leave out, is not the one of transformers."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "lfm2", "full_attn_idxs": [2, 5]}))
    config: Any = load_model_config(tmp_path)
    oracle = AutoConfig.for_model("lfm2", full_attn_idxs=[2, 5])
    same = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "tie_word_embeddings")
    assert {name: getattr(config, name) for name in same} == {name: getattr(oracle, name) for name in same}
    assert (config.norm_eps, config.context_length) == (oracle.norm_eps, oracle.max_position_embeddings)
    assert (config.d_conv, config.rope_theta) == (oracle.conv_L_cache, oracle.rope_parameters["rope_theta"])
    kinds = {"short_conv": "conv", "attention": "full_attention"}
    assert [kinds[kind] for kind in config.mixers] == oracle.layer_types
    assert config.intermediate_size == 8192 and config.rotary_dim == config.head_dim == 80
