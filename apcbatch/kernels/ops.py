"""The kernels' public face: one function an op. What each takes and returns stands in its docstring.

Must not know: models, requests. The recurrent ops run where x lies, on the CPU or on a CUDA device.
"""

from __future__ import annotations

import torch

from apcbatch.kernels import cuda, scan
from apcbatch.kernels.attention import PAGE_TOKENS, paged_attention, write_kv
from apcbatch.kernels.choose import argmax, greedy, softmax_topk, token_logprob
from apcbatch.kernels.feed_forward import Expert, FusedMixture, FusedMlp
from apcbatch.kernels.isa import available_isas, isa, numerics, set_isa
from apcbatch.kernels.linear import PackedLinear, linear, pack_linear
from apcbatch.kernels.mixer import FusedMixer, MixerWeights
from apcbatch.kernels.norm import add_rms_norm_, rms_norm, silu_mul
from apcbatch.kernels.ragged import Ragged
from apcbatch.kernels.residual import PreNorm, Residual

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


def causal_conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor, ragged: Ragged
) -> torch.Tensor:
    """See apcbatch.kernels.scan and apcbatch.kernels.cuda."""
    run = cuda.causal_conv if x.is_cuda else scan.causal_conv
    return run(x, weight, bias, state, ragged)


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    state: torch.Tensor,
    ragged: Ragged,
) -> torch.Tensor:
    """See apcbatch.kernels.scan and apcbatch.kernels.cuda."""
    run = cuda.selective_scan if x.is_cuda else scan.selective_scan
    return run(x, dt, A, B, C, D, z, dt_bias, state, ragged)
