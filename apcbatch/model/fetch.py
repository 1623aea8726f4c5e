"""A tensor on its way to the host. Must not know: what it means."""

from __future__ import annotations

import torch


class Fetch:
    """A copy on the host of a tensor that lies on a device and may not be computed yet; one of the host's own is there
    at once."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._copied: torch.cuda.Event | None = None
        if tensor.is_cuda:
            with torch.cuda.device(tensor.device):
                self._tensor = tensor.to("cpu", non_blocking=True)  # pinned, and copied after what computes it
                self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._copied.record()

    def read(self) -> torch.Tensor:
        """Wait for it."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensor
