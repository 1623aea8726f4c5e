"""Ops on a CUDA device: how apcbatch.kernels.ops launches them, and what only this device checks.

An op runs on the current stream and returns before the device has finished. The bits differ from the CPU kernels'.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from apcbatch.kernels.arguments import PAGE_TOKENS, address, require_one_dtype
from apcbatch.kernels.cuda.batch import DeviceBatch, batch_on
from apcbatch.kernels.cuda.extension import current_stream, extension
from apcbatch.kernels.cuda.linear import DeviceLinear, product
from apcbatch.kernels.cuda.residual import NOTHING_PENDING, DeviceResidual, Pending
from apcbatch.kernels.layer import PreNorm, Residual, SigmoidRouting
from apcbatch.kernels.ops import Ops
from apcbatch.kernels.ragged import Ragged

_LIMITS = {"taps": "MOST_TAPS", "states": "MOST_STATES", "choices": "MOST_CHOICES"}


class CudaOps(Ops[DeviceLinear]):
    """See apcbatch.kernels.ops. A batch may be a Ragged or a DeviceBatch."""

    lanes = 0  # threads per channel in a scan: 1, 2, 4 or 8; 0: the kernel chooses. The bits are the same for all
    own = 0  # columns of a state that a thread of head_scan owns: 1, 2 or 4; 0: the kernel chooses, as with lanes

    def residual(self, begin: torch.Tensor, present: torch.Tensor | None = None) -> DeviceResidual:
        return DeviceResidual(begin, begin, present)

    def normed(self, residual: Residual, norm: PreNorm, dtype: torch.dtype) -> torch.Tensor:
        """See Ops. Sub-blocks in parallel share one result, so nothing may overwrite it."""
        assert isinstance(residual, DeviceResidual)
        last = residual.normed
        if not residual.has_delta and last is not None and last[0] is norm and last[1].dtype == dtype:
            return last[1]
        delta, pending = residual.pending()
        y = self._norm(residual.sum, delta, norm.weight, norm.eps, dtype, pending)
        residual.normed = norm, y
        return y

    def leave(
        self, residual: Residual, x: torch.Tensor, packed: DeviceLinear, gate: torch.Tensor | None = None
    ) -> None:
        """Multiply x (t, in) by the weights (h, in) of a sub-block's last product, and leave the result, gated by gate
        (t, 1) float32, as the pending delta."""
        assert isinstance(residual, DeviceResidual)
        residual.leave(self.linear(x, packed.unscaled, out_dtype=torch.float32), packed.scale, gate)

    def _norm(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        weight: torch.Tensor | None,
        eps: float,
        out_dtype: torch.dtype,
        pending: Pending = NOTHING_PENDING,
    ) -> torch.Tensor:
        """Return the RMS norm of x, (t, h) out_dtype, after adding what is pending to x in place: see
        DeviceResidual."""
        arguments, y, _alive = self._norm_arguments(x, delta, weight, eps, out_dtype)
        self._launch("rms_norm", x, *arguments, pending)
        return y

    def rms_norms(
        self,
        xs: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor | None],
        eps: float,
        out_dtype: torch.dtype,
    ) -> list[torch.Tensor]:
        """Compute `rms_norm` of each x with its weight, in one launch if the kernel supports it."""
        norms = [self._norm_arguments(x, None, weight, eps, out_dtype) for x, weight in zip(xs, weights, strict=True)]
        self._launch("rms_norms", xs[0], [extension().Norm(*arguments) for arguments, _, _ in norms])
        return [y for _, y, _ in norms]

    def relu_square(self, x: torch.Tensor) -> torch.Tensor:
        """See Ops. torch squares in float32 and rounds once."""
        return torch.relu(x).square_()

    def route(
        self,
        logits: torch.Tensor,
        k: int,
        is_normalised: bool = False,
        sigmoid: SigmoidRouting | None = None,
        present: torch.Tensor | None = None,
        groups: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Ops. groups: memory for GroupedExperts, where the tokens are then grouped by expert. present: as in
        GroupedExperts.mixture."""
        return self._route(logits, k, is_normalised, sigmoid, address(present), address(groups))

    @property
    def _compiled(self) -> Any:
        return extension()

    def _launch(self, name: str, beside: torch.Tensor, *arguments: Any) -> None:
        with torch.cuda.device(beside.device):
            getattr(extension(), name)(*arguments, current_stream())

    def _launch_over(self, name: str, batch: DeviceBatch, **arguments: Any) -> None:
        memory = None
        if name == "selective_scan":
            arguments["lanes"] = self.lanes
        elif name == "head_scan":
            size = extension().head_scan_bytes(arguments["params"], batch.num_tokens)
            memory = torch.empty(size, dtype=torch.uint8, device=batch.device)
            arguments |= {"memory": address(memory), "own": self.own}
        with torch.cuda.device(batch.device):
            getattr(extension(), name)(batch=batch.params, stream=current_stream(), **arguments)

    def _most(self, what: str) -> int:
        limit: int = getattr(extension(), _LIMITS[what])
        return limit

    def _require_here(self, tensor: torch.Tensor, name: str) -> None:
        if not tensor.is_cuda:
            raise ValueError(f"{name} must be on a CUDA device, where this kernel runs; it is on {tensor.device}")

    def _batch(self, x: torch.Tensor, ragged: Ragged | DeviceBatch) -> DeviceBatch:
        return batch_on(x.device, ragged)

    def _token_slots(self, token_slots: torch.Tensor, k: torch.Tensor, k_cache: torch.Tensor) -> torch.Tensor:
        require_one_dtype(k, "k", k_cache, "k_cache")
        if token_slots.shape != k.shape[:1]:
            raise ValueError(
                f"token_slots must be ({k.shape[0]},), a slot for each token; it is {tuple(token_slots.shape)}"
            )
        return token_slots

    def _sequences(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        page_table: torch.Tensor,
        cu_seqlens: torch.Tensor,
        context: torch.Tensor,
    ) -> tuple[tuple[Any, ...], tuple[torch.Tensor | None, ...]]:
        require_one_dtype(q, "q", k_cache, "k_cache")
        (t, heads, head_dim), kv_heads = q.shape, k_cache.shape[2]
        b, columns = context.numel(), page_table.shape[1]
        if head_dim > extension().MOST_HEAD_DIM:
            raise ValueError(f"q must have heads of at most {extension().MOST_HEAD_DIM} columns; they have {head_dim}")
        max_context = columns * PAGE_TOKENS
        parts = None
        if t == b and heads // kv_heads <= extension().MOST_SPLIT_HEADS:  # decode: one new token per sequence
            splits = -(-max_context // extension().SPLIT_TOKENS)
            parts = torch.empty((b, heads, splits, head_dim + 2), dtype=torch.float32, device=q.device)
        lists = b, page_table.data_ptr(), columns, cu_seqlens.data_ptr(), context.data_ptr()
        return (lists, t - b + 1, max_context, address(parts)), (parts,)

    def _product(
        self, x: torch.Tensor, packed: DeviceLinear, out_dtype: torch.dtype, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return product(x, packed, out_dtype, bias)


ops = CudaOps()  # used inside fused sub-blocks, so that an observer of a model's backend sees one call
