"""The arena of states: every live state and every snapshot of a run, one allocation for each role of the layout.

Must not know: requests, keys, who owns a slot, what the roles mean. The memory is reserved, not touched: a page of it
becomes resident when a kernel first writes there, a huge page where the system has them, so that states are read and
written with few misses of the TLB. On a device, slots are copied to and from the host beside the passes, on streams of
their own, one for each direction: the bus has both.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from apcbatch.layout import PAGE_TOKENS, TOKEN_AXIS, Extent, Stack, StateLayout
from apcbatch.model.copies import Copies
from apcbatch.model.finite import finite_rows, largest

Tensors = dict[str, torch.Tensor]


class Mark(Protocol):
    """A point in what devices were asked to do; an arena's `mark` gives one."""

    def wait(self) -> None:
        """Return when they are there. Any thread may."""


class StateArena:
    """slots: by role, (num_slots, layers, *the part's axes). pages: by role of what is kept for each token, (layers,
    *the part's axes) with (num_pages, PAGE_TOKENS) in place of the tokens."""

    def __init__(self, layout: StateLayout, num_slots: int, num_pages: int, device: torch.device) -> None:
        self.layout, self.device = layout, device
        self._copies = Copies(device)
        self.slots: Tensors = {}
        self.pages: Tensors = {}
        self._token_dim: dict[str, int] = {}  # of the tensor with one axis of tokens; in `pages` it is two
        for stack in layout.stacks:
            name, dtype = stack.role.name, getattr(torch, stack.dtype)
            if stack.role.extent is Extent.TOKENS:
                self._token_dim[name] = 1 + stack.role.axes.index(TOKEN_AXIS)
                self.pages[name] = _reserved(_shape(stack, num_pages, PAGE_TOKENS), dtype, device)
            else:
                self.slots[name] = _reserved((num_slots, *_shape(stack)), dtype, device)

    def layer(self, layer: int) -> Tensors:
        """The parts of one layer, by role: (num_slots, ...) or the pages, as views that a mixer reads and writes."""
        views = {}
        for stack in self.layout.stacks:
            if layer in stack.layers:
                name, row = stack.role.name, stack.layers.index(layer)
                views[name] = self.pages[name][row] if name in self.pages else self.slots[name][:, row]
        return views

    def finite(self, slots: Sequence[int]) -> list[torch.Tensor]:
        """Whether the state of each slot holds neither NaN nor infinity: (slots,) bool on the arena's device, where it
        may still be on its way; an empty list where there is nothing to look at."""
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
        """Whether the host reads and writes slots where they lie."""
        return self.device.type == "cpu"

    def host_slot(self, slot: int) -> Tensors:
        """The parts of a slot itself, as views; for an arena that is on the host."""
        return {name: part[slot] for name, part in self.slots.items()}

    def mark(self) -> Mark:
        """What the device has been asked for until now."""
        return self._copies.mark()

    def copy_out(self, slot: int, host: Tensors, after: Mark) -> None:
        """Copy a slot to memory on the host as it is at a mark; returns when it is there. Any thread may call it."""
        self._copies.out([(host[name], part[slot]) for name, part in self.slots.items()], after)

    def copy_in(self, slot: int, host: Mapping[str, torch.Tensor]) -> Mark:
        """Begin to fill a slot, before whatever the device is asked for from now on; the mark says when `host` may
        change. Other names are left alone."""
        return self._copies.into([(part[slot], host[name]) for name, part in self.slots.items()])

    def gather(self, pages: torch.Tensor, begin: int, end: int, after: Mark | None = None) -> Tensors:
        """What is kept for tokens begin..end of the sequence whose page list is `pages` (n,) int64, as new tensors of
        end - begin tokens on the host: keys and values are (layers, 2, end - begin, kv heads, head_dim). after: as it
        is at a mark, beside the passes; any thread may call it so."""
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
        """Write what `gather` gives as the tokens from `begin` on. Other names are left alone."""
        for name, dim in self._token_dim.items():
            positions = torch.arange(begin, begin + parts[name].shape[dim])
            places = pages[positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
            flat = self.pages[name].flatten(dim, dim + 1)
            flat.index_copy_(dim, places.to(self.device), parts[name].to(self.device))

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page of every layer."""
        for name, dim in self._token_dim.items():
            pages = self.pages[name]
            pages.select(dim, target).copy_(pages.select(dim, source))

    def shown(self, slot: int, pages: torch.Tensor, position: int) -> Tensors:
        """A snapshot as the Python surface gives it: new tensors on the host, the layer first, then a role's axes in
        the order that it is shown in; what is kept for tokens only if the snapshot has pages."""
        parts = {name: part[slot].clone() for name, part in self.slots.items()}
        if len(pages):
            parts |= self.gather(pages, 0, position)
        orders = {stack.role.name: [0, *(1 + axis for axis in stack.role.shown_order)] for stack in self.layout.stacks}
        return {name: part.permute(orders[name]).contiguous().cpu() for name, part in parts.items()}


def _shape(stack: Stack, *tokens: int) -> tuple[int, ...]:
    """The shape of a role's parts over all layers, with `tokens` in place of the axis of tokens."""
    shape: tuple[int, ...] = (len(stack.layers),)
    for size in stack.shape:
        shape += tokens if size is None else (size,)
    return shape


def _reserved(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that was not written to. OSError where the system has none, torch.OutOfMemoryError for a CUDA device."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not num_bytes:
        return torch.empty(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
