"""Jamba's attention mixer: grouped queries over a paged KV cache, without position embeddings.

Must not know: requests, who owns a page. Lieber et al., "Jamba", arXiv 2403.19887, section 3.
"""

from __future__ import annotations

import torch

from apcbatch.kernels.layer import AttentionWeights, PreNorm, Residual
from apcbatch.model.batch import Batch
from apcbatch.model.hf_config import ModelConfig
from apcbatch.model.tensor_source import TensorSource


class AttentionMixer:
    """Norms the residual (t, h) and leaves (t, h) to be added to it; the KV of the batch's tokens is written before it
    is read. norm: the layer's, which it begins with. part: the mixer as a stack has it; no single operation is all of
    it."""

    def __init__(
        self,
        config: ModelConfig,
        source: TensorSource,
        norm: PreNorm,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> None:
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
        self.k_cache, self.v_cache = k_cache, v_cache  # (pages, page_tokens, kv heads, head_dim)
        self.scale = self.head_dim**-0.5
        weights = AttentionWeights(self.qkv_proj, self.o_proj, self.heads, self.scale)
        self.part = source.backend.attention(norm, weights, k_cache, v_cache)

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
        residual.leave(
            ops.linear(y.view(t, -1), self.o_proj, out_dtype=torch.float32)  # (t, heads * head_dim) -> (t, h)
        )
