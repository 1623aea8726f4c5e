"""Set the instruction set and the number of threads of the CPU kernels, and name the arithmetic.

The arithmetic depends on the instruction set. The number of threads changes no bit of any result.
"""

from __future__ import annotations

import torch

from apcbatch import _C

# Increment with each change to a CPU kernel that changes a bit of any result. Snapshots of the old arithmetic then no
# longer match.
NUMERICS_VERSION = 1


def isa() -> str:
    """Return the instruction set in use, one of `available_isas`."""
    return _C.isa()


def available_isas() -> list[str]:
    """Return the instruction sets that the processor and the operating system support, the most basic first."""
    return _C.available_isas()


def set_isa(name: str) -> None:
    """Switch all threads to another instruction set. Raises ValueError if it is not one of `available_isas`."""
    if not _C.set_isa(name):
        raise ValueError(
            f"the instruction set must be one of those of this processor, {', '.join(available_isas())}; it is {name!r}"
        )


def numerics(dtype: torch.dtype) -> str:
    """Name the arithmetic of weights of this dtype under the instruction set in use. Raises ValueError unless the
    dtype is float32 or bfloat16.

    float32 arithmetic is the same on all instruction sets. bfloat16 weights are widened to float32 ("bf16-widen"),
    except on avx512bf16 ("bf16-dp") and amx ("bf16-amx"), whose products round differently. csrc/instruction_sets.h
    has the word for each instruction set.
    """
    if dtype == torch.float32:
        return f"f32-fma-{NUMERICS_VERSION}"
    if dtype != torch.bfloat16:
        raise ValueError(f"weights must be float32 or bfloat16; they are {dtype}")
    return f"bf16-{_C.isa_product()}-{NUMERICS_VERSION}"


def num_threads() -> int:
    """Return the number of threads that a kernel may use: torch's setting."""
    return torch.get_num_threads()


def set_threads(count: int) -> None:
    """Set the number of threads of the whole process. Raises ValueError if it is less than 1."""
    if count < 1:
        raise ValueError(f"the kernels need at least one thread; asked for are {count}")
    torch.set_num_threads(count)
