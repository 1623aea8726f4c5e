"""Attention mixer of one layer inside the CPU's stack.

Invariant: the bits equal those of the ops that define it, run in this order: normed, linear, write_kv, paged_attention,
linear.
"""

from __future__ import annotations

import torch

from apcbatch import _C
from apcbatch.kernels.arguments import cache_views
from apcbatch.kernels.cpu.linear import PackedLinear
from apcbatch.kernels.cpu.sub_block import StackSubBlock, norm_plan
from apcbatch.kernels.layer import AttentionWeights, PreNorm


class FusedAttention(StackSubBlock):
    """Attention mixer of one layer over its KV pages, for a stack. Outside a stack, attention runs op by op.

    norm: (h). k_cache, v_cache: (pages, PAGE_TOKENS, kv_heads, head_dim) contiguous. Raises ValueError where a shape or
    a dtype does not fit.
    """

    def __init__(
        self, norm: PreNorm, weights: AttentionWeights[PackedLinear], k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> None:
        keys, values = cache_views(k_cache, v_cache)
        self.num_pages, _, kv_heads, head_dim = k_cache.shape
        qkv, o = weights.qkv_proj, weights.o_proj
        h = self.hidden = weights.heads * head_dim
        expected = ((h + 2 * kv_heads * head_dim, h), (h, h), qkv.dtype)
        found = ((qkv.out_features, qkv.in_features), (o.out_features, o.in_features), o.dtype)
        if expected != found or weights.heads % kv_heads:
            raise ValueError(
                f"qkv_proj, o_proj and their dtype must be {expected} for {weights.heads} heads of {head_dim} columns, "
                f"and the heads a multiple of the cache's {kv_heads} kv heads; they are {found}"
            )
        self._kept_alive = norm, weights, k_cache, v_cache  # the plan holds their addresses
        self.plan = _C.AttentionMixer(
            norm=norm_plan(norm, h),
            qkv_proj=qkv.plan,
            o_proj=o.plan,
            heads=weights.heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            scale=weights.scale,
            k_cache=keys,
            v_cache=values,
        )
