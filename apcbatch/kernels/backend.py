"""Make the backend of a device."""

from __future__ import annotations

import torch

from apcbatch.kernels.cpu.backend import CpuBackend
from apcbatch.kernels.cuda.backend import CudaBackend
from apcbatch.kernels.ops import Backend


def backend_for(device: torch.device, exact: bool = True) -> Backend:
    """Return a new backend of the device, for one model.

    exact: on a CUDA device, accumulate every product in one fixed order, so that a row's bits do not depend on the
    rest of the batch. The CPU's products are always so.
    """
    return CudaBackend(device, exact) if device.type == "cuda" else CpuBackend()
