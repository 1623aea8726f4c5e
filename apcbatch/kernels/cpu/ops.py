"""Ops on the CPU: how apcbatch.kernels.ops launches them, and what only this device checks."""

from __future__ import annotations

from typing import Any

import torch

from apcbatch import _C
from apcbatch.kernels.arguments import (
    PAGE_TOKENS,
    float_vector,
    require_cpu,
    require_indices,
    require_matrix,
    require_parameter,
    view,
)
from apcbatch.kernels.cpu.linear import PackedLinear, projection
from apcbatch.kernels.layer import Residual
from apcbatch.kernels.ops import AnyBatch, Ops
from apcbatch.kernels.processor import num_threads
from apcbatch.kernels.ragged import Ragged

MAX_CONV_WIDTH = 8
MAX_D_STATE = 256
_MOST = {"taps": MAX_CONV_WIDTH, "states": MAX_D_STATE, "choices": 1 << 62}


class CpuOps(Ops[PackedLinear]):
    """See apcbatch.kernels.ops."""

    def residual(self, begin: torch.Tensor, present: torch.Tensor | None = None) -> Residual:
        """See Ops. present must be None: no row is padding on the CPU."""
        if present is not None:
            raise ValueError("present must be None on the CPU, where no row is padding")
        require_matrix(begin, "the residual")
        require_parameter(begin, "the residual", tuple(begin.shape), torch.float32)
        return Residual(begin, torch.empty_like(begin))

    @property
    def _compiled(self) -> Any:
        return _C

    def _launch(self, name: str, _: torch.Tensor, *arguments: Any) -> None:
        getattr(_C, name)(*arguments, num_threads())

    def _launch_over(self, name: str, batch: AnyBatch, **arguments: Any) -> None:
        getattr(_C, name)(ragged=batch.params, num_threads=num_threads(), **arguments)

    def _most(self, what: str) -> int:
        return _MOST[what]

    def _require_here(self, tensor: torch.Tensor, name: str) -> None:
        require_cpu(tensor, name)

    def _batch(self, _: torch.Tensor, ragged: Ragged) -> Ragged:
        return ragged

    def _token_slots(self, token_slots: torch.Tensor, k: torch.Tensor, k_cache: torch.Tensor) -> torch.Tensor:
        return require_indices(token_slots, "token_slots", (k.shape[0],), k_cache.shape[0] * PAGE_TOKENS)

    def _sequences(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        page_table: torch.Tensor,
        cu_seqlens: torch.Tensor,
        context: torch.Tensor,
    ) -> tuple[tuple[Any, ...], tuple[torch.Tensor | None, ...]]:
        lists = require_sequences(q.shape[0], k_cache.shape[0], page_table, cu_seqlens, context)
        return (_addresses(*lists),), lists

    def _product(
        self, x: torch.Tensor, packed: PackedLinear, out_dtype: torch.dtype, bias: torch.Tensor | None
    ) -> torch.Tensor:
        plan, t = packed.plan, x.shape[0]
        if bias is not None:
            bias = float_vector(bias, "bias", packed.out_features, x, "y")
            plan = projection(packed, bias)
        y = torch.empty(t, packed.out_features, dtype=out_dtype)
        _C.linear(t, view(x, "x"), plan, view(y, "out_dtype"), num_threads())
        return y


ops = CpuOps()  # used inside fused sub-blocks, so that an observer of a model's backend sees one call


def require_sequences(
    t: int, pages: int, page_table: torch.Tensor, cu_seqlens: torch.Tensor, context: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return page_table, cu_seqlens and context, made contiguous. Raises ValueError unless `paged_attention` can take
    them. t: number of tokens. pages: number of pages in the cache."""
    b = context.numel()
    columns = page_table.shape[-1] if page_table.dim() else 0
    for name, tensor, shape in (
        ("cu_seqlens", cu_seqlens, (b + 1,)),
        ("context", context, (b,)),
        ("page_table", page_table, (b, columns)),
    ):
        if tensor.dtype != torch.int64 or tensor.shape != shape or not tensor.is_cpu:
            raise ValueError(
                f"{name} must be int64 of shape {shape} on the CPU; it is {tensor.dtype} of shape "
                f"{tuple(tensor.shape)} on {tensor.device}"
            )
    page_table, cu_seqlens, context = page_table.contiguous(), cu_seqlens.contiguous(), context.contiguous()
    fault = _C.check_sequences(_addresses(page_table, cu_seqlens, context), t, pages)
    if fault:
        raise ValueError(_fault_sentence(fault, t, pages, page_table, cu_seqlens, context))
    return page_table, cu_seqlens, context


def _addresses(page_table: torch.Tensor, cu_seqlens: torch.Tensor, context: torch.Tensor) -> _C.Sequences:
    b, columns = page_table.shape
    return b, page_table.data_ptr(), columns, cu_seqlens.data_ptr(), context.data_ptr()


def _fault_sentence(
    fault: int, t: int, pages: int, page_table: torch.Tensor, cu_seqlens: torch.Tensor, context: torch.Tensor
) -> str:
    """Return the error message of a SequenceFault (csrc/attention.h): an invalid offset, context, width or page."""
    return (
        "",
        f"cu_seqlens must ascend from 0 to the {t} tokens of q; it is {cu_seqlens.tolist()}",
        f"context must not be negative; it is {context.tolist()}",
        f"page_table must have a column for each page of the longest sequence; it has {page_table.shape[1]} for "
        f"context {context.tolist()} and cu_seqlens {cu_seqlens.tolist()}",
        f"page_table must name pages in [0, {pages}) up to each sequence's end; it is {page_table.tolist()}",
    )[fault]
