"""Tensors on their way from one device to another.

Must not know: models. Invariants: a copy begins when its tensor is computed, whatever its source is asked for later,
and only what is launched on the target after it was received waits for it, so that the passes of a pipeline do not wait
for each other. torch's own copy lets each stream wait for all that the other was asked for; here it has streams of its
own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sent:
    """A tensor that may be on its way. arrived: None where it is there."""

    tensor: torch.Tensor
    arrived: torch.cuda.Event | None = None

    def receive(self) -> torch.Tensor:
        """The tensor, for what is launched on its device's current stream from now on."""
        if self.arrived is not None:
            stream = torch.cuda.current_stream(self.tensor.device)
            stream.wait_event(self.arrived)
            self.tensor.record_stream(stream)
        return self.tensor


class Hop:
    """From one device to another; where both are one, a tensor stays where it is."""

    def __init__(self, source: torch.device, target: torch.device) -> None:
        self._source, self._target = source, target
        if source != target:
            self._leaving = torch.cuda.Stream(source)  # type: ignore[no-untyped-call]
            self._arriving = torch.cuda.Stream(target)  # type: ignore[no-untyped-call]

    def send(self, tensor: torch.Tensor) -> Sent:
        """Begin to copy what the source's current stream makes. Nothing may write to the tensor afterwards."""
        if self._source == self._target:
            return Sent(tensor)
        self._leaving.wait_stream(torch.cuda.current_stream(self._source))
        with torch.cuda.stream(self._leaving), torch.cuda.stream(self._arriving):
            copy = tensor.to(self._target, non_blocking=True)
            arrived = self._arriving.record_event()
        tensor.record_stream(self._leaving)
        return Sent(copy, arrived)
