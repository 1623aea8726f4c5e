"""Snapshots as arrays and back: one entry of the pool made from what was read, and a slot's parts for a writer.

Must not know: files, sequences, where the arrays come from. For models with attention a chain of links gives the whole
KV, each link the tokens since the one before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from apcbatch.engine.pages import NO_PAGES, PageArray, PagePool
from apcbatch.engine.pool import Snapshot, SnapshotPool
from apcbatch.engine.staging import slot_in_memory
from apcbatch.layout import PAGE_TOKENS
from apcbatch.model.arena import Tensors
from apcbatch.model.spread_arena import Arena
from apcbatch.store import StoredSnapshot


def parts_of(arena: Arena, snapshot: Snapshot, begin: int) -> Tensors:
    """A snapshot by role on the host: its slot itself if that lies there, and what is kept for the tokens from `begin`
    on."""
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
    """One pool entry: KV of `base` and of every link after it, recurrent state of the last one; None for no room.

    awaited, reads: as SnapshotPool.insert has them.
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
    pages.release(table)  # the pool holds its own references now
    return snapshot


def _chain_pages(arena: Arena, base: Snapshot | None, end: int, pages: PagePool) -> PageArray | None:
    """Pages for `end` tokens: those of `base` shared, its partial one copied, the rest new; None for no room."""
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
    """Tensors as the store takes them, by role: on the host, bfloat16 as its 16 bits; views where that is possible."""
    host = {role: tensor.cpu() for role, tensor in parts.items()}
    return {
        role: (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
        for role, tensor in host.items()
    }


def as_tensors(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, torch.Tensor]:
    """What the store gives, by role, as tensors of the arena's dtypes."""
    tensors = {role: torch.from_numpy(array) for role, array in arrays.items()}
    return {
        role: tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor
        for role, tensor in tensors.items()
    }
