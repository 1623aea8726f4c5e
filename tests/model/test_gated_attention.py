"""The gated attention mixer: against transformers, in one call and op by op, and beside the plain one, whose bits
stay."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from apcbatch.kernels.cpu.backend import CpuBackend
from apcbatch.kernels.layer import AttentionWeights, PreNorm, QueryKeyNorms, rotary_steps
from apcbatch.kernels.processor import set_isa
from apcbatch.layout import PAGE_TOKENS
from apcbatch.model.attention import Attention
from apcbatch.model.batch import Batch
from apcbatch.model.rotary import Rotary
from apcbatch.model.sub_blocks import SubBlock
from tests.effort import tries
from tests.kernels.recurrent import ragged, same_bits
from tests.model.passes import PASSES, Loaded, arranged
from tests.tiny import VOCAB

pytestmark = pytest.mark.pairwise

THETA = 1e7
SIZES = {  # hidden, heads, kv heads, head_dim, rotary_dim
    "wide": (40, 4, 2, 24, 6),
    "narrow": (64, 6, 1, 8, 8),
    "large": (96, 2, 1, 256, 64),
    "odd": (37, 3, 3, 13, 4),
}
JAMBA = (40, 4, 2, 10, 0)
# SHA-256 of the logits and the KV cache of a pass of plain attention, before there was gated attention.
PLAIN_DIGEST = "090b1ee8ece5004a6a9101dc09f0c638b2d06d3c971b508a66ff9429d90289cf"


FORMS: dict[str, dict[str, Any]] = {  # fields of the Attention; all but the plain one have rotary positions
    "plain": {},
    "rotary": {},
    "gated": {"norms": ("q_norm", "k_norm"), "norm_offset": 1.0, "is_gated": True},
}


class NamedTensors:
    """A checkpoint with every tensor that it is asked for. taken: these by name."""

    def __init__(self) -> None:
        self.taken: dict[str, torch.Tensor] = {}
        self._numbers = np.random.default_rng(7)

    def __contains__(self, name: str) -> bool:
        return False

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        whole = self._numbers.integers(-1000, 1001, shape)
        self.taken[name] = torch.from_numpy(whole).float() / 1024 * 1.7 * shape[-1] ** -0.5
        return self.taken[name]


Load = Callable[..., Loaded]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """load(sizes or their name, dtype, form, backend): a model of one layer of attention, its `kind`."""

    def make(
        sizes: str | tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        form: str = "gated",
        backend: CpuBackend | None = None,
    ) -> Loaded:
        hidden, heads, kv_heads, head_dim, rotary_dim = SIZES[sizes] if isinstance(sizes, str) else sizes
        rotary = None if form == "plain" else Rotary(rotary_dim, THETA)
        kind = Attention(heads, kv_heads, head_dim, rotary, **FORMS[form])
        layers = [(SubBlock("norm", "self_attn", kind),)]
        loaded = arranged(monkeypatch, layers, hidden, dtype, NamedTensors(), backend)
        loaded.kind = kind
        return loaded

    return make


def mixed(loaded: Loaded, x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The output of the model's mixer op by op for a residual x, whose norm has the checkpoint's weight."""
    residual = loaded.model.backend.residual(x.clone())
    loaded.model.layers[0][0].block(residual, batch)
    return residual.delta


