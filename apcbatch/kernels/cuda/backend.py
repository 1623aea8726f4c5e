"""Backend of a CUDA device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from apcbatch.kernels.cuda import attention, logits, norm, scan
from apcbatch.kernels.cuda import linear as products
from apcbatch.kernels.cuda import residual as stream
from apcbatch.kernels.cuda.feed_forward import DeviceMixture, DeviceMlp
from apcbatch.kernels.cuda.fixed_order import FixedOrderProducts
from apcbatch.kernels.cuda.linear import DeviceLinear
from apcbatch.kernels.cuda.mamba import DeviceMamba, DeviceMambaStack
from apcbatch.kernels.layer import PreNorm
from apcbatch.kernels.ops import NOT_FUSED, BackendOf, KindOnDevice, StackEntry

# Increment with each change to a CUDA kernel that changes a bit of any result.
CUDA_NUMERICS_VERSION = 5


class CudaBackend(BackendOf[DeviceLinear]):
    """See apcbatch.kernels.ops. exact: products of the weights packed here are accumulated in one fixed order, so that
    a row's bits do not depend on the rest of the batch."""

    def __init__(self, device: torch.device, exact: bool) -> None:
        self.device, self.exact = device, exact
        self._products = FixedOrderProducts(device)

    linear = staticmethod(products.linear)
    causal_conv = staticmethod(scan.causal_conv)
    selective_scan = staticmethod(scan.selective_scan)
    rms_norm = staticmethod(norm.rms_norm)
    add_rms_norm_ = staticmethod(norm.add_rms_norm_)
    silu_mul = staticmethod(norm.silu_mul)
    softmax_topk = staticmethod(logits.softmax_topk)
    argmax = staticmethod(logits.argmax)
    greedy = staticmethod(logits.greedy)
    token_logprob = staticmethod(logits.token_logprob)
    token_logprobs = staticmethod(logits.token_logprobs)
    write_kv = staticmethod(attention.write_kv)
    paged_attention = staticmethod(attention.paged_attention)
    residual = staticmethod(stream.residual)
    normed = staticmethod(stream.normed)

    kinds: ClassVar[Mapping[str, KindOnDevice]] = {
        "mamba": KindOnDevice(DeviceMamba),
        "attention": NOT_FUSED,
        "mlp": KindOnDevice(DeviceMlp),
        "mixture": KindOnDevice(DeviceMixture),
    }

    def arithmetic(self, dtype: torch.dtype) -> str:
        """Name the arithmetic. Its products are cuBLAS's, so the name contains torch's version and the GPU's compute
        capability."""
        major, minor = torch.cuda.get_device_capability(self.device)
        products = "exact" if self.exact else "fast"
        name = str(dtype).removeprefix("torch.")
        return f"cuda-sm{major}{minor}-{name}-{products}-torch{torch.__version__}-{CUDA_NUMERICS_VERSION}"

    def pack_linear(self, weight: torch.Tensor) -> DeviceLinear:
        """Prepare weights for `linear`."""
        return products.pack_linear(weight, self.exact, self._products)

    def layer_stack(self, layers: Sequence[Sequence[StackEntry]]) -> DeviceMambaStack | None:
        """See apcbatch.kernels.ops. Takes models in which each layer is one Mamba mixer; returns None for others."""
        mixers = [entry.part for layer in layers for entry in layer]
        are_alone = all(len(layer) == 1 for layer in layers) and all(isinstance(one, DeviceMamba) for one in mixers)
        return DeviceMambaStack(mixers) if are_alone else None

    def pass_stack(
        self,
        layers: Sequence[Sequence[StackEntry]],
        norm: PreNorm,
        head: DeviceLinear,
        embedding: torch.Tensor | None,
    ) -> None:
        """Return None: a pass launches one sub-block after the other, or replays a CUDA graph of them."""
