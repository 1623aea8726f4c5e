"""Backend of the CPU. A row of a matrix product never depends on the other rows of the batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from apcbatch.kernels import processor
from apcbatch.kernels.backend import BackendOf, KindOnDevice
from apcbatch.kernels.cpu.attention_mixer import FusedAttention
from apcbatch.kernels.cpu.feed_forward import FusedMixture, FusedMlp
from apcbatch.kernels.cpu.head_mixer import FusedHeadMixer
from apcbatch.kernels.cpu.linear import PackedLinear, pack_linear
from apcbatch.kernels.cpu.mamba import FusedMamba
from apcbatch.kernels.cpu.ops import CpuOps
from apcbatch.kernels.cpu.short_conv import FusedShortConv
from apcbatch.kernels.cpu.stack import FusedStack


class CpuBackend(CpuOps, BackendOf[PackedLinear]):
    """See apcbatch.kernels.backend."""

    exact = True

    arithmetic = staticmethod(processor.numerics)
    pack_linear = staticmethod(pack_linear)
    kinds: ClassVar[Mapping[str, KindOnDevice]] = {
        "mamba": KindOnDevice(FusedMamba),
        "mamba2": KindOnDevice(FusedHeadMixer),
        "delta": KindOnDevice(FusedHeadMixer),
        "short_conv": KindOnDevice(FusedShortConv),
        "attention": KindOnDevice(FusedAttention),
        "mlp": KindOnDevice(FusedMlp),
        "mixture": KindOnDevice(FusedMixture),
    }
    pass_stack = staticmethod(FusedStack)
