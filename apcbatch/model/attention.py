"""Attention mixers: grouped queries over a paged KV cache, plain (Jamba), rotary (Bamba, Falcon-H1, LFM2) or gated
(Qwen3.5).

Plain: Lieber et al., "Jamba", arXiv 2403.19887, section 3, without position embeddings. Rotary: with rotary position
embedding of the first columns of a head (Su et al., arXiv 2104.09864), in some models after RMS norms of queries and
keys. Gated: rotary with norms and an output gate (Qiu et al., "Gated Attention for Large Language Models", arXiv
2505.06708). torch is imported only when a mixer is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from apcbatch.layout import KV, StatePart
from apcbatch.model.rotary import Rotary
from apcbatch.model.sub_blocks import SubBlockKind

if TYPE_CHECKING:
    import torch

    from apcbatch.kernels.layer import PreNorm, QueryKeyNorms, Residual
    from apcbatch.model.batch import Batch
    from apcbatch.model.sub_blocks import StateTensors
    from apcbatch.model.tensor_source import TensorSource


@dataclass(frozen=True)
class Attention(SubBlockKind):
    """heads of the queries, kv_heads of keys and values, of head_dim columns each. scale: factor of the scores q k^T;
    None for head_dim^-0.5. rotary: rotary position embedding of queries and keys; None: none. norms: names of the
    weights of RMS norms, which queries and keys get before the embedding; None: no norms. norm_offset: number added to
    these weights. is_gated: whether there is an output gate; in q_proj, each head's gate rows follow its query rows.
    output: name of the last projection."""

    name = "attention"
    heads: int
    kv_heads: int
    head_dim: int
    rotary: Rotary | None = None
    scale: float | None = None
    norms: tuple[str, str] | None = None
    norm_offset: float = 0.0
    is_gated: bool = False
    output: str = "o_proj"

    def load(self, source: TensorSource, norm: PreNorm, state: StateTensors) -> AttentionMixer:
        return AttentionMixer(self, source, norm, state)

    def state(self, layer: int, dtype: str) -> tuple[StatePart, ...]:
        return (KV.part(layer, (2, None, self.kv_heads, self.head_dim), dtype),)

    def sizes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        return {"k_proj.weight": (self.kv_heads * self.head_dim, hidden)}

    @property
    def fields(self) -> dict[str, Any]:
        return {
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            **({} if self.rotary is None else {"rotary_dim": self.rotary.dim, "rope_theta": self.rotary.theta}),
        }


class AttentionMixer:
    """Attention mixer of one layer. A call norms the residual (t, h), writes the batch's KV, attends, and stores the
    output (t, h) as the residual's delta; it runs op by op. part: its fused form inside a stack; None if the backend
    has none."""

    def __init__(self, kind: Attention, source: TensorSource, norm: PreNorm, state: StateTensors) -> None:
        from apcbatch.kernels.layer import AttentionWeights

        self._backend, self.norm, self.dtype, h = source.backend, norm, source.dtype, len(norm.weight)
        self.heads, self.kv_heads, self.head_dim = kind.heads, kind.kv_heads, kind.head_dim
        self.qkv_proj = source.pack_parts(**_qkv(kind, source, h))
        self.o_proj = source.packed_output(kind.output, h, self.heads * self.head_dim)
        self.k_cache, self.v_cache = state[KV.name]  # (pages, page_tokens, kv heads, head_dim)
        self.scale = self.head_dim**-0.5 if kind.scale is None else kind.scale
        self.norms = _norms(kind, kind.rotary, source, norm) if kind.rotary is not None else None
        self.is_gated = kind.is_gated
        weights = AttentionWeights(self.qkv_proj, self.o_proj, self.heads, self.scale, self.norms, self.is_gated)
        self.part = source.backend.sub_block(kind.name, norm, weights, self.k_cache, self.v_cache)

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


def _qkv(kind: Attention, source: TensorSource, h: int) -> dict[str, torch.Tensor]:
    """Return the weights (rows, h) of all queries, keys and values, in this order, and then those of the gates if the
    mixer is gated."""
    heads, head_dim, kv = kind.heads, kind.head_dim, kind.kv_heads * kind.head_dim
    gates = {}
    if kind.is_gated:
        both = source.take("q_proj.weight", (2 * heads * head_dim, h)).view(heads, 2, head_dim, h)
        q_weight, gate_weight = both[:, 0].reshape(-1, h), both[:, 1].reshape(-1, h)  # (heads * head_dim, h) each
        gates = {"gates": gate_weight}
    else:
        q_weight = source.take("q_proj.weight", (heads * head_dim, h))
    k_weight, v_weight = source.take("k_proj.weight", (kv, h)), source.take("v_proj.weight", (kv, h))
    return {"q": q_weight, "k": k_weight, "v": v_weight, **gates}


def _norms(kind: Attention, rotary: Rotary, source: TensorSource, norm: PreNorm) -> QueryKeyNorms:
    from apcbatch.kernels.layer import QueryKeyNorms, rotary_steps

    q, k = None, None
    if kind.norms is not None:
        q, k = (kind.norm_offset + source.vector(f"{name}.weight", kind.head_dim) for name in kind.norms)
    return QueryKeyNorms(q, k, norm.eps, rotary_steps(rotary.dim, rotary.theta).to(norm.weight.device))
