"""The kernels' public face: one function an op. What each takes and returns stands in its docstring.

Must not know: models, requests. An op runs where its first tensor lies, on the CPU or on a CUDA device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from inspect import signature
from typing import Any, TypeVar, cast

import torch

from apcbatch.kernels.cpu import attention, choose, norm, scan
from apcbatch.kernels.cpu import linear as packed
from apcbatch.kernels.cuda import attention as cuda_attention
from apcbatch.kernels.cuda import rows as cuda_rows
from apcbatch.kernels.cuda import scan as cuda_scan
from apcbatch.kernels.cpu.attention import PAGE_TOKENS
from apcbatch.kernels.cuda.decode import DecodeStack
from apcbatch.kernels.cuda.layers import (
    DeviceExpert,
    DeviceMixer,
    DeviceMixture,
    DeviceMlp,
    DeviceNorm,
    DeviceResidual,
)
from apcbatch.kernels.cuda.rows import DeviceLinear, set_exact
from apcbatch.kernels.cpu.feed_forward import Expert, FusedMixture, FusedMlp
from apcbatch.kernels.isa import available_isas, isa, set_isa
from apcbatch.kernels.isa import numerics as cpu_numerics
from apcbatch.kernels.cpu.linear import PackedLinear
from apcbatch.kernels.cpu.mixer import FusedMixer, MixerWeights
from apcbatch.kernels.ragged import Ragged
from apcbatch.kernels.cpu.residual import PreNorm, Residual

__all__ = [
    "PAGE_TOKENS",
    "DecodeStack",
    "DeviceExpert",
    "DeviceLinear",
    "DeviceMixer",
    "DeviceMixture",
    "DeviceMlp",
    "DeviceNorm",
    "DeviceResidual",
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
    "expert",
    "greedy",
    "isa",
    "linear",
    "mixer",
    "mixture",
    "mlp",
    "numerics",
    "pack_linear",
    "paged_attention",
    "pre_norm",
    "residual",
    "rms_norm",
    "selective_scan",
    "set_exact",
    "set_isa",
    "silu_mul",
    "softmax_topk",
    "token_logprob",
    "write_kv",
]

Op = TypeVar("Op", bound=Callable[..., Any])


def _either(on_cpu: Op, on_cuda: Callable[..., Any]) -> Op:
    """The op that runs where its first argument lies; its docstring is the CPU's."""

    first = next(iter(signature(on_cpu).parameters))

    @wraps(on_cpu)
    def run(*arguments: Any, **named: Any) -> Any:
        tensor = arguments[0] if arguments else named[first]
        return (on_cuda if tensor.is_cuda else on_cpu)(*arguments, **named)

    return cast(Op, run)


causal_conv = _either(scan.causal_conv, cuda_scan.causal_conv)
selective_scan = _either(scan.selective_scan, cuda_scan.selective_scan)
pack_linear = _either(packed.pack_linear, cuda_rows.device_linear)
linear = _either(packed.linear, cuda_rows.linear)
rms_norm = _either(norm.rms_norm, cuda_rows.rms_norm)
add_rms_norm_ = _either(norm.add_rms_norm_, cuda_rows.add_rms_norm_)
silu_mul = _either(norm.silu_mul, cuda_rows.silu_mul)
softmax_topk = _either(choose.softmax_topk, cuda_rows.softmax_topk)
argmax = _either(choose.argmax, cuda_rows.argmax)
greedy = _either(choose.greedy, cuda_rows.greedy)
token_logprob = _either(choose.token_logprob, cuda_rows.token_logprob)
write_kv = _either(attention.write_kv, cuda_attention.write_kv)
paged_attention = _either(attention.paged_attention, cuda_attention.paged_attention)


# The parts of a layer, where their weights lie.


def pre_norm(weight: torch.Tensor, eps: float) -> PreNorm:
    """The norm at the beginning of a part: see PreNorm."""
    return (DeviceNorm if weight.is_cuda else PreNorm)(weight, eps)


def residual(begin: torch.Tensor, present: torch.Tensor | None = None) -> Residual:
    """The residual stream of a pass: see Residual, and DeviceResidual for `present`."""
    return DeviceResidual(begin, present) if begin.is_cuda else Residual(begin)


def mixer(
    norm: PreNorm, weights: MixerWeights, ssm: torch.Tensor, conv: torch.Tensor
) -> Callable[[Residual, Ragged], None]:
    """The Mamba mixer of a layer: see FusedMixer."""
    return (DeviceMixer if ssm.is_cuda else FusedMixer)(norm, weights, ssm, conv)


def expert(gate_up: Any, down: Any) -> Expert | DeviceExpert:
    """A SwiGLU product of two packed weights: see Expert."""
    return (DeviceExpert if isinstance(down, DeviceLinear) else Expert)(gate_up, down)


def mlp(norm: PreNorm, expert: Any) -> Callable[[Residual], None]:
    """One expert for all tokens: see FusedMlp."""
    return (DeviceMlp if isinstance(norm, DeviceNorm) else FusedMlp)(norm, expert)


def mixture(
    norm: PreNorm, router: Any, experts: Sequence[Any], experts_per_token: int
) -> Callable[[Residual], None]:
    """Some of the experts for each token: see FusedMixture."""
    make: Any = DeviceMixture if isinstance(norm, DeviceNorm) else FusedMixture
    return cast(Callable[[Residual], None], make(norm, router, experts, experts_per_token))


def numerics(dtype: torch.dtype, device: torch.device | None = None) -> str:
    """The arithmetic of weights of this dtype on this device (None: the CPU), whose snapshots only it can use."""
    return cuda_rows.numerics(dtype, device) if device and device.type == "cuda" else cpu_numerics(dtype)
