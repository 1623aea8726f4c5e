"""The backend of a CUDA device.

Must not know: models.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from apcbatch.kernels.cuda import attention, choose, norm, scan
from apcbatch.kernels.cuda import linear as products
from apcbatch.kernels.cuda import residual as stream
from apcbatch.kernels.cuda.chains import Chains
from apcbatch.kernels.cuda.feed_forward import DeviceMixture, DeviceMlp
from apcbatch.kernels.cuda.linear import DeviceLinear
from apcbatch.kernels.cuda.mixer import DeviceMixer, DeviceMixers
from apcbatch.kernels.layer import AttentionWeights, PreNorm
from apcbatch.kernels.ops import BackendOf, StackLayer

# Counts up with every change of any CUDA kernel that changes a bit of any result.
CUDA_NUMERICS_VERSION = 5


class CudaBackend(BackendOf[DeviceLinear, DeviceMixer]):
    """See apcbatch.kernels.ops. exact: weights that are packed here are multiplied so that a row's bits do not depend
    on the rows that come with it."""

    runs_whole = False

    def __init__(self, device: torch.device, exact: bool) -> None:
        self.device, self.exact = device, exact
        self._chains = Chains(device)

    linear = staticmethod(products.linear)
    causal_conv = staticmethod(scan.causal_conv)
    selective_scan = staticmethod(scan.selective_scan)
    rms_norm = staticmethod(norm.rms_norm)
    add_rms_norm_ = staticmethod(norm.add_rms_norm_)
    silu_mul = staticmethod(norm.silu_mul)
    softmax_topk = staticmethod(choose.softmax_topk)
    argmax = staticmethod(choose.argmax)
    greedy = staticmethod(choose.greedy)
    token_logprob = staticmethod(choose.token_logprob)
    token_logprobs = staticmethod(choose.token_logprobs)
    write_kv = staticmethod(attention.write_kv)
    paged_attention = staticmethod(attention.paged_attention)
    residual = staticmethod(stream.residual)
    normed = staticmethod(stream.normed)

    mixer = staticmethod(DeviceMixer)
    mixer_stack = staticmethod(DeviceMixers)
    mlp = staticmethod(DeviceMlp)
    mixture = staticmethod(DeviceMixture)

    def numerics(self, dtype: torch.dtype) -> str:
        """Products are the library's, so its version and the chip belong to it."""
        major, minor = torch.cuda.get_device_capability(self.device)
        products = "exact" if self.exact else "fast"
        name = str(dtype).removeprefix("torch.")
        return f"cuda-sm{major}{minor}-{name}-{products}-torch{torch.__version__}-{CUDA_NUMERICS_VERSION}"

    def pack_linear(self, weight: torch.Tensor) -> DeviceLinear:
        """Weights as `linear` takes them."""
        return products.pack_linear(weight, self.exact, self._chains)

    def attention(
        self, norm: PreNorm, weights: AttentionWeights[DeviceLinear], k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> None:
        """There is none."""

    def pass_stack(
        self, layers: Sequence[StackLayer], norm: PreNorm, head: DeviceLinear, embedding: torch.Tensor | None
    ) -> None:
        """There is none: a pass is launched part by part, or is a CUDA graph of them."""
