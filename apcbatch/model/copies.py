"""Copies between a device and the host, beside what the device computes; on the CPU they are made at once.

Must not know: slots, what is copied. A device copies in both directions while it computes, so each direction has a
stream. Invariant: memory that a copy reads or writes has been taken from nobody: a copy out is behind its mark, and
what the device is asked for later is behind a copy in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Pair = tuple[torch.Tensor, torch.Tensor]
"""Where a copy goes, and where it comes from; contiguous."""


class Copies:
    """The copies of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_host = device.type == "cpu"
        self._out: Any = None if self._on_host else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in: Any = None if self._on_host else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> Point:
        """What the device has been asked for until now."""
        if self._on_host:
            return Point()
        return Point(torch.cuda.current_stream(self._device))

    def out(self, pairs: Iterable[Pair], after: Any) -> None:
        """Copy from the device as it is at a mark; returns when the bytes are there."""
        with self.beside(after):
            for host, part in pairs:
                host.copy_(part, non_blocking=not self._on_host)
            self.mark().wait()

    def into(self, pairs: Iterable[Pair]) -> Point:
        """Begin to copy to the device, behind what it was asked for before and ahead of what comes next."""
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
        """Let what is asked for here run beside the passes, behind a mark; None: as part of them."""
        if after is None or self._on_host:
            yield
            return
        after.hold(self._out)
        with torch.cuda.stream(self._out):
            yield


class Point:
    """A mark on one stream; without one it is reached already."""

    def __init__(self, stream: Any = None) -> None:
        self._event: Any = None
        if stream is not None:
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record(stream)

    def wait(self) -> None:
        """Return when the stream is there."""
        if self._event is not None:
            self._event.synchronize()

    def hold(self, stream: Any) -> None:
        """Let a stream go on only from there."""
        stream.wait_event(self._event)