def piece(before: int, length: int) -> Batch:
    """A chunk of one sequence, whose pages are 5, 2, 7, 3 and 11."""
    pages, positions = torch.tensor([[5, 2, 7, 3, 11]]), torch.arange(before, before + length)
    return Batch(
        token_ids=torch.zeros(length, dtype=torch.int64),
        ragged=ragged([length], [-1], [-1]),
        logits_rows=torch.tensor([length - 1]),
        page_table=pages,
        context=torch.tensor([before]),
        token_slots=pages[0, positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS,
    )


def peer(loaded: Loaded) -> Callable[[torch.Tensor], torch.Tensor]:
    """transformers' mixer with the weights of the model: x (t, h), whole prompts -> (t, h)."""
    qwen = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

    own, kind = loaded.config, loaded.kind
    config = Qwen3_5TextConfig(
        vocab_size=VOCAB, hidden_size=own.hidden_size, num_hidden_layers=1, num_attention_heads=kind.heads,
        num_key_value_heads=kind.kv_heads, head_dim=kind.head_dim, rms_norm_eps=own.norm_eps,
        rope_parameters={
            "rope_type": "default", "rope_theta": THETA, "mrope_section": [kind.rotary.dim // 2, 0, 0],
            "partial_rotary_factor": (kind.rotary.dim + 0.5) / kind.head_dim,
        },
    )  # fmt: skip
    config._attn_implementation = "eager"
    mixer, rotary = qwen.Qwen3_5Attention(config, 0), qwen.Qwen3_5TextRotaryEmbedding(config)
    mixer.load_state_dict(
        {name.partition("self_attn.")[2]: w for name, w in loaded.taken.items() if "self_attn" in name}
    )

    @torch.no_grad()
    def run(x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(len(x))[None]
        mask = torch.full((len(x), len(x)), -torch.inf).triu(1)[None, None]
        return mixer(x[None], rotary(x, positions), mask)[0][0]

    return run


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("length", [1, 2, 64, 65, 300])
def test_matches_transformers_at_every_cut(sizes: str, length: int, load: Load) -> None:
    """Catches queries and gates that are not split by head, norms of w in place of 1 + w, a rotation of other columns
    or the other way round, positions that begin with the chunk, keys that are cached before they are rotated, and a
    scale of another size than head_dim."""
    loaded = load(sizes)
    x = torch.randn(length, loaded.config.hidden_size)
    normed = loaded.model.backend.normed(
        loaded.model.backend.residual(x.clone()), loaded.model.layers[0][0].block.norm, x.dtype
    )
    expected = peer(loaded)(normed)
    whole = mixed(loaded, x, piece(0, length))
    assert float((whole - expected).abs().max() / expected.abs().max()) < 1e-5
    for _ in range(tries(3)):
        cuts = sorted({0, length, *(random.randint(0, length) for _ in range(4))})
        parts = [mixed(loaded, x[a:b], piece(a, b - a)) for a, b in zip(cuts, cuts[1:], strict=False)]
        assert same_bits(torch.cat(parts), whole)
    for at in (0, length // 2, length - 1):  # with the keys before it in the cache, as a step of decoding
        assert same_bits(mixed(loaded, x[at : at + 1], piece(at, 1)), whole[at : at + 1])


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PASSES)
def test_one_call_has_the_bits_of_the_ops(
    sizes: str, form: str, dtype: torch.dtype, name: str, threads: int, isa: str, load: Load
) -> None:
    """Catches a fused form that takes hidden for heads * head_dim, rounds at another place than the ops, or norms and
    gates other columns."""
    loaded = load(sizes, dtype, form)
    assert loaded.model.runs_whole
    loaded.assert_one_call_is_its_ops(loaded.batch(*PASSES[name]))


def test_instruction_sets_and_company_give_the_same_bits(every_isa: list[str], threads: int, load: Load) -> None:
    """Catches bits of a sequence that depend on the others in its pass, or in float32 on the processor."""
    loaded = load("large")
    batch = loaded.batch(*PASSES["prompts and decodes"])
    begin = {role: part.clone() for role, part in loaded.states.items()}
    results = []
    for isa in every_isa:
        set_isa(isa)
        loaded.restore(begin)
        results.append(
            (loaded.model.forward(batch).clone(), {role: part.clone() for role, part in loaded.states.items()})
        )
    assert all(same_bits(logits, results[0][0]) for logits, _ in results)
    assert all(same_bits(part, results[0][1][role]) for _, states in results for role, part in states.items())
    loaded.restore(begin)
    one = loaded.batch([70], [60])
    alone = replace(one, token_ids=batch.token_ids[71:131], page_table=batch.page_table[2:3])
    alone = replace(alone, token_slots=batch.token_slots[71:131])
    assert same_bits(loaded.model.forward(alone), results[0][0][2:3])


def test_sizes(load: Load) -> None:
    """Catches sizes that take hidden for heads * head_dim."""
    assert load("large").kind.sizes(96) == {"k_proj.weight": (256, 96)}


def test_a_mixer_that_does_not_fit_is_refused() -> None:
    """Catches addresses of norms or steps of another size than a head's."""
    backend, cache = CpuBackend(), torch.zeros(2, 64, 2, 8)
    packed = [backend.pack_linear(torch.zeros(shape)) for shape in ((112, 20), (80, 20), (20, 40), (96, 20), (20, 32))]
    norm, ones = PreNorm(torch.ones(20), 1e-6), torch.ones(8)
    norms = QueryKeyNorms(ones, ones, 1e-6, rotary_steps(4, THETA))
    good = AttentionWeights(packed[3], packed[4], 4, 1.0, norms, True)
    assert backend.sub_block("attention", norm, good, cache, cache).hidden == 20
    for wrong, sentence in (
        (replace(good, is_gated=False), "must be"),
        (replace(good, qkv_proj=packed[0]), "of 8 columns with gates"),
        (replace(good, o_proj=packed[2]), "must be"),
        (replace(good, norms=replace(norms, q=torch.ones(9))), "the norm of queries must be"),
        (replace(good, norms=replace(norms, k=ones.bfloat16())), "the norm of keys must be"),
        (replace(good, norms=replace(norms, k=None)), "must both be given, or neither"),
        (replace(good, norms=replace(norms, steps=norms.steps.int())), "steps must be"),
        (replace(good, norms=replace(norms, steps=rotary_steps(10, THETA))), "at most half of the 8 columns"),
    ):
        with pytest.raises(ValueError, match=sentence):
            backend.sub_block("attention", norm, wrong, cache, cache)


def test_bits_of_plain_attention(every_isa: list[str], load: Load) -> None:
    """Catches any change of the arithmetic of Jamba's attention, whose snapshots would no longer be those of its
    name."""
    loaded = load(JAMBA, form="plain")
    for isa in every_isa:
        set_isa(isa)
        numbers = np.random.default_rng(8)
        for part in loaded.states.values():
            part.copy_(torch.from_numpy(numbers.integers(-1000, 1001, part.shape)) / 512)
        batch = loaded.batch([0, 64, 70, 0, 1], [70, 1, 60, 3, 129])
        batch = replace(batch, token_ids=torch.arange(len(batch.token_ids)) * 7 % VOCAB)
        digest = hashlib.sha256(loaded.model.forward(batch).numpy().tobytes())
        for part in loaded.states.values():
            digest.update(part.numpy().tobytes())
        assert digest.hexdigest() == PLAIN_DIGEST, isa
