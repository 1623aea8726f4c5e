"""The instruction set that the CPU kernels use, and the name of the arithmetic that follows from it."""

from __future__ import annotations

import torch

from apcbatch import _C

# Counts up with every change of any CPU kernel that changes a bit of any result: snapshots made by other
# arithmetic are then never found.
NUMERICS_VERSION = 1


def isa() -> str:
    """The instruction set in use, one of `available_isas`."""
    return _C.isa()


def available_isas() -> list[str]:
    """Those that this processor has and its system grants, the plainest first."""
    return _C.available_isas()


def set_isa(name: str) -> None:
    """Use another instruction set from now on, in every thread. ValueError if the processor lacks it."""
    if not _C.set_isa(name):
        raise ValueError(
            f"the instruction set must be one of those of this processor, {', '.join(available_isas())}; it is {name!r}"
        )


def numerics(dtype: torch.dtype) -> str:
    """The arithmetic of weights of this dtype, float32 or bfloat16, under the instruction set in use.

    float32 is the same on all of them. bfloat16 weights are widened to float32 ("bf16-widen"), but for avx512bf16
    ("bf16-dp") and amx ("bf16-amx"), whose products round differently: csrc/instruction_sets.h has the word of each.
    """
    if dtype == torch.float32:
        return f"f32-fma-{NUMERICS_VERSION}"
    if dtype != torch.bfloat16:
        raise ValueError(f"weights must be float32 or bfloat16; they are {dtype}")
    return f"bf16-{_C.isa_product()}-{NUMERICS_VERSION}"
