"""Describe the machine, and measure how fast it multiplies matrices, reads memory and copies memory.

The rates are upper limits, so each is the best of several tries. The products use this package's kernel on matrices
that fit into the cache. Reading and copying use arrays of 256 MiB.
"""

from __future__ import annotations

import platform
from typing import Any

import torch

from apcbatch.cores import processor_name
from apcbatch.kernels.cpu.linear import pack_linear
from apcbatch.kernels.cpu.ops import ops
from apcbatch.kernels.processor import isa

from .figures import timed

TRIES = 12
SIDE = 512
BANDWIDTH_FLOATS = 1 << 26


def describe() -> dict[str, Any]:
    """Return processor, instruction set, number of threads, and versions of the system, Python and torch."""
    return {
        "processor": processor_name(),
        "isa": isa(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def limits(dtype: torch.dtype) -> dict[str, float]:
    """Measure float32_flops_per_s, product_flops_per_s (products of `dtype`), read_bytes_per_s and copy_bytes_per_s
    (bytes read and bytes written)."""
    floats = torch.ones(BANDWIDTH_FLOATS)
    target = torch.empty_like(floats)
    read = min(timed(floats.sum) for _ in range(TRIES))
    copy = min(timed(lambda: target.copy_(floats)) for _ in range(TRIES))
    return {
        "float32_flops_per_s": _product_rate(torch.float32),
        "product_flops_per_s": _product_rate(dtype),
        "read_bytes_per_s": 4 * BANDWIDTH_FLOATS / read,
        "copy_bytes_per_s": 8 * BANDWIDTH_FLOATS / copy,
    }


def _product_rate(dtype: torch.dtype) -> float:
    x, packed = torch.randn(SIDE, SIDE).to(dtype), pack_linear(torch.randn(SIDE, SIDE).to(dtype))
    return 2 * SIDE**3 / min(timed(lambda: ops.linear(x, packed)) for _ in range(4 * TRIES))
