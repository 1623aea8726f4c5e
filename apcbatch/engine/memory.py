"""Compute the memory of an engine before it allocates any: its maximum, and the use by the requests of an input. The
sizes of the weights are in checkpoint_sizes.py.

`MemoryPlan` also gives the engine the sizes of its arena, so that the plan and the allocation are the same. On the host
memory is taken only as it is used, so each part of the maximum is an upper bound. On a device the arena is allocated
whole. Importing this module does not load torch.

In a model with attention a pool of P bytes stands for three reservations: P bytes of slots, for snapshots that have
little KV; P bytes of pages, for those that are nearly all KV; and P bytes of pages for the KV of running requests. The
first two are never full at once, so that on the host, where the rest is not touched, they fill P bytes together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from apcbatch.config import Config
from apcbatch.display import counted
from apcbatch.draft_sources import draft_sources
from apcbatch.engine.checkpoint_sizes import CheckpointSizes, checkpoint_sizes, smaller_sizes, weights_in
from apcbatch.errors import UsageError
from apcbatch.layout import DTYPE_BYTES, PAGE_TOKENS, StateLayout
from apcbatch.model.hf_config import ModelConfig
from apcbatch.option_values import format_size, rounded_size

MAX_SNAPSHOT_SLOTS = 1 << 20
FEWEST_DRAFTED = 64  # lower bound of the maximum drafted tokens of a pass
QUEUED_SNAPSHOTS = 32  # that the store's queue has room for: one of each sequence of a pass
HOST_QUEUE_BYTES, DEVICE_QUEUE_BYTES = 256 << 20, 1 << 30  # at least, if the states are small
LEAST_POOL_BYTES = 64 << 20  # of a --pool-size that an error proposes

# Python, torch for the CPU and the package: measured in a run of one short prompt, without weights and tokenizer
PROGRAM_BYTES = 248 << 20
MOST_PROGRAM_BYTES = 300 << 20
# Bytes for each byte of tokenizer.json, while a run has it and while it is read: measured at 0.25, 2 and 6.6 MB
TOKENIZER_BYTES, MOST_TOKENIZER_BYTES = 17, 28
DEVICE_PROGRAM_BYTES = 256 << 20  # kernels, captured graphs, and workspaces of the libraries, beyond the CUDA context
PROMPT_BYTES = 20  # of a token of a window: in its tree, its plan and its requests
HISTORY_BYTES = 44  # of a token in the draft index
READ_AHEAD_SHARE = 16  # of the weights: twice AHEAD_SHARE of model/weights.py, read ahead and kept for the next tensor
FLOAT = 4  # bytes
# Rows of logits on a device for each row of a pass: its own, those of captured graphs, copies while tokens are drawn.
LOGITS_ROWS = 7


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


@dataclass(frozen=True)
class Use:
    """What the requests of an input use at their peak. requests: that run at once. snapshot_bytes: of the snapshots
    that are kept at once, without KV. kv_bytes: KV pages of both. pass_tokens: tokens of the largest pass.
    window_tokens: tokens of the largest window, as it counts them. input_tokens: distinct tokens of the input.
    episodes: open live episodes. Each has two states, of its prompt and of its answer; those of its earlier turns stay
    as long as the pool has room."""

    requests: int
    snapshot_bytes: int
    kv_bytes: int
    pass_tokens: int
    window_tokens: int
    input_tokens: int
    episodes: int = 0


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Memory that an engine may take, on the host or on all of its devices together.

    sizes: None if the checkpoint's weights are not here. gpus: number of devices; 1 on the host. pool_bytes,
    draft_bytes: capacities of the snapshot pool and of the draft index. keeps: whether snapshots are kept. has_store:
    whether they are also written to a store. drafts: whether answers are drafted. smaller: returns, for each remedy
    with which less of the weights is in memory, their sizes: see smaller_sizes.
    """

    layout: StateLayout
    dtype: str
    sizes: CheckpointSizes | None
    vocab_size: int
    hidden_size: int
    gpus: int
    max_running: int
    max_batch_tokens: int
    pool_bytes: int
    keeps: bool
    has_store: bool
    drafts: bool
    draft_bytes: int
    on_host: bool
    smaller: Callable[[], Mapping[str, CheckpointSizes]] = dict

    @classmethod
    def of(cls, config: Config, layout: StateLayout, model: ModelConfig, folder: Path, device: str) -> MemoryPlan:
        """Plan the memory of a run. folder: of the model. device: see Keeping. Raises UsageError for an invalid
        --draft."""
        given = (folder, model, config.weights, device, config.dtype, weights_in(folder, model))
        return cls(
            layout=layout,
            dtype=config.dtype,
            sizes=checkpoint_sizes(*given, config.adapter),
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            gpus=config.gpus,
            max_running=config.max_running,
            max_batch_tokens=config.max_batch_tokens,
            pool_bytes=config.pool_size,
            keeps=config.policy != "none",
            has_store=config.store is not None,
            drafts=bool(draft_sources(config)),
            draft_bytes=config.draft_memory,
            on_host=device == "cpu",
            smaller=dict if config.adapter else partial(smaller_sizes, *given),
        )

    @property
    def num_live(self) -> int:
        """Slots of running sequences."""
        return num_live_slots(self.gpus * self.max_running)

    @property
    def num_snapshots(self) -> int:
        """Slots of snapshots."""
        return min(self.pool_bytes // self.layout.slot_bytes, MAX_SNAPSHOT_SLOTS) if self.keeps else 0

    @property
    def most_drafted(self) -> int:
        """Maximum drafted tokens of a pass."""
        return max(FEWEST_DRAFTED, 2 * self.num_live) if self.drafts else 0

    @property
    def num_draft_states(self) -> int:
        """Slots for the states of drafted tokens; none on the host, where a pass keeps inputs instead."""
        if self.on_host:
            return 0
        return min(self.most_drafted, max(FEWEST_DRAFTED, self.pool_bytes // 4 // max(1, self.layout.slot_bytes)))

    @property
    def num_pages(self) -> int:
        """Pages of KV: running sequences and snapshots may each take the pool's size, and a sequence that starts one
        page more."""
        return 2 * self.pool_bytes // self.layout.page_bytes + 1 if self.layout.has_tokens else 0

    @property
    def parts(self) -> dict[str, int]:
        """Return the maximum of each part in bytes, by its name. Parts of 0 bytes are left out."""
        slot, pages = self.layout.slot_bytes, self.num_pages * self.layout.page_bytes
        slots, rows = self.num_snapshots * slot, self.num_live + self.most_drafted
        found = {"weights": self._weights, f"{self.num_live} running states": self.num_live * slot}
        if self.on_host:
            layers = len({part.layer for part in self.layout.parts})
            kept_inputs = FLOAT * self.most_drafted * layers * (self.sizes.width if self.sizes else 0)
            queue = queue_bytes(slot, self.pool_bytes, True) if self.has_store and self.keeps and pages else 0
            found |= {
                "snapshots": self.pool_bytes if pages and self.keeps else slots,
                "KV of running requests": self.pool_bytes if pages else 0,
                "KV waiting for the store": queue,
                "drafts": self.draft_bytes + kept_inputs if self.drafts else 0,
                "working memory": self._working(self.max_batch_tokens + rows, rows),
                "Python, torch and the tokenizer": MOST_PROGRAM_BYTES + MOST_TOKENIZER_BYTES * self._tokenizer,
            }
        else:
            found |= {
                "states of drafts": self.num_draft_states * slot,
                "snapshots": slots,
                "KV of snapshots and running requests": pages,
                "working memory": self.gpus * self._working(self.max_batch_tokens + rows, LOGITS_ROWS * rows),
                "kernels and graphs": self.gpus * DEVICE_PROGRAM_BYTES,
            }
        return {name: size for name, size in found.items() if size}

    @property
    def total(self) -> int:
        """Bytes of all parts at their maximum."""
        return sum(self.parts.values())

    def most(self, use: Use) -> dict[str, int]:
        """Return the maximum of each part in bytes; on the host with the prompts of an input."""
        return self.parts | ({"prompts": PROMPT_BYTES * use.window_tokens} if self.on_host else {})

    def used(self, use: Use) -> dict[str, int]:
        """Return the bytes that a run of an input uses, by part. On a device these are the maximum, since the arena is
        allocated whole. Parts of 0 bytes are left out."""
        if not self.on_host:
            return self.parts
        rows = min(self.num_live, use.requests)
        history = HISTORY_BYTES * use.input_tokens if self.drafts else 0
        episodes = f"two states of each of {counted(use.episodes, 'open episode')}"
        found = {
            "weights": self._weights,
            "live states": rows * self.layout.slot_bytes,
            episodes if use.episodes else "planned snapshots": min(
                use.snapshot_bytes, self.num_snapshots * self.layout.slot_bytes
            ),
            "KV": min(use.kv_bytes, self.num_pages * self.layout.page_bytes),
            "prompts": PROMPT_BYTES * use.window_tokens,
            "drafts": min(history, self.draft_bytes),
            "working memory": self._working(min(use.pass_tokens, self.max_batch_tokens), rows),
            "Python, torch and the tokenizer": PROGRAM_BYTES + TOKENIZER_BYTES * self._tokenizer,
        }
        return {name: size for name, size in found.items() if size}

    @property
    def _weights(self) -> int:
        sizes = self.sizes
        return (sizes.num_weights - sizes.num_kept) * DTYPE_BYTES[self.dtype] + sizes.kept_bytes if sizes else 0

    @property
    def _tokenizer(self) -> int:
        return self.sizes.tokenizer_bytes if self.sizes else 0

    def _working(self, tokens: int, rows: int) -> int:
        """Return the bytes of a pass over `tokens` tokens with `rows` rows of logits, or what loading takes beside the
        weights if that is more, as its memory is then used by passes. A pass: the columns of the widest sub-block, the
        residual stream, its delta and its norm. Loading: what is read ahead, and a sub-block as it is read and again in
        one matrix, or the head, which is packed before the layers. Weights that an adapter is added to are read as
        float32, and its tensors stay on the host until all are."""
        if self.sizes is None:
            return 0
        one_pass = FLOAT * (tokens * (self.sizes.width + 3 * self.hidden_size) + rows * self.vocab_size)
        one_pass += 0 if self.on_host else DTYPE_BYTES["bfloat16"] * self.sizes.num_decoded
        packed = max(self.sizes.num_in_block, self.sizes.num_in_embedding - self.sizes.num_weights // 2)
        read, item = packed + self.sizes.num_weights // READ_AHEAD_SHARE, DTYPE_BYTES[self.dtype]
        loading = item * packed + (FLOAT if self.sizes.adapter_bytes else item) * read
        return max(one_pass, loading + (self.sizes.adapter_bytes if self.on_host else 0))

    def needs(self, limit_bytes: int, use: Use | None = None) -> str:
        """Return a text about the memory of a run: what it uses for an input, if that is known, and its maximum beside
        limit_bytes."""
        missing = "" if self.sizes else " without the weights, which are not here"
        most = self.parts if use is None else self.most(use)
        at_most = (
            f"at most {in_gib(sum(most.values()))} of {in_gib(limit_bytes)} GiB at --max-running {self.max_running}"
            f"{missing} ({_described(most)})"
        )
        if self.total > limit_bytes:
            at_most += f"; `run` would refuse that: give {self._remedy(limit_bytes, 1)}"
        if use is None or not self.on_host:
            return at_most
        used = self.used(use)
        return f"about {in_gib(sum(used.values()))} GiB ({_described(used)}), {at_most}"

    def _remedy(self, limit_bytes: int, visible: int) -> str:
        """Return each option that alone makes the run fit, or else those that together may do so."""
        plans = {
            f"{remedy} (weights {in_gib(plan._weights)} GiB)": plan
            for remedy, sizes in self.smaller().items()
            if (plan := replace(self, sizes=sizes))._weights < self._weights
        }
        alone = list(self._remedies(limit_bytes, visible))
        alone += [remedy for remedy, plan in plans.items() if plan.total <= limit_bytes][:1]
        if alone:
            return " or ".join(alone)
        together = ["a smaller --max-running and --pool-size", *["--dtype bfloat16"] * (self.dtype == "float32")]
        return " and ".join(together + [remedy for remedy, plan in plans.items() if plan._weights < limit_bytes][:1])

    def check(self, limit_bytes: int, where: str, visible: int = 1) -> None:
        """Raise UsageError if the total exceeds limit_bytes. The error names each option that alone makes the run fit.
        where: beginning of the sentence about the limit, such as `the device has`. visible: number of devices like
        these that the process sees."""
        if self.total <= limit_bytes:
            return
        raise UsageError(
            f"the run may take at most {in_gib(self.total)} GiB, and {where} {in_gib(limit_bytes)} GiB: "
            f"{_described(self.parts)}; give {self._remedy(limit_bytes, visible)}"
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

    def _remedies(self, limit_bytes: int, visible: int) -> Iterator[str]:
        for gpus in range(self.gpus + 1, visible + 1):
            if replace(self, gpus=gpus).total <= limit_bytes // self.gpus * gpus:
                yield f"--gpus {gpus}"
                break
        if self.dtype == "float32" and replace(self, dtype="bfloat16").total <= limit_bytes:
            yield "--dtype bfloat16"
        pool = _largest(self.pool_bytes, LEAST_POOL_BYTES, lambda n: replace(self, pool_bytes=n).total <= limit_bytes)
        if pool is not None:
            yield f"--pool-size {format_size(pool >> 20 << 20)}"
        live = _largest(self.max_running, 1, lambda n: replace(self, max_running=n).total <= limit_bytes)
        if live is not None:
            yield f"--max-running {live}"


def in_gib(num_bytes: int) -> str:
    """Return a size in GiB with two decimals."""
    return f"{num_bytes / 2**30:.2f}"


def _described(parts: Mapping[str, int]) -> str:
    """List the parts that are not 0 in the unit of the text."""
    shown = {name: in_gib(size) for name, size in parts.items()}
    return ", ".join(f"{name} {size} GiB" for name, size in shown.items() if float(size))


def _largest(given: int, least: int, fits: Callable[[int], bool]) -> int | None:
    """Return the largest number that fits among half of `given`, a quarter of it and so on, or None if none of at least
    `least` fits."""
    value = given // 2
    while value >= least:
        if fits(value):
            return value
        value //= 2
    return None
