"""Backend of a CUDA device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from apcbatch.kernels.backend import BackendOf, KindOnDevice, StackEntry
from apcbatch.kernels.cuda.attention import DeviceAttention
from apcbatch.kernels.cuda.feed_forward import DeviceMixture, DeviceMlp
from apcbatch.kernels.cuda.fixed_order import FixedOrderProducts
from apcbatch.kernels.cuda.head_mixer import DeviceHeadMixer
from apcbatch.kernels.cuda.linear import DeviceLinear, pack_linear
from apcbatch.kernels.cuda.mamba import DeviceMamba
from apcbatch.kernels.cuda.ops import CudaOps
from apcbatch.kernels.cuda.program import DeviceStack
from apcbatch.kernels.cuda.short_conv import DeviceShortConv
from apcbatch.kernels.encoded_rows import EncodedRows

# Increment with each change to a CUDA kernel that changes a bit of any result.
CUDA_NUMERICS_VERSION = 7


class CudaBackend(CudaOps, BackendOf[DeviceLinear]):
    """See apcbatch.kernels.backend. exact: in products with the weights packed here, a row's bits do not depend on the
    rest of the batch (apcbatch.kernels.cuda.linear)."""

    def __init__(self, device: torch.device, exact: bool) -> None:
        self.device, self.exact = device, exact
        self._products = FixedOrderProducts(device)

    kinds: ClassVar[Mapping[str, KindOnDevice]] = {
        "mamba": KindOnDevice(DeviceMamba),
        "mamba2": KindOnDevice(DeviceHeadMixer),
        "delta": KindOnDevice(DeviceHeadMixer),
        "short_conv": KindOnDevice(DeviceShortConv),
        "attention": KindOnDevice(DeviceAttention),
        "mlp": KindOnDevice(DeviceMlp),
        "mixture": KindOnDevice(DeviceMixture),
    }

    def arithmetic(self, dtype: torch.dtype) -> str:
        """Name the arithmetic. cuBLAS computes some of its products, so the name contains torch's version and the GPU's
        compute capability."""
        major, minor = torch.cuda.get_device_capability(self.device)
        products = "exact" if self.exact else "fast"
        name = str(dtype).removeprefix("torch.")
        return f"cuda-sm{major}{minor}-{name}-{products}-torch{torch.__version__}-{CUDA_NUMERICS_VERSION}"

    def pack_linear(
        self,
        weight: torch.Tensor | EncodedRows,
        scale: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> DeviceLinear:
        """Prepare weights (out, in), of any stride, for `linear`: see BackendOf. Encoded weights stay so where the
        kernels take them (apcbatch.kernels.cuda.coded)."""
        if isinstance(weight, EncodedRows) and dtype not in (None, torch.bfloat16):
            weight = weight.decoded().to(self.device)
        if isinstance(weight, torch.Tensor):
            weight = weight.to(dtype or weight.dtype)
        return pack_linear(weight, self.exact, self._products, scale)

    def layer_stack(self, layers: Sequence[Sequence[StackEntry]], hidden: int) -> DeviceStack:
        return DeviceStack([entry for layer in layers for entry in layer], hidden, self.device)
