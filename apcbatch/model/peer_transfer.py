"""Transfer tensors from one device to another.

Invariants: a copy starts as soon as its tensor is computed, regardless of work submitted to the source later; on the
target, only work launched after `receive` waits for it. So the passes of a pipeline do not wait for each other. torch's
own copy makes each stream wait for all earlier work of the other; this module copies on separate streams.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from apcbatch.kernels.cuda.extension import own_stream


@dataclass(frozen=True)
class Sent:
    """A tensor whose transfer may not have finished. arrived: event of the transfer; None if none was needed."""

    tensor: torch.Tensor
    arrived: torch.cuda.Event | None = None

    def receive(self) -> torch.Tensor:
        """Return the tensor; work launched later on its device's current stream waits for the transfer."""
        if self.arrived is not None:
            stream = torch.cuda.current_stream(self.tensor.device)
            stream.wait_event(self.arrived)
            self.tensor.record_stream(stream)
        return self.tensor


class Hop:
    """Transfers from one device to another; between equal devices nothing is copied."""

    def __init__(self, source: torch.device, target: torch.device) -> None:
        self._source, self._target = source, target
        if source != target:
            self._leaving, self._arriving = own_stream(source, "send"), own_stream(target, "receive")

    def send(self, tensor: torch.Tensor) -> Sent:
        """Begin to copy a tensor that the source's current stream computes. Nothing may write to the tensor
        afterwards."""
        if self._source == self._target:
            return Sent(tensor)
        self._leaving.wait_stream(torch.cuda.current_stream(self._source))
        with torch.cuda.stream(self._leaving), torch.cuda.stream(self._arriving):
            copy = tensor.to(self._target, non_blocking=True)
            arrived = self._arriving.record_event()
        tensor.record_stream(self._leaving)
        return Sent(copy, arrived)
