"""Compute the maximum memory of an engine before it allocates anything.

Memory is taken only as it is used, so each part is an upper bound. In a model with attention the pool's size counts
twice: running requests may hold as much KV as the pool may hold snapshots. Importing this module does not load torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from apcbatch.config import Config
from apcbatch.draft_sources import draft_sources
from apcbatch.errors import ModelError, UsageError
from apcbatch.layout import DTYPE_BYTES, PAGE_TOKENS, StateLayout
from apcbatch.model.families import family_of
from apcbatch.model.hf_config import ModelConfig
from apcbatch.model.quantization import FLOATING
from apcbatch.model.weight_files import WeightFiles
from apcbatch.option_values import format_size, rounded_size

QUEUED_SNAPSHOTS = 32  # that the store's queue has room for: one of each sequence of a pass
HOST_QUEUE_BYTES, DEVICE_QUEUE_BYTES = 256 << 20, 1 << 30  # at least, if the states are small
PROGRAM_BYTES = 300 << 20  # Python, torch, the tokenizer
LEAST_POOL_BYTES = 64 << 20  # of a --pool-size that an error proposes


def num_live_slots(max_running: int) -> int:
    """Return the number of slots of live states: max_running, but at least two. A prompt with several answers needs
    two: one holds the state at its end, while an answer runs in the other."""
    return max(max_running, 2)


def queue_bytes(slot_bytes: int, pool_bytes: int, on_host: bool) -> int:
    """Return the size of the store's queue in bytes: the size of QUEUED_SNAPSHOTS states, within bounds. On the host:
    at most half of the pool, but at least HOST_QUEUE_BYTES. On a device: at least DEVICE_QUEUE_BYTES, but at most a
    quarter of the pool, since queued states occupy its slots."""
    wanted = QUEUED_SNAPSHOTS * slot_bytes
    if on_host:
        return max(HOST_QUEUE_BYTES, min(wanted, pool_bytes // 2))
    return min(max(DEVICE_QUEUE_BYTES, wanted), pool_bytes // 4)


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Memory that an engine may take, on the host or on all of its devices together.

    num_weights: number of weights in the checkpoint; None if they are not here. num_live: number of slots of running
    sequences. draft_states: number of slots for the states of drafted tokens. pool_bytes, draft_bytes: capacities of
    the snapshot pool and of the draft index. keeps: whether snapshots are kept. has_store: whether they are also
    written to a store.
    """

    layout: StateLayout
    dtype: str
    num_weights: int | None
    num_live: int
    draft_states: int = 0
    pool_bytes: int
    keeps: bool
    has_store: bool
    draft_bytes: int
    on_host: bool = True

    @classmethod
    def of(cls, config: Config, layout: StateLayout, num_weights: int | None, on_host: bool = True) -> MemoryPlan:
        """Plan the memory of a run. On a device, the states of drafted tokens are not counted. Raises UsageError for an
        invalid --draft."""
        return cls(
            layout=layout,
            dtype=config.dtype,
            num_weights=num_weights,
            num_live=num_live_slots(config.gpus * config.max_running),
            pool_bytes=config.pool_size,
            keeps=config.policy != "none",
            has_store=config.store is not None,
            draft_bytes=config.draft_memory if draft_sources(config) else 0,
            on_host=on_host,
        )

    @property
    def parts(self) -> dict[str, int]:
        """Return the size of each part in bytes, by its name. Parts of 0 bytes are left out."""
        slot, has_kv = self.layout.slot_bytes, self.layout.has_tokens
        snapshots = self.pool_bytes if has_kv else self.pool_bytes // max(1, slot) * slot
        queue = queue_bytes(slot, self.pool_bytes, True) if self.has_store and self.keeps and has_kv else 0
        found = {
            "weights": (self.num_weights or 0) * DTYPE_BYTES[self.dtype],
            f"{self.num_live} running states": self.num_live * slot,
            "states of drafts": self.draft_states * slot,
            "snapshots": snapshots if self.keeps else 0,
            "KV of running requests": self.pool_bytes if has_kv else 0,
        }
        if self.on_host:
            found |= {
                "KV waiting for the store": queue,
                "drafts": self.draft_bytes,
                "Python and torch": PROGRAM_BYTES,
            }
        return {name: size for name, size in found.items() if size}

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    def needs(self, max_running: int, limit_bytes: int) -> str:
        """Return a text that compares the total with limit_bytes and lists the parts. max_running: value of
        --max-running."""
        missing = "" if self.num_weights else " without the weights, which are not here"
        total, limit = in_gib(self.total), in_gib(limit_bytes)
        return f"up to {total} of {limit} GiB at --max-running {max_running}{missing}: {self._described()}"

    def _described(self) -> str:
        return ", ".join(f"{name} {in_gib(size)} GiB" for name, size in self.parts.items())

    def check(self, limit_bytes: int, where: str) -> None:
        """Raise UsageError if the total exceeds limit_bytes. The error names each option that alone makes the run fit.
        where: beginning of the sentence about the limit, such as `the device has`."""
        if self.total <= limit_bytes:
            return
        remedies = list(self._remedies(limit_bytes))
        remedy = " or ".join(remedies) or (
            "a smaller --max-running and --pool-size" + " and --dtype bfloat16" * (self.dtype == "float32")
        )
        raise UsageError(
            f"the run may need {in_gib(self.total)} GiB, and {where} {in_gib(limit_bytes)} GiB: {self._described()}; "
            f"give {remedy}"
        )

    def check_pool(self, warn: Callable[[str], None]) -> None:
        """Raise UsageError if the pool has no room for the KV of any request; warn if it has none for a snapshot."""
        slot, page = self.layout.slot_bytes, self.layout.page_bytes
        if self.pool_bytes < page:
            raise UsageError(
                f"--pool-size {format_size(self.pool_bytes)} has no room for a request: the KV of up to {PAGE_TOKENS} "
                f"tokens takes {rounded_size(page)}; leave it out, or give {format_size(LEAST_POOL_BYTES)} or more"
            )
        if self.keeps and self.pool_bytes < slot + page:
            warn(
                f"--pool-size {format_size(self.pool_bytes)} has no room for a snapshot, which takes "
                f"{rounded_size(slot + page)} or more: no prefix is reused, as with --policy none"
            )

    def _remedies(self, limit_bytes: int) -> Iterator[str]:
        if self.dtype == "float32" and replace(self, dtype="bfloat16").total <= limit_bytes:
            yield "--dtype bfloat16"
        pool = _largest(self.pool_bytes, LEAST_POOL_BYTES, lambda n: replace(self, pool_bytes=n).total <= limit_bytes)
        if pool is not None:
            yield f"--pool-size {format_size(pool >> 20 << 20)}"
        live = _largest(self.num_live, 1, lambda n: replace(self, num_live=num_live_slots(n)).total <= limit_bytes)
        if live is not None:
            yield f"--max-running {live}"


def num_weights(folder: Path, config: ModelConfig) -> int | None:
    """Return the number of weights that are loaded, from the headers of the checkpoint's files. A tied head does not
    count. Return None if there are no such files, or one cannot be read."""
    family = family_of(config)
    try:
        with WeightFiles(folder) as files:
            return sum(
                math.prod(tensor.shape)
                for name, tensor in files.tensors.items()
                if tensor.dtype in FLOATING
                and not name.startswith(family.ignored)
                and not (config.tie_word_embeddings and name == f"{family.head}.weight")
            )
    except ModelError:
        return None


def in_gib(num_bytes: int) -> str:
    """Return a size in GiB with two decimals."""
    return f"{num_bytes / 2**30:.2f}"


def _largest(given: int, least: int, fits: Callable[[int], bool]) -> int | None:
    """Return the largest number that fits among half of `given`, a quarter of it and so on, or None if none of at least
    `least` fits."""
    value = given // 2
    while value >= least:
        if fits(value):
            return value
        value //= 2
    return None
