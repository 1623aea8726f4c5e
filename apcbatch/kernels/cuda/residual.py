"""Residual stream on a CUDA device: the norm that adds a sub-block's output also finishes it, adds the output of the
sub-blocks in parallel, and sums the experts of a mixture.

Invariant: the bits equal those of the multiplications and additions one by one.
"""

from __future__ import annotations

import torch

from apcbatch.kernels.arguments import address
from apcbatch.kernels.cuda.experts import sum_experts
from apcbatch.kernels.layer import PreNorm, Residual

Pending = tuple[int, int, int, int, int, int]
NOTHING_PENDING: Pending = (0, 0, 0, 0, 0, 0)


class DeviceResidual(Residual):
    """Residual whose next norm adds aside + delta * factors * sigmoid(gate), in this order, to the sum.

    factors: (h,) float32, factors of the columns of delta; None: ones. gate: (t, 1) float32, of the rows of delta;
    None: without. aside: (t, h) float32, the output of the sub-blocks in parallel to the last one, or (t, k, h), the
    outputs of the k experts of each token, to be summed in this order; None: there is none. is_mixture: whether the
    last sub-block is a mixture, whose output is aside alone. normed: the last norm of the sum and its result, for a
    sub-block in parallel; None if the sum has changed since.
    """

    def __init__(self, sum: torch.Tensor, delta: torch.Tensor, present: torch.Tensor | None = None) -> None:
        super().__init__(sum, delta, present)
        self.factors: torch.Tensor | None = None
        self.gate: torch.Tensor | None = None
        self.aside: torch.Tensor | None = None
        self.is_mixture = False
        self.normed: tuple[PreNorm, torch.Tensor] | None = None

    def output(self) -> torch.Tensor:
        aside = self.aside
        if aside is not None and aside.dim() == 3:
            aside = sum_experts(aside, self.present)
        if self.is_mixture:
            assert aside is not None
            return aside
        delta = self.delta if self.factors is None else self.delta * self.factors
        if self.gate is not None:
            delta = delta * self.gate.sigmoid()
        return delta if aside is None else aside + delta

    def rows(self, indices: torch.Tensor) -> DeviceResidual:
        taken = DeviceResidual(self.sum[indices], self.output()[indices] if self.has_delta else self.delta[indices])
        taken.has_delta = self.has_delta
        return taken

    def settled(self) -> torch.Tensor:
        if self.has_delta:
            self.normed = None
        return super().settled()

    def beside(self) -> torch.Tensor:
        """See Residual. Of a mixture, return the outputs of the experts, (t, k, h), not their sum."""
        left = self.aside if self.is_mixture else None
        self.has_delta, left = False, self.output() if left is None else left
        return left

    def join(self, left: torch.Tensor) -> None:
        """See Residual. `left` stays as it is until the next norm adds it."""
        if self.is_mixture:
            self.leave(self.output())
        self.aside = left

    def leave(self, delta: torch.Tensor, factors: torch.Tensor | None = None, gate: torch.Tensor | None = None) -> None:
        """Store delta * factors * sigmoid(gate), a sub-block's output, as pending. See Residual."""
        super().leave(delta)
        self.factors, self.gate, self.aside, self.is_mixture = factors, gate, None, False

    def leave_experts(self, rows: torch.Tensor) -> None:
        """Store the sum over the experts of each token as pending. rows: their outputs, (t, k, h) float32 contiguous;
        those of padding tokens may be uninitialised, and count as zero."""
        self.factors, self.gate, self.aside, self.is_mixture, self.has_delta = None, None, rows, True, True

    def pending(self) -> tuple[torch.Tensor | None, Pending]:
        """Return what the next norm adds: delta, or None, and the addresses that the kernels take, see Pending in
        csrc/cuda/rows.h."""
        if not self.has_delta:
            return None, NOTHING_PENDING
        factors, gate, aside = address(self.factors), address(self.gate), self.aside
        delta = None if self.is_mixture else self.delta
        if aside is None or aside.dim() == 2:
            return delta, (factors, gate, address(aside), 0, 0, 0)
        return delta, (factors, gate, 0, aside.data_ptr(), aside.shape[1], address(self.present))
