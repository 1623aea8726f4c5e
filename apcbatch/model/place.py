"""Where a model runs: the device, the arena on it, the model over the arena.

Must not know: requests, snapshots.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import torch

from apcbatch.errors import UsageError
from apcbatch.kernels.cuda import extension as cuda
from apcbatch.kernels.ops import Backend
from apcbatch.layout import StateLayout
from apcbatch.model.arena import StateArena
from apcbatch.model.causal_lm import CausalLM
from apcbatch.model.graphs import GraphedLM
from apcbatch.model.hf_config import ModelConfig


def choose_device(name: str) -> torch.device:
    """`cpu`; `cuda`, the current device; `auto`, CUDA where torch finds one and the kernels are built. UsageError."""
    if name not in ("auto", "cpu", "cuda"):
        raise UsageError(f"device is {name!r}; expected auto, cpu or cuda")
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no CUDA device; give --device cpu, or see what nvidia-smi says")
    try:
        cuda.extension()
    except RuntimeError as error:
        if name == "auto":
            return torch.device("cpu")
        raise UsageError(f"--device cuda: {error}") from None
    return torch.device("cuda", torch.cuda.current_device())


def ran_out_of_memory(error: Exception) -> bool:
    """Whether an error says that the host or the device has no more memory; torch has no type of its own for the
    host's."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "DefaultCPUAllocator" in str(error)


def make_arena(layout: StateLayout, num_slots: int, num_pages: int, device: torch.device) -> StateArena:
    """The arena; UsageError where the memory is too small for it."""
    needed = num_slots * layout.slot_bytes + num_pages * layout.page_bytes
    states = f"the {num_slots} states and snapshots and {num_pages} pages of KV need {needed / 2**30:.1f} GiB"
    remedy = "give a smaller --pool-size or --max-running"
    try:
        if needed > sys.maxsize:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return StateArena(layout, num_slots, num_pages, device)
    except OSError as error:
        raise UsageError(f"{states}, which the system does not give ({error.strerror}); {remedy}") from None
    except torch.OutOfMemoryError:
        free, _ = torch.cuda.mem_get_info(device)
        raise UsageError(f"{states} on the device and {free / 2**30:.1f} GiB are free; {remedy}") from None


def load_model(
    folder: Path, config: ModelConfig, dtype: torch.dtype, arena: StateArena, backend: Backend
) -> CausalLM | GraphedLM:
    """The model with its weights on the arena's device. ModelError, UsageError."""
    try:
        model = CausalLM(folder, config, dtype, arena, backend)
    except (MemoryError, RuntimeError) as error:
        if not ran_out_of_memory(error):
            raise
        remedy = " or --device cpu" if arena.device.type == "cuda" else ", or run where there is more memory"
        raise UsageError(
            f"the model's weights do not fit the memory beside the states; give a smaller --pool-size{remedy}"
        ) from None
    return model if arena.device.type == "cpu" else GraphedLM(model, arena.device)
