"""Host memory that the slots of a device pass through on their way to files and back: buffers that are used again.

Must not know: keys, files, which way a slot goes. They are pinned, so that the bus takes them at its full speed and
beside the passes; where the system pins nothing, they are plain memory and only slower. All are made at once: pinning
takes milliseconds. Invariant: a buffer is handed out only when the copy that was to
read it has ended.
"""

from __future__ import annotations

import math
from queue import SimpleQueue
from threading import Lock

import torch

from apcbatch.layout import Extent, Stack, StateLayout
from apcbatch.model.arena import Mark, Tensors

ALIGNMENT = 256  # bytes


def slot_in_memory(layout: StateLayout, memory: torch.Tensor | None = None) -> Tensors:
    """The parts of a slot on the host, by role, (layers, *the part's axes), their content undefined. memory: uint8, of
    `staged_bytes`, that they lie in; None for new memory."""
    memory = torch.empty(staged_bytes(layout), dtype=torch.uint8) if memory is None else memory
    parts, begin = {}, 0
    for stack in _stacks(layout):
        shape, dtype = _shape(stack), getattr(torch, stack.dtype)
        size = math.prod(shape) * dtype.itemsize
        parts[stack.role.name] = memory[begin : begin + size].view(dtype).view(shape)
        begin += _aligned(size)
    return parts


def staged_bytes(layout: StateLayout) -> int:
    """Bytes that a slot takes on the host, each part at a multiple of ALIGNMENT."""
    return sum(_aligned(math.prod(_shape(stack)) * getattr(torch, stack.dtype).itemsize) for stack in _stacks(layout))


class Staging:
    """`num_buffers` buffers of one slot each. Any thread may call it."""

    def __init__(self, layout: StateLayout, num_buffers: int) -> None:
        self.num_buffers = num_buffers
        self._layout = layout
        self._free: SimpleQueue[tuple[Tensors, Mark | None]] = SimpleQueue()
        self._making, self._is_made = Lock(), False

    def take(self) -> Tensors:
        """A buffer, by role the memory for a slot's part; waits until one is free."""
        self.prepare()
        buffer, read = self._free.get()
        if read is not None:
            read.wait()
        return buffer

    def prepare(self) -> None:
        """Make the buffers, if that was not done."""
        with self._making:
            if not self._is_made:
                self._make()

    def give_back(self, buffer: Tensors, read: Mark | None = None) -> None:
        """Let a buffer be used again. read: when the device has read it, if it still does."""
        self._free.put((buffer, read))

    def _make(self) -> None:
        for memory in _pinned(self.num_buffers * staged_bytes(self._layout)).view(self.num_buffers, -1):
            self._free.put((slot_in_memory(self._layout, memory), None))
        self._is_made = True


def _stacks(layout: StateLayout) -> list[Stack]:
    return [stack for stack in layout.stacks if stack.role.extent is not Extent.TOKENS]


def _shape(stack: Stack) -> tuple[int, ...]:
    return (len(stack.layers), *(size for size in stack.shape if size is not None))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _pinned(num_bytes: int) -> torch.Tensor:
    """(num_bytes,) uint8, pinned if there is a device and the system pins so much."""
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    except RuntimeError:
        return torch.empty(num_bytes, dtype=torch.uint8)
