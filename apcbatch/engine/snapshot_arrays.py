"""Convert snapshots to arrays for the store, and stored arrays to snapshots in the pool.

For models with attention a chain of links gives the whole KV; each link has the KV of the tokens since the previous
one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from apcbatch.engine.pool import NO_PAGES, PageArray, PagePool, Snapshot, SnapshotPool
from apcbatch.layout import PAGE_TOKENS, Extent, Stack, StateLayout
from apcbatch.model.arena import Mark, Tensors
from apcbatch.model.pipeline_arena import Arena
from apcbatch.store import StoredSnapshot


def parts_of(arena: Arena, snapshot: Snapshot, begin: int) -> Tensors:
    """Return a snapshot by role on the host: its state (a view of the slot where that is on the host), and the KV of
    the tokens from `begin` on."""
    if arena.on_host:
        parts = arena.host_slot(snapshot.slot)
    else:
        parts = slot_in_memory(arena.layout)
        arena.copy_out(snapshot.slot, parts, arena.mark())
    if arena.layout.has_tokens:
        parts |= arena.gather(torch.from_numpy(snapshot.pages), begin, snapshot.position)
    return parts


def assemble(
    arena: Arena,
    pool: SnapshotPool,
    pages: PagePool,
    base: Snapshot | None,
    links: Sequence[StoredSnapshot],
    *,
    awaited: bool,
    reads: int = 0,
) -> Snapshot | None:
    """Make a pool entry from the KV of `base` and of each link after it, and the recurrent state of the last link.
    Return None if it does not fit.

    awaited, reads: as in SnapshotPool.insert.
    """
    last = links[-1]
    if base is not None:
        base.pins += 1
    slot = pool.reserve(last.key, awaited)
    table = None if slot is None else _chain_pages(arena, base, last.position, pages)
    if base is not None:
        base.pins -= 1
    if slot is None:
        return None
    if table is None:
        pool.cancel(last.key, slot)
        return None
    for link in links if arena.layout.has_tokens else ():
        arena.scatter(torch.from_numpy(table), link.parent_position, as_tensors(link.arrays))
    arena.copy_in(slot, as_tensors(last.arrays)).wait()
    snapshot = pool.insert(last.key, last.position, slot, table, reads, awaited)
    pages.release(table)  # the pool took its own references
    return snapshot


def _chain_pages(arena: Arena, base: Snapshot | None, end: int, pages: PagePool) -> PageArray | None:
    """Return pages for `end` tokens: the full pages of `base` shared, its partial page copied, the rest new. None if
    they do not fit."""
    if not arena.layout.has_tokens:
        return NO_PAGES
    full = base.pages[: base.position // PAGE_TOKENS] if base else NO_PAGES
    missing = -(-end // PAGE_TOKENS) - len(full)
    if pages.num_free < missing:
        return None
    pages.share(full)
    added = np.array([pages.allocate() for _ in range(missing)], np.int64)
    if base is not None and len(full) < len(base.pages):
        arena.copy_page(int(base.pages[-1]), int(added[0]))
    return np.concatenate([full, added])


def as_arrays(parts: Mapping[str, torch.Tensor]) -> dict[str, npt.NDArray[Any]]:
    """Convert tensors to the store's arrays, by role: on the host, bfloat16 as its 16 bits; views where possible."""
    host = {role: tensor.cpu() for role, tensor in parts.items()}
    return {
        role: (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
        for role, tensor in host.items()
    }


def as_tensors(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, torch.Tensor]:
    """Convert the store's arrays, by role, to tensors of the arena's dtypes."""
    tensors = {role: torch.from_numpy(array) for role, array in arrays.items()}
    return {
        role: tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor
        for role, tensor in tensors.items()
    }


ALIGNMENT = 256  # bytes


def slot_in_memory(layout: StateLayout, memory: torch.Tensor | None = None) -> Tensors:
    """Return uninitialised parts of a slot on the host, by role, (layers, *the part's axes). memory: uint8 of
    `staged_bytes` to use; None for new memory."""
    memory = torch.empty(staged_bytes(layout), dtype=torch.uint8) if memory is None else memory
    parts, begin = {}, 0
    for stack in _stacks(layout):
        shape, dtype = _shape(stack), getattr(torch, stack.dtype)
        size = math.prod(shape) * dtype.itemsize
        parts[stack.role.name] = memory[begin : begin + size].view(dtype).view(shape)
        begin += _aligned(size)
    return parts


def staged_bytes(layout: StateLayout) -> int:
    """Return the bytes that a slot takes on the host, each part at a multiple of ALIGNMENT."""
    return sum(_aligned(math.prod(_shape(stack)) * getattr(torch, stack.dtype).itemsize) for stack in _stacks(layout))


class Staging:
    """Staging memory: `num_buffers` buffers of one slot each. Thread-safe."""

    def __init__(self, layout: StateLayout, num_buffers: int) -> None:
        self.num_buffers = num_buffers
        self._layout = layout
        self._free: SimpleQueue[tuple[Tensors, Mark | None]] = SimpleQueue()
        self._making, self._is_made = Lock(), False

    def take(self) -> Tensors:
        """Return a free buffer, with each part of a slot by role; wait until there is one."""
        self.prepare()
        buffer, read = self._free.get()
        if read is not None:
            read.wait()
        return buffer

    def prepare(self) -> None:
        """Allocate the buffers, once."""
        with self._making:
            if not self._is_made:
                self._make()

    def give_back(self, buffer: Tensors, read: Mark | None = None) -> None:
        """Free a buffer. read: event after which the device no longer reads it; None if it does not."""
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
    """Allocate (num_bytes,) uint8, pinned if there is a CUDA device and the system allows it."""
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    except RuntimeError:
        return torch.empty(num_bytes, dtype=torch.uint8)
