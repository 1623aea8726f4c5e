"""Load the compiled CUDA kernels, and provide the alignment and streams that they take."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Literal

import torch

ALIGNMENT = 16  # bytes, of weights and rows: the kernels of decode passes read them in vectors of this size


@cache
def extension() -> ModuleType:
    """Import and return apcbatch._CUDA. Raises RuntimeError if it was not built."""
    try:
        compiled = import_module("apcbatch._CUDA")
    except ImportError as error:
        raise RuntimeError(
            f"the CUDA kernels are not in this build ({error}): with nvcc, build them by `make demo CUDA=1` in a "
            "checkout, or `APCBATCH_CUDA=1 pip install .`"
        ) from error
    return compiled


def current_stream() -> int:
    """Return the address of the stream that torch launches on."""
    return torch.cuda.current_stream(torch.cuda.current_device()).cuda_stream


@cache
def own_stream(
    device: torch.device, purpose: Literal["capture", "branch", "copy in", "copy out", "send", "receive"]
) -> torch.cuda.Stream:
    """Return the one stream that this process uses for a purpose on a device.

    torch.cuda.Stream() returns 32 streams in turn, so two purposes could share one. A copy that another thread submits
    to the stream of a capture would become part of the graph.
    """
    with torch.cuda.device(device):
        return torch.cuda.ExternalStream(extension().new_stream(), device)  # type: ignore[no-untyped-call]
