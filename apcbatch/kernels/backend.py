"""The backend of a device."""

from __future__ import annotations

import torch

from apcbatch.kernels.cpu.backend import CpuBackend
from apcbatch.kernels.cuda.backend import CudaBackend
from apcbatch.kernels.ops import Backend


def backend_for(device: torch.device, exact: bool = True) -> Backend:
    """A backend of the device, for one model. exact: on a CUDA device, products of one order of sums, so that a
    row's bits do not depend on the rows that come with it; on the CPU they never do."""
    return CudaBackend(device, exact) if device.type == "cuda" else CpuBackend()
