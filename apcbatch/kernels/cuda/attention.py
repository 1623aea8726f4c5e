"""List the launches of attention mixers for a Program. Without one, apcbatch.model.attention runs their ops."""

from __future__ import annotations

import torch

from apcbatch.kernels.arguments import address
from apcbatch.kernels.cuda.extension import extension
from apcbatch.kernels.cuda.linear import DeviceLinear
from apcbatch.kernels.cuda.program import Program, Rows, is_parameter, require
from apcbatch.kernels.layer import AttentionWeights, PreNorm


class DeviceAttention:
    """Attention mixer, plain, rotary or gated. k_cache, v_cache: (pages, PAGE_TOKENS, kv_heads, head_dim)."""

    can_capture = True

    def __init__(
        self,
        norm: PreNorm,
        weights: AttentionWeights[DeviceLinear],
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> None:
        self._norm, self._weights, self._k_cache, self._v_cache = norm, weights, k_cache, v_cache

    def list_launches(self, program: Program) -> None:
        w, launches, dtype = self._weights, program.launches, self._weights.qkv_proj.dtype
        kv_heads, head_dim = self._k_cache.shape[2:]
        queries, keys = w.heads * head_dim, kv_heads * head_dim
        caches = self._k_cache, self._v_cache
        require(all(cache.dtype == dtype and cache.is_contiguous() for cache in caches))
        require(head_dim <= extension().MOST_HEAD_DIM)
        program.attends()
        qkv = program.product(program.normed(self._norm, dtype), w.qkv_proj)
        q, k, v = qkv, qkv.columns(queries), qkv.columns(queries + keys)
        if w.norms is not None:
            q = self._rotated(program, q, w.heads, w.norms.q)
            k = self._rotated(program, k, kv_heads, w.norms.k)
        y = program.rows(queries, dtype)
        addresses = [cache.data_ptr() for cache in caches]
        launches.attend(w.heads, kv_heads, head_dim, w.scale, *addresses, q.given, k.given, v.given, y.given)
        if w.is_gated:
            gated, gates = program.rows(queries, dtype), qkv.columns(queries + 2 * keys)
            launches.sigmoid(queries, y.given, gates.given, gated.given)
            y = gated
        program.leave(y, w.o_proj)

    def _rotated(self, program: Program, x: Rows, heads: int, weight: torch.Tensor | None) -> Rows:
        """Add the norm and rotary position embedding of x, (t, heads * head_dim). Returns the result."""
        norms, head_dim = self._weights.norms, self._k_cache.shape[3]
        assert norms is not None
        require(is_parameter(weight, (head_dim,), program.device) and norms.steps.device == program.device)
        y, pairs = program.rows(heads * head_dim, x.dtype), norms.steps.numel()
        angles = norms.steps.data_ptr(), pairs
        program.launches.rope(heads, head_dim, address(weight), norms.eps, *angles, x.given, y.given)
        return y
