"""Residual stream on a CUDA device: the norm that adds a sub-block's output also multiplies it by its factors, and adds
the output of the sub-blocks in parallel.

Invariant: the bits equal those of the multiplications and additions one by one.
"""

from __future__ import annotations

import torch

from apcbatch.kernels.layer import PreNorm, Residual


class DeviceResidual(Residual):
    """Residual whose next norm adds aside + delta * factors, in this order, to the sum.

    factors: (h,) float32, factors of the columns of delta; None: ones. aside: (t, h) float32, the output of the
    sub-blocks in parallel to the last one; None: there is none. normed: the last norm of the sum and its result, for a
    sub-block in parallel; None if the sum has changed since.
    """

    def __init__(self, sum: torch.Tensor, delta: torch.Tensor, present: torch.Tensor | None = None) -> None:
        super().__init__(sum, delta, present)
        self.factors: torch.Tensor | None = None
        self.aside: torch.Tensor | None = None
        self.normed: tuple[PreNorm, torch.Tensor] | None = None

    def rows(self, indices: torch.Tensor) -> DeviceResidual:
        """See Residual."""
        taken = DeviceResidual(self.sum[indices], self.delta[indices])
        taken.has_delta, taken.factors = self.has_delta, self.factors
        taken.aside = None if self.aside is None else self.aside[indices]
        return taken

    def settled(self) -> torch.Tensor:
        """See Residual."""
        if self.has_delta:
            self.leave(self._finished())
            self.normed = None
        return super().settled()

    def beside(self) -> torch.Tensor:
        """See Residual."""
        self.leave(self._finished())
        return super().beside()

    def join(self, left: torch.Tensor) -> None:
        """See Residual. `left` stays as it is until the next norm adds it."""
        self.aside = left

    def leave(self, delta: torch.Tensor, factors: torch.Tensor | None = None) -> None:
        """Store delta * factors, a sub-block's output, as the pending delta. See Residual."""
        super().leave(delta)
        self.factors, self.aside = factors, None

    def _finished(self) -> torch.Tensor:
        delta = self.delta if self.factors is None else self.delta * self.factors
        return delta if self.aside is None else self.aside + delta
