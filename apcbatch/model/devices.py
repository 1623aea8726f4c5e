"""Choose the device of a model, and make the arena and the model on it."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence

import torch

from apcbatch.cores import find_memory
from apcbatch.errors import UsageError
from apcbatch.kernels.backend import Backend
from apcbatch.kernels.cpu.backend import CpuBackend
from apcbatch.kernels.cuda import extension as cuda
from apcbatch.kernels.cuda.backend import CudaBackend
from apcbatch.kernels.processor import num_threads
from apcbatch.layout import StateLayout
from apcbatch.model.arena import StateArena
from apcbatch.model.causal_lm import CausalLM
from apcbatch.model.graphs import GraphedLM
from apcbatch.model.hf_config import ModelConfig
from apcbatch.model.pipeline import Model, SpreadLM, load_stages
from apcbatch.model.pipeline_arena import Arena, SpreadArena
from apcbatch.model.weights import Checkpoint


def choose_device(name: str) -> torch.device:
    """Choose a device by name: `cpu`; `cuda`, the current CUDA device; `auto`, CUDA if torch finds a device and the
    kernels are built. Raises UsageError."""
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


def choose_devices(name: str, gpus: int) -> list[torch.device]:
    """Choose the model's devices: one, or `gpus` CUDA devices for its layers. Raises UsageError."""
    device = choose_device(name)
    if gpus == 1:
        return [device]
    if device.type == "cpu":
        raise UsageError(
            f"--gpus {gpus} spreads a model over GPUs, and it is to run on the CPU; leave it out, or see what "
            "`apcbatch doctor --device cuda` says"
        )
    found = torch.cuda.device_count()
    if gpus > found:
        raise UsageError(
            f"--gpus {gpus}: {found} GPUs are visible to this process; give as many at most, or see what nvidia-smi "
            "and CUDA_VISIBLE_DEVICES say"
        )
    return [torch.device("cuda", number) for number in range(gpus)]


def ran_out_of_memory(error: Exception) -> bool:
    """Return whether an error means that the host or the device is out of memory. For the host, torch has no exception
    type, so the message decides."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "DefaultCPUAllocator" in str(error)


def backend_for(device: torch.device, exact: bool = True) -> Backend:
    """Return a new backend of the device, for one model.

    exact: on a CUDA device, accumulate every product in one fixed order, so that a row's bits do not depend on the rest
    of the batch. On the CPU every product is computed in this way.
    """
    return CudaBackend(device, exact) if device.type == "cuda" else CpuBackend()


def memory_of(devices: Sequence[torch.device]) -> tuple[int, str, int]:
    """Return the bytes of memory that a model on these devices may take, the beginning of a sentence about them, such
    as `the device has free`, and how many devices of their kind the process sees.

    On a device that is what is free, with what torch keeps without using it. On several: as many times the least of
    them, since each holds about as much of a model.
    """
    if devices[0].type == "cpu":
        return find_memory(), "this process may use", 1
    least = min(_free_on(device) for device in devices)
    where = "the device has free" if len(devices) == 1 else f"the {len(devices)} devices have free"
    return len(devices) * least, where, torch.cuda.device_count()


def _free_on(device: torch.device) -> int:
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def name_of_devices(devices: Sequence[torch.device]) -> str:
    """Return a name for devices of one kind: for GPUs their name and number, for the CPU the number of threads."""
    if devices[0].type == "cpu":
        return f"cpu, {num_threads()} threads"
    name = torch.cuda.get_device_name(devices[0])
    return name if len(devices) == 1 else f"{len(devices)} x {name}"


def make_arena(
    layout: StateLayout, num_slots: int, num_pages: int, devices: Sequence[torch.device], layers: Sequence[range]
) -> Arena:
    """Return an arena for the states of layers[i] on devices[i]. Raises UsageError if a device has too little
    memory."""
    needed = num_slots * layout.slot_bytes + num_pages * layout.page_bytes
    states = f"the {num_slots} states and snapshots and {num_pages} pages of KV need {needed / 2**30:.1f} GiB"
    remedy = "give a smaller --pool-size or --max-running"
    try:
        if needed > sys.maxsize:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        parts = [(layout.among(part), device) for part, device in zip(layers, devices, strict=True)]
        arenas = [StateArena(part, num_slots, num_pages, device) for part, device in parts]
        return arenas[0] if len(arenas) == 1 else SpreadArena(layout, arenas)
    except OSError as error:
        raise UsageError(f"{states}, which the system does not give ({error.strerror}); {remedy}") from None
    except torch.OutOfMemoryError:
        free = " and ".join(f"{torch.cuda.mem_get_info(device)[0] / 2**30:.1f} GiB" for device in devices)
        where = "the device" if len(devices) == 1 else f"{len(devices)} devices"
        raise UsageError(f"{states} on {where} and {free} are free; {remedy}") from None


def load_model(
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: torch.dtype,
    arena: Arena,
    layers: Sequence[range],
    *,
    exact: bool,
    passes: int,
) -> Model:
    """Load the model's weights onto the devices of the arena. passes: maximum number of passes in flight. Raises
    ModelError, UsageError."""
    try:
        if isinstance(arena, StateArena):
            backend = backend_for(arena.device, exact)
            model = CausalLM(checkpoint, config, dtype, arena, backend)
            return model if arena.device.type == "cpu" else GraphedLM(model, arena.device)
        devices = [stage.device for stage in arena.stages]
        backends = [backend_for(device, exact) for device in devices]
        loaded = load_stages(checkpoint, config, dtype, arena, layers, backends)
    except (MemoryError, RuntimeError) as error:
        if not ran_out_of_memory(error):
            raise
        on_cpu = isinstance(arena, StateArena) and arena.device.type == "cpu"
        remedy = ", or run where there is more memory" if on_cpu else ", more --gpus or --device cpu"
        raise UsageError(
            f"the model's weights do not fit the memory beside the states; give a smaller --pool-size{remedy}"
        ) from None
    return SpreadLM(
        [
            stage if device.type == "cpu" else GraphedLM(stage, device, passes)
            for stage, device in zip(loaded, devices, strict=True)
        ],
        devices,
    )
