"""Backend of the CPU. A row of a matrix product never depends on the other rows of the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from apcbatch.kernels import isa
from apcbatch.kernels.cpu import attention, logits, norm, scan
from apcbatch.kernels.cpu import linear as products
from apcbatch.kernels.cpu import residual as stream
from apcbatch.kernels.cpu.attention_mixer import FusedAttention
from apcbatch.kernels.cpu.feed_forward import FusedMixture, FusedMlp
from apcbatch.kernels.cpu.linear import PackedLinear
from apcbatch.kernels.cpu.mamba import FusedMamba
from apcbatch.kernels.cpu.stack import FusedStack
from apcbatch.kernels.ops import BackendOf, KindOnDevice, StackEntry


class CpuBackend(BackendOf[PackedLinear]):
    """See apcbatch.kernels.ops."""

    exact = True

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

    arithmetic = staticmethod(isa.numerics)
    pack_linear = staticmethod(products.pack_linear)
    kinds: ClassVar[Mapping[str, KindOnDevice]] = {
        "mamba": KindOnDevice(FusedMamba),
        "attention": KindOnDevice(FusedAttention),
        "mlp": KindOnDevice(FusedMlp),
        "mixture": KindOnDevice(FusedMixture),
    }
    pass_stack = staticmethod(FusedStack)

    def layer_stack(self, layers: Sequence[Sequence[StackEntry]]) -> None:
        """Return None: the CPU runs a whole pass in one call."""
