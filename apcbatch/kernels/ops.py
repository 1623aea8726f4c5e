"""The kernels' public face: one function an op. What each takes and returns stands in its docstring.

Must not know: models, requests.
"""

from apcbatch.kernels.attention import PAGE_TOKENS, paged_attention, write_kv
from apcbatch.kernels.choose import argmax, greedy, softmax_topk, token_logprob
from apcbatch.kernels.feed_forward import Expert, FusedMixture, FusedMlp
from apcbatch.kernels.isa import available_isas, isa, numerics, set_isa
from apcbatch.kernels.linear import PackedLinear, linear, pack_linear
from apcbatch.kernels.mixer import FusedMixer, MixerWeights
from apcbatch.kernels.norm import add_rms_norm_, rms_norm, silu_mul
from apcbatch.kernels.residual import PreNorm, Residual
from apcbatch.kernels.scan import causal_conv, selective_scan

__all__ = [
    "PAGE_TOKENS",
    "Expert",
    "FusedMixer",
    "FusedMixture",
    "FusedMlp",
    "MixerWeights",
    "PackedLinear",
    "PreNorm",
    "Residual",
    "add_rms_norm_",
    "argmax",
    "available_isas",
    "causal_conv",
    "greedy",
    "isa",
    "linear",
    "numerics",
    "pack_linear",
    "paged_attention",
    "rms_norm",
    "selective_scan",
    "set_isa",
    "silu_mul",
    "softmax_topk",
    "token_logprob",
    "write_kv",
]
