"""Silence: what becomes of a stream that takes nothing any more."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import IO, Any


def silence(stream: IO[Any]) -> None:
    """Send what is still buffered for it, and all that follows, to nowhere: closing must not fail again."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
