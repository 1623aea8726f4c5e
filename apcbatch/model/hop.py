"""Tensors on their way from one device to another.

Must not know: models. Invariants: what is launched on the target's stream after a hop comes after it, and the hop after
what its tensor was launched by; neither stream waits for anything else that the other one does, so that the passes of
a pipeline do not wait for each other. torch's own copy lets each stream wait for the whole of the other; here it has
streams of its own.
"""

from __future__ import annotations

import torch


class Hop:
    """From one device to another; where both are one, a tensor stays where it is."""

    def __init__(self, source: torch.device, target: torch.device) -> None:
        self._source, self._target = source, target
        if source != target:
            self._leaving = torch.cuda.Stream(source)  # type: ignore[no-untyped-call]
            self._arriving = torch.cuda.Stream(target)  # type: ignore[no-untyped-call]

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the target, for its current stream. Nothing may write to the tensor afterwards."""
        if self._source == self._target:
            return tensor
        self._leaving.wait_stream(torch.cuda.current_stream(self._source))
        with torch.cuda.stream(self._leaving), torch.cuda.stream(self._arriving):
            arrived = tensor.to(self._target, non_blocking=True)
        tensor.record_stream(self._leaving)
        awaiting = torch.cuda.current_stream(self._target)
        awaiting.wait_stream(self._arriving)
        arrived.record_stream(awaiting)
        return arrived
