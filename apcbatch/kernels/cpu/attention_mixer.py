"""Attention mixer of one layer inside the CPU's stack.

Invariant: the bits equal those of the ops run one by one in this order: normed, linear (qkv_proj), norm_rope of queries
and of keys (only with norms or rotary position embeddings), write_kv, paged_attention, sigmoid_mul (only with gates),
linear (o_proj).
"""

from __future__ import annotations

from typing import Any

import torch

from apcbatch import _C
from apcbatch.kernels.arguments import address, cache_views, require_parameter
from apcbatch.kernels.cpu.linear import PackedLinear
from apcbatch.kernels.cpu.sub_block import StackSubBlock, norm_plan
from apcbatch.kernels.layer import AttentionWeights, PreNorm, QueryKeyNorms


class FusedAttention(StackSubBlock):
    """Attention mixer of one layer over its KV pages, for a stack. Outside a stack, attention runs op by op.

    norm: the pre-norm, (h,). k_cache, v_cache: (pages, PAGE_TOKENS, kv_heads, head_dim) contiguous, of one dtype.
    Raises ValueError if a shape or a dtype does not fit.
    """

    def __init__(
        self, norm: PreNorm, weights: AttentionWeights[PackedLinear], k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> None:
        keys, values = cache_views(k_cache, v_cache)
        self.num_pages, _, kv_heads, head_dim = k_cache.shape
        qkv, o = weights.qkv_proj, weights.o_proj
        h, d = qkv.in_features, weights.heads * head_dim
        self.hidden = h
        rows = d + 2 * kv_heads * head_dim + (d if weights.is_gated else 0)
        expected = ((rows, h), (h, d), qkv.dtype)
        found = ((qkv.out_features, qkv.in_features), (o.out_features, o.in_features), o.dtype)
        if expected != found or weights.heads % kv_heads:
            raise ValueError(
                f"qkv_proj, o_proj and their dtype must be {expected} for {weights.heads} heads of {head_dim} columns"
                f"{' with gates' if weights.is_gated else ''}, and the heads a multiple of the cache's {kv_heads} kv "
                f"heads; they are {found}"
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
            **_norms(weights.norms, head_dim),
            is_gated=weights.is_gated,
            k_cache=keys,
            v_cache=values,
        )


def _norms(norms: QueryKeyNorms | None, head_dim: int) -> dict[str, Any]:
    """Return the kernel's arguments for the norms of queries and keys and their rotary embedding: addresses, and the
    number of steps. All are 0 for None. Raises ValueError if a shape or a dtype does not fit."""
    if norms is None:
        return dict(q_norm=0, k_norm=0, norm_eps=0.0, steps=0, pairs=0)
    pairs = norms.steps.numel()
    if (norms.q is None) != (norms.k is None):
        raise ValueError("the norms of queries and of keys must both be given, or neither")
    for weight, which in ((norms.q, "queries"), (norms.k, "keys")):
        if weight is not None:
            require_parameter(weight, f"the norm of {which}", (head_dim,), torch.float32)
    require_parameter(norms.steps, "steps", (pairs,), torch.int64)
    if 2 * pairs > head_dim:
        raise ValueError(f"steps must be at most half of the {head_dim} columns of a head; they are {pairs}")
    addresses = dict(q_norm=address(norms.q), k_norm=address(norms.k), steps=norms.steps.data_ptr())
    return addresses | dict(norm_eps=norms.eps, pairs=pairs)
