"""Jamba's attention mixer: grouped queries over a paged KV cache, without position embeddings.

Lieber et al., "Jamba", arXiv 2403.19887, section 3. torch is imported only when a mixer is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from apcbatch.layout import KV, StatePart
from apcbatch.model.hf_config import ModelConfig
from apcbatch.model.sub_blocks import SubBlockKind

if TYPE_CHECKING:
    from apcbatch.kernels.layer import PreNorm, Residual
    from apcbatch.model.batch import Batch
    from apcbatch.model.sub_blocks import StateTensors
    from apcbatch.model.tensor_source import TensorSource


class AttentionMixer:
    """Attention mixer of one layer. A call norms the residual (t, h), writes the batch's KV, attends, and leaves the
    output (t, h) to be added; it runs op by op. part: its fused form inside a stack, None if the backend has none."""

    def __init__(self, config: ModelConfig, source: TensorSource, norm: PreNorm, state: StateTensors) -> None:
        import torch

        from apcbatch.kernels.layer import AttentionWeights

        h = config.hidden_size
        self._backend, self.norm, self.dtype = source.backend, norm, source.dtype
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        kv = self.kv_heads * self.head_dim
        q_weight = source.take("q_proj.weight", (h, h))
        k_weight = source.take("k_proj.weight", (kv, h))
        v_weight = source.take("v_proj.weight", (kv, h))
        self.qkv_proj = source.pack(torch.cat([q_weight, k_weight, v_weight]))
        self.o_proj = source.packed("o_proj", h, h)
        self.k_cache, self.v_cache = state[KV.name]  # (pages, page_tokens, kv heads, head_dim)
        self.scale = self.head_dim**-0.5
        weights = AttentionWeights(self.qkv_proj, self.o_proj, self.heads, self.scale)
        self.part = source.backend.sub_block(ATTENTION.name, norm, weights, self.k_cache, self.v_cache)

    def __call__(self, residual: Residual, batch: Batch) -> None:
        ops = self._backend
        normed = ops.normed(residual, self.norm, self.dtype)
        t = normed.shape[0]
        heads, kv_heads = self.heads, self.kv_heads
        qkv = ops.linear(normed, self.qkv_proj).view(t, -1, self.head_dim)  # (t, heads + 2 kv heads, head_dim)
        q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        ops.write_kv(k, v, self.k_cache, self.v_cache, batch.token_slots)
        y = ops.paged_attention(
            q,
            self.k_cache,
            self.v_cache,
            batch.page_table,
            batch.cu_seqlens,
            batch.context,
            self.scale,
        )
        left = ops.linear(y.view(t, -1), self.o_proj, out_dtype=residual.sum.dtype)  # (t, heads * head_dim) -> (t, h)
        residual.leave(left)


def _products(config: ModelConfig) -> dict[str, tuple[int, int]]:
    h, kv = config.hidden_size, config.num_key_value_heads * config.head_dim
    return {"qkv_proj": (h, h + 2 * kv), "o_proj": (h, h)}


def _state(config: ModelConfig, layer: int, dtype: str) -> tuple[StatePart, ...]:
    return (KV.part(layer, (2, None, config.num_key_value_heads, config.head_dim), dtype),)


def _sizes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {"k_proj.weight": (config.num_key_value_heads * config.head_dim, config.hidden_size)}


ATTENTION = SubBlockKind("attention", AttentionMixer, _products, _state, _sizes)
