"""The compiled CUDA kernels: whether they are there, the dtypes they take, the stream they run on."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

import torch

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # csrc/params.h, DType
ALIGNMENT = 16  # bytes: how the kernels of decode passes read weights


@cache
def extension() -> ModuleType:
    """apcbatch._CUDA; RuntimeError where it was not built."""
    try:
        compiled = import_module("apcbatch._CUDA")
    except ImportError as error:
        raise RuntimeError(
            f"the CUDA kernels are not in this build ({error}): with nvcc, build them by `make demo CUDA=1` in a "
            "checkout, or `APCBATCH_CUDA=1 pip install .`"
        ) from error
    return compiled


def current_stream() -> int:
    """The address of the stream that torch launches on."""
    return torch.cuda.current_stream(torch.cuda.current_device()).cuda_stream
