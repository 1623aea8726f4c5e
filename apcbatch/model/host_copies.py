"""Host-device copies that run concurrently with the passes; on the CPU they are made at once.

A device copies in both directions while it computes, so each direction has a stream. Invariant: a copy never races with
a pass. A copy to the host starts at its mark; passes submitted after a copy to the device wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from apcbatch.kernels.cuda.extension import own_stream

Pair = tuple[torch.Tensor, torch.Tensor]
"""(target, source) of a copy; contiguous."""


class Copies:
    """Host-device copies, one stream per direction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_host = device.type == "cpu"
        self._out: Any = None if self._on_host else own_stream(device, "copy out")
        self._in: Any = None if self._on_host else own_stream(device, "copy in")

    def mark(self) -> Point:
        """Return a mark after the work submitted to the device so far."""
        if self._on_host:
            return Point()
        return Point(torch.cuda.current_stream(self._device))

    def out(self, pairs: Iterable[Pair], after: Any) -> None:
        """Copy from the device to the host, as of a mark; returns when the copy is complete. pairs: (host, device
        part)."""
        with self.beside(after):
            for host, part in pairs:
                host.copy_(part, non_blocking=not self._on_host)
            self.mark().wait()

    def into(self, pairs: Iterable[Pair]) -> Point:
        """Begin to copy from the host to the device: after all work submitted so far, before all work submitted later.
        pairs: (device part, host)."""
        if self._on_host:
            for part, host in pairs:
                if part.data_ptr() != host.data_ptr():
                    part.copy_(host)
            return Point()
        passes = torch.cuda.current_stream(self._device)
        self._in.wait_stream(passes)
        with torch.cuda.stream(self._in):
            for part, host in pairs:
                part.copy_(host, non_blocking=True)
            done = self.mark()
        done.hold(passes)
        return done

    @contextmanager
    def beside(self, after: Any | None) -> Iterator[None]:
        """Submit the block's work to the stream of copies to the host: it waits for the mark `after` and runs
        concurrently with the passes. None: submit it to the current stream, in order with the passes."""
        if after is None or self._on_host:
            yield
            return
        after.hold(self._out)
        with torch.cuda.stream(self._out):
            yield


class Point:
    """An event on a stream; without a stream it counts as reached."""

    def __init__(self, stream: Any = None) -> None:
        self._event: Any = None
        if stream is not None:
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record(stream)

    def wait(self) -> None:
        """Block until the stream reaches this point."""
        if self._event is not None:
            self._event.synchronize()

    def hold(self, stream: Any) -> None:
        """Make a stream wait for this point."""
        stream.wait_event(self._event)


class Fetch:
    """An asynchronous copy of a device tensor to the host; a host tensor is returned as it is."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._copied: torch.cuda.Event | None = None
        if tensor.is_cuda:
            with torch.cuda.device(tensor.device):
                self._tensor = tensor.to("cpu", non_blocking=True)  # pinned; ordered after its computation
                self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._copied.record()

    def read(self) -> torch.Tensor:
        """Wait for the copy and return it."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensor


def finite_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return whether each row of (r, n) holds neither NaN nor infinity: (r,) bool on the same device. Checks each row's
    maximum and minimum, to which NaN propagates; this is several times faster than `isfinite` of each element."""
    return rows.amax(1).isfinite() & rows.amin(1).isfinite()


def largest(numbers: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude, as a tensor (); NaN if any number is NaN. All numbers are finite if it is finite,
    so one kernel checks them."""
    found: torch.Tensor = torch.linalg.vector_norm(numbers, math.inf)
    return found
