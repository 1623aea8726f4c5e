"""The CPU's backend.

Must not know: models. A row of a product never depends on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

from apcbatch.kernels import isa
from apcbatch.kernels.cpu import attention, choose, norm, scan
from apcbatch.kernels.cpu import linear as products
from apcbatch.kernels.cpu import residual as stream
from apcbatch.kernels.cpu.attention_mixer import FusedAttention
from apcbatch.kernels.cpu.feed_forward import FusedMixture, FusedMlp
from apcbatch.kernels.cpu.linear import PackedLinear
from apcbatch.kernels.cpu.mixer import FusedMixer
from apcbatch.kernels.cpu.stack import FusedStack
from apcbatch.kernels.ops import BackendOf


class CpuBackend(BackendOf[PackedLinear, FusedMixer]):
    """See apcbatch.kernels.ops."""

    exact = runs_whole = True

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

    numerics = staticmethod(isa.numerics)
    pack_linear = staticmethod(products.pack_linear)
    mixer = staticmethod(FusedMixer)
    mlp = staticmethod(FusedMlp)
    mixture = staticmethod(FusedMixture)
    attention = staticmethod(FusedAttention)
    pass_stack = staticmethod(FusedStack)

    def mixer_stack(self, mixers: Sequence[FusedMixer]) -> None:
        """There is none: a whole pass is one call."""
