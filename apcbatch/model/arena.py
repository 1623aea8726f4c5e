"""The arena of states: every live state and every snapshot of a run, one allocation for each role of the layout.

The memory is reserved, not touched: a page of it becomes resident when a kernel first writes there. Huge pages are used
where the system has them, so that states are read and written with few TLB misses. On a device, slots are copied to and
from the host concurrently with the passes, on one stream per direction, since the bus transfers in both directions at
once.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from apcbatch.layout import PAGE_TOKENS, TOKEN_AXIS, Extent, Stack, StateLayout
from apcbatch.model.host_copies import Copies, finite_rows, largest

Tensors = dict[str, torch.Tensor]


class Mark(Protocol):
    """A point in the work submitted to the devices, like an event on a stream; `mark` of an arena records one."""

    def wait(self) -> None:
        """Block until the devices have reached this point. Any thread may call it."""


class StateArena:
    """Arena on one device. slots: by role, (num_slots, layers, *the part's axes). pages: by role of the per-token state
    (keys and values), (layers, *the part's axes) with (num_pages, PAGE_TOKENS) in place of the axis of tokens."""

    def __init__(self, layout: StateLayout, num_slots: int, num_pages: int, device: torch.device) -> None:
        self.layout, self.device = layout, device
        self._copies = Copies(device)
        self.slots: Tensors = {}
        self.pages: Tensors = {}
        self._token_dim: dict[str, int] = {}  # index of the token axis, which is two axes in `pages`
        for stack in layout.stacks:
            name, dtype = stack.role.name, getattr(torch, stack.dtype)
            if stack.role.extent is Extent.TOKENS:
                self._token_dim[name] = 1 + stack.role.axes.index(TOKEN_AXIS)
                self.pages[name] = _reserved(_shape(stack, num_pages, PAGE_TOKENS), dtype, device)
            else:
                self.slots[name] = _reserved((num_slots, *_shape(stack)), dtype, device)

    def layer(self, layer: int) -> Tensors:
        """Return one layer's parts by role, as views that its sub-blocks read and write: (num_slots, *the part's axes),
        or the layer's pages for per-token state."""
        views = {}
        for stack in self.layout.stacks:
            if layer in stack.layers:
                name, row = stack.role.name, stack.layers.index(layer)
                views[name] = self.pages[name][row] if name in self.pages else self.slots[name][:, row]
        return views

    def finite(self, slots: Sequence[int]) -> list[torch.Tensor]:
        """Check that the state of each slot has neither NaN nor infinity. Returns a list with one tensor (slots,) bool
        on the arena's device, possibly not computed yet; an empty list if there are no slots or no floating-point
        parts."""
        parts = [part for part in self.slots.values() if part.is_floating_point()]
        if not parts or not slots:
            return []
        if self.on_host:
            flags = [torch.cat([finite_rows(part[slot].view(1, -1)) for part in parts]).all() for slot in slots]
            return [torch.stack(flags)]
        sizes = [largest(part[slot]).float() for slot in slots for part in parts]
        return [torch.stack(sizes).view(len(slots), -1).isfinite().all(1)]

    @property
    def on_host(self) -> bool:
        """Whether slots lie in host memory, so that the host reads and writes them without a copy."""
        return self.device.type == "cpu"

    def host_slot(self, slot: int) -> Tensors:
        """Return the parts of a slot as views; for an arena on the host only."""
        return {name: part[slot] for name, part in self.slots.items()}

    def mark(self) -> Mark:
        """Return a mark after the work submitted to the device so far."""
        return self._copies.mark()

    def copy_out(self, slot: int, host: Tensors, after: Mark) -> None:
        """Copy a slot, as it is at a mark, to host memory; returns when the copy is complete. Any thread may call
        it."""
        self._copies.out([(host[name], part[slot]) for name, part in self.slots.items()], after)

    def copy_in(self, slot: int, host: Mapping[str, torch.Tensor]) -> Mark:
        """Begin to copy host tensors into a slot, ordered before all work submitted to the device later. `host` may
        change once the returned mark is reached. Names that the arena does not have are ignored."""
        return self._copies.into([(part[slot], host[name]) for name, part in self.slots.items()])

    def gather(self, pages: torch.Tensor, begin: int, end: int, after: Mark | None = None) -> Tensors:
        """Return the per-token state of tokens begin..end of the sequence whose page list is `pages` (n,) int64, as new
        tensors of end - begin tokens on the host: keys and values are (layers, 2, end - begin, kv heads, head_dim).
        after: copy the state as of this mark, concurrently with the passes; any thread may then call `gather`."""
        with self._copies.beside(after):
            return {name: part.cpu() for name, part in self._gathered(pages, begin, end).items()}

    def _gathered(self, pages: torch.Tensor, begin: int, end: int) -> Tensors:
        first = begin // PAGE_TOKENS
        chosen = pages[first : -(-end // PAGE_TOKENS)].to(self.device)
        gathered = {}
        for name, dim in self._token_dim.items():
            kept = self.pages[name].index_select(dim, chosen).flatten(dim, dim + 1)
            gathered[name] = kept.narrow(dim, begin - first * PAGE_TOKENS, end - begin).contiguous()
        return gathered

    def scatter(self, pages: torch.Tensor, begin: int, parts: Mapping[str, torch.Tensor]) -> None:
        """Write the result of `gather` as the tokens from `begin` on. Names that the arena does not have are
        ignored."""
        for name, dim in self._token_dim.items():
            positions = torch.arange(begin, begin + parts[name].shape[dim])
            places = pages[positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
            flat = self.pages[name].flatten(dim, dim + 1)
            flat.index_copy_(dim, places.to(self.device), parts[name].to(self.device))

    def copy_page(self, source: int, target: int) -> None:
        """Copy page `source` to page `target`, in every layer."""
        for name, dim in self._token_dim.items():
            pages = self.pages[name]
            pages.select(dim, target).copy_(pages.select(dim, source))

    def shown(self, slot: int, pages: torch.Tensor, position: int) -> Tensors:
        """Return a snapshot in the form of the public API: by role, new tensors on the host with the axis of layers
        first, then the role's axes in shown_order. Per-token state is included only if the snapshot has pages."""
        parts = {name: part[slot].clone() for name, part in self.slots.items()}
        if len(pages):
            parts |= self.gather(pages, 0, position)
        orders = {stack.role.name: [0, *(1 + axis for axis in stack.role.shown_order)] for stack in self.layout.stacks}
        return {name: part.permute(orders[name]).contiguous().cpu() for name, part in parts.items()}


def _shape(stack: Stack, *tokens: int) -> tuple[int, ...]:
    """Return the shape of a role's parts over all layers, with `tokens` in place of the axis of tokens."""
    shape: tuple[int, ...] = (len(stack.layers),)
    for size in stack.shape:
        shape += tokens if size is None else (size,)
    return shape


def _reserved(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate memory without touching it. Raises OSError if the host has too little memory, torch.OutOfMemoryError if
    a CUDA device has too little."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not num_bytes:
        return torch.empty(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
