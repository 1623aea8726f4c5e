"""What becomes of a stream that cannot be written any more."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import IO, Any


def silence(stream: IO[Any]) -> None:
    """Send what is still buffered, and everything that follows, to /dev/null, so that closing cannot fail again."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
