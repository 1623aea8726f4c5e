"""Attention mixers: grouped queries over a paged KV cache, plain (Jamba), rotary (Bamba, Falcon-H1, LFM2) or gated
(Qwen3.5).

Plain: Lieber et al., "Jamba", arXiv 2403.19887, section 3, without position embeddings. Rotary: with rotary position
embedding of the first columns of a head (Su et al., arXiv 2104.09864), in some models after RMS norms of queries and
keys. Gated: rotary with norms and an output gate (Qiu et al., "Gated Attention for Large Language Models", arXiv
2505.06708). torch is imported only when a mixer is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

from apcbatch.layout import KV, StatePart
from apcbatch.model.hf_config import ModelConfig
from apcbatch.model.sub_blocks import SubBlockKind

if TYPE_CHECKING:
    import torch

    from apcbatch.kernels.layer import PreNorm, QueryKeyNorms, Residual
    from apcbatch.model.batch import Batch
    from apcbatch.model.sub_blocks import StateTensors
    from apcbatch.model.tensor_source import TensorSource


@dataclass(frozen=True)
class AttentionForm:
    """Optional parts of an attention mixer. is_rotary: queries and keys get rotary position embeddings; the config must
    be a RotaryConfig. norms: names of the weights of RMS norms, which queries and keys get before the embeddings; None:
    no norms. norm_offset: number added to these weights. is_gated: the mixer has an output gate; in q_proj, each head's
    gate rows follow its query rows. output: name of the last projection."""

    is_rotary: bool = False
    norms: tuple[str, str] | None = None
    norm_offset: float = 0.0
    is_gated: bool = False
    output: str = "o_proj"


class RotaryConfig(Protocol):
    """Fields of a ModelConfig with rotary position embedding. rotary_dim: number of columns of a head that are rotated,
    counted from the first."""

    @property
    def rotary_dim(self) -> int: ...
    @property
    def rope_theta(self) -> float: ...


class AttentionMixer:
    """Attention mixer of one layer. A call norms the residual (t, h), writes the batch's KV, attends, and stores the
    output (t, h) as the residual's delta; it runs op by op. part: its fused form inside a stack; None if the backend
    has none."""

    def __init__(
        self,
        kind: str,
        form: AttentionForm,
        config: ModelConfig,
        source: TensorSource,
        norm: PreNorm,
        state: StateTensors,
    ) -> None:
        from apcbatch.kernels.layer import AttentionWeights

        self._backend, self.norm, self.dtype = source.backend, norm, source.dtype
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.qkv_proj = source.pack_parts(**_qkv(form, config, source))
        self.o_proj = source.packed_output(form.output, config.hidden_size, self.heads * self.head_dim)
        self.k_cache, self.v_cache = state[KV.name]  # (pages, page_tokens, kv heads, head_dim)
        scale = config.multipliers.attention
        self.scale = self.head_dim**-0.5 if scale is None else scale
        self.norms = _norms(form, config, source, self.k_cache.device) if form.is_rotary else None
        self.is_gated = form.is_gated
        weights = AttentionWeights(self.qkv_proj, self.o_proj, self.heads, self.scale, self.norms, self.is_gated)
        self.part = source.backend.sub_block(kind, norm, weights, self.k_cache, self.v_cache)

    def __call__(self, residual: Residual, batch: Batch) -> None:
        ops = self._backend
        normed = ops.normed(residual, self.norm, self.dtype)
        t = normed.shape[0]
        heads, kv_heads = self.heads, self.kv_heads
        qkv = ops.linear(normed, self.qkv_proj)  # (t, (heads + 2 kv_heads) head_dim); gated: heads head_dim more
        rows = qkv.view(t, -1, self.head_dim)
        q, k, v = rows[:, :heads], rows[:, heads : heads + kv_heads], rows[:, heads + kv_heads : heads + 2 * kv_heads]
        if (norms := self.norms) is not None:
            positions = batch.positions
            q = ops.norm_rope(q, norms.q, norms.eps, norms.steps, positions)
            k = ops.norm_rope(k, norms.k, norms.eps, norms.steps, positions)
        ops.write_kv(k, v, self.k_cache, self.v_cache, batch.token_slots)
        y = ops.paged_attention(
            q,
            self.k_cache,
            self.v_cache,
            batch.page_table,
            batch.cu_seqlens,
            batch.context,
            self.scale,
        ).view(t, -1)  # (t, heads, head_dim) -> (t, heads * head_dim)
        if self.is_gated:
            y = ops.sigmoid_mul(y, qkv[:, (heads + 2 * kv_heads) * self.head_dim :])
        left = ops.linear(y, self.o_proj, out_dtype=residual.sum.dtype)  # (t, heads * head_dim) -> (t, h)
        residual.leave(left)


def _qkv(form: AttentionForm, config: ModelConfig, source: TensorSource) -> dict[str, torch.Tensor]:
    """Return the weights (rows, h) of all queries, keys and values, in this order, and then those of the gates if the
    form is gated."""
    h, heads, head_dim = config.hidden_size, config.num_attention_heads, config.head_dim
    kv = config.num_key_value_heads * head_dim
    gates = {}
    if form.is_gated:
        both = source.take("q_proj.weight", (2 * heads * head_dim, h)).view(heads, 2, head_dim, h)
        q_weight, gate_weight = both[:, 0].reshape(-1, h), both[:, 1].reshape(-1, h)  # (heads * head_dim, h) each
        gates = {"gates": gate_weight}
    else:
        q_weight = source.take("q_proj.weight", (heads * head_dim, h))
    k_weight, v_weight = source.take("k_proj.weight", (kv, h)), source.take("v_proj.weight", (kv, h))
    return {"q": q_weight, "k": k_weight, "v": v_weight, **gates}


def _norms(form: AttentionForm, config: ModelConfig, source: TensorSource, device: torch.device) -> QueryKeyNorms:
    from apcbatch.kernels.layer import QueryKeyNorms, rotary_steps

    rotary, q, k = cast(RotaryConfig, config), None, None
    if form.norms is not None:
        q, k = (form.norm_offset + source.vector(f"{name}.weight", config.head_dim) for name in form.norms)
    return QueryKeyNorms(q, k, config.norm_eps, rotary_steps(rotary.rotary_dim, rotary.rope_theta).to(device))


def _state(config: ModelConfig, layer: int, dtype: str) -> tuple[StatePart, ...]:
    return (KV.part(layer, (2, None, config.num_key_value_heads, config.head_dim), dtype),)


def _sizes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {"k_proj.weight": (config.num_key_value_heads * config.head_dim, config.hidden_size)}


def attention(name: str, form: AttentionForm) -> SubBlockKind:
    """Return the SubBlockKind of attention mixers of one form. name: the backends' name for it."""
    return SubBlockKind(name, partial(AttentionMixer, name, form), _state, _sizes)


ATTENTION = attention("attention", AttentionForm())
ROTARY_ATTENTION = attention("rotary_attention", AttentionForm(is_rotary=True))
GATED_ATTENTION = attention(
    "gated_attention", AttentionForm(is_rotary=True, norms=("q_norm", "k_norm"), norm_offset=1.0, is_gated=True)
)
