"""Open an engine: check its options, and make its parts (devices, weights, arena, store, pool, scheduler)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from apcbatch.config import OPTIONS, Config
from apcbatch.cores import find_cores
from apcbatch.data.end_tokens import read_end_tokens
from apcbatch.data.model_files import model_files_digest
from apcbatch.draft_sources import draft_sources
from apcbatch.drafts.drafter import Drafts
from apcbatch.engine.admission import COST_ON_DEVICE
from apcbatch.engine.checkpoint_sizes import checkpoint_sizes, smaller_sizes
from apcbatch.engine.drafting import Drafting
from apcbatch.engine.first_passes import measure_reading, warm_up
from apcbatch.engine.memory import MemoryPlan
from apcbatch.engine.page_tables import PageTables
from apcbatch.engine.persistence import Persistence, open_store
from apcbatch.engine.policy import keeps_snapshots
from apcbatch.engine.pool import PagePool, SnapshotPool
from apcbatch.engine.scheduler import Scheduler
from apcbatch.engine.snapshots import Snapshots
from apcbatch.errors import UsageError
from apcbatch.fingerprint import key_fingerprint
from apcbatch.kernels.processor import num_threads, set_isa, set_threads
from apcbatch.model.adapter import Adapter
from apcbatch.model.causal_lm import check_sizes
from apcbatch.model.devices import (
    choose_devices,
    load_model,
    make_arena,
    memory_of,
    name_of_devices,
)
from apcbatch.model.encoded import kind_of, mode_beside
from apcbatch.model.families import family_of, load_model_config, state_layout
from apcbatch.model.hf_config import ModelConfig
from apcbatch.model.locate import locate_model, name_of
from apcbatch.model.own_dtype import own_dtype
from apcbatch.model.pipeline import Model, stage_layers
from apcbatch.model.pipeline_arena import Arena
from apcbatch.model.weight_files import WeightFiles
from apcbatch.model.weights import Checkpoint
from apcbatch.option_values import AUTO
from apcbatch.sampling import Bounds
from apcbatch.store import Store
from apcbatch.types import DRAFT_SOURCES, DraftSource, Policy


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of an engine. Raises UsageError for an invalid value.

    device: `cpu`, `cuda`, or `auto` for CUDA where there is one. gpus: number of CUDA devices that the layers are
    spread over (pipeline parallelism, with the answers of one device); that many groups of max_running sequences run
    concurrently. exact: on CUDA, matrix products with a fixed order of sums, so that a cached answer equals a cold one
    bit for bit, as on the CPU; False: the libraries' products. block_size: tokens between boundaries, the positions
    that may be kept without a plan. policy: `all` keeps every boundary; `last` the last one of each prompt and answer;
    `planned` the positions of each request's plan, on boundaries or not, or for a request without a plan those of
    `last` and the boundary before a fork from an earlier prompt; `none` no snapshot; see policy.py. store: folder of
    the on-disk cache, or None. store_size_bytes: limit of its snapshot files. cache_salt: secret text that separates
    engines which share a store: each finds the snapshots of its own salt only. pool_size_bytes: capacity for snapshots,
    in RAM or in the memory of all CUDA devices together. max_batch_tokens, max_running: tokens and sequences per pass.
    max_request_tokens: most tokens of a prompt and its answer; a longer request fails. draft: sources of draft tokens;
    an empty tuple turns drafts off, so that a pass computes one token of each answer. draft_memory_bytes: capacity of
    the index that drafts are found in. measures_reading: measure what reading a snapshot of the store costs, unless the
    store knows it. dtype: `float32`, `bfloat16`, or `auto` for the checkpoint's own. weights: which quantised weights
    stay encoded in memory, as `--weights`. adapter: folder of a LoRA of peft, which is merged into the weights, or
    None.
    """

    dtype: str = Config.dtype
    weights: str = Config.weights
    device: str = "cpu"
    gpus: int = 1
    exact: bool = Config.exact
    block_size: int = Config.block_size
    policy: Policy = "all"
    store: str | Path | None = None
    store_size_bytes: int = Config.store_size
    cache_salt: str | None = None
    pool_size_bytes: int = Config.pool_size
    max_batch_tokens: int = Config.max_batch_tokens
    max_running: int = Config.max_running
    max_request_tokens: int = Config.max_request_tokens
    draft: tuple[DraftSource, ...] = ("siblings", "history", "lookup")
    draft_memory_bytes: int = Config.draft_memory
    measures_reading: bool = False
    adapter: str | Path | None = None

    def __post_init__(self) -> None:
        for name in ("dtype", "weights", "policy"):
            value, choices = getattr(self, name), OPTIONS[name].choices
            if value not in choices:
                raise UsageError(f"{name} is {value!r}; expected one of {', '.join(choices)}")
        for name, value in vars(self).items():
            option = OPTIONS.get(name.removesuffix("_bytes"))
            if option is None or option.kind not in ("integer", "size"):
                continue
            bounds = Bounds(int, option.minimum, option.maximum)
            if not isinstance(value, int) or value not in bounds:
                raise UsageError(f"{name} is {value!r}; expected {bounds}")
        if not isinstance(self.draft, tuple) or not set(self.draft) <= set(DRAFT_SOURCES):
            raise UsageError(f"draft is {self.draft!r}; expected a tuple with any of {', '.join(DRAFT_SOURCES)}")

    @classmethod
    def of(cls, config: Config, cache_salt: str | None) -> EngineOptions:
        """Make the options of a run. cache_salt: the secret text."""
        own: dict[str, Any] = {
            "cache_salt": cache_salt,
            "draft": draft_sources(config),
            "measures_reading": config.min_gain_tokens is None and config.is_planned,
        }
        names = {one.name for one in fields(cls)} - own.keys()
        return cls(**own, **{name: getattr(config, name.removesuffix("_bytes")) for name in names})


@dataclass(frozen=True)
class EngineParts:
    """Parts of an engine. dtype: resolved, never `auto`. eos_token_ids: ids that end an answer.
    key_fingerprint: the model's fingerprint with the cache salt. runs_ahead: whether the device computes the next pass
    while the host reads one. reading_tokens: what reading a snapshot of the store costs, in tokens; None if it was not
    asked for or cannot be measured."""

    dtype: str
    config: ModelConfig
    eos_token_ids: frozenset[int]
    devices: list[torch.device]
    model: Model
    key_fingerprint: bytes
    arena: Arena
    store: Store | None
    persistence: Persistence | None
    pages: PagePool
    pool: SnapshotPool
    page_tables: PageTables
    snapshots: Snapshots
    drafting: Drafting
    scheduler: Scheduler
    runs_ahead: bool
    reading_tokens: int | None


def open_parts(
    model: str | Path, options: EngineOptions, warn: Callable[[str], None], files: WeightFiles | None = None
) -> EngineParts:
    """Load a model and make the parts of its engine. files: the model's, if they are open, so that their headers are
    not read again; closed once the weights are loaded. Raises UsageError, for a bad model its subclass ModelError.

    The steps check the model's files, then the memory, then take memory and read the weights; nothing outside this
    process is changed before _open_persistence, which may make the store's folder, or repair it."""
    devices = choose_devices(options.device, options.gpus)
    if options.device == "auto" and devices[0].type == "cpu" and torch.cuda.is_available():
        warn("a CUDA device is here and this build has no kernels for it, so the CPU is used; see apcbatch doctor")
    folder, name = locate_model(str(model)), name_of(str(model))
    config = load_model_config(folder)
    adapter = None if options.adapter is None else Adapter(Path(options.adapter), config)
    with family_of(config).checkpoint(folder, devices[0], adapter, files) as checkpoint:
        dtype = own_dtype(folder, warn, checkpoint.files) if options.dtype == AUTO else options.dtype
        check_sizes(checkpoint, config)
        end_tokens = read_end_tokens(folder, config.vocab_size)
        layers = stage_layers(checkpoint, config, len(devices))
        plan = _plan_memory(options, checkpoint, config, dtype, devices, warn)
        layout, num_pages = plan.layout, plan.num_pages
        first_draft = plan.num_live + plan.num_snapshots
        num_slots = first_draft + plan.num_draft_states
        arena = make_arena(layout, num_slots, num_pages, devices, layers)
        # one pass being read, one in flight per device, and one prefill pass, so that no device waits for the host
        passes = len(devices) + 2
        if adapter is not None:
            adapter.read()
        mode = mode_beside(options.weights, adapter)
        checkpoint.keeping = family_of(config).keeping(config, mode, kind_of(devices), dtype)
        torch_dtype = getattr(torch, dtype)
        loaded = load_model(checkpoint, config, torch_dtype, arena, layers, exact=options.exact, passes=passes)
    store, persistence = _open_persistence(options, name, loaded, arena, warn)
    pages = PagePool(num_pages)
    pool = SnapshotPool(
        range(plan.num_live, first_draft),
        pages,
        layout.slot_bytes,
        layout.page_bytes,
        options.pool_size_bytes,
        persistence.wait if persistence else lambda: False,
    )
    page_tables = PageTables(pages, pool, arena, layout.has_tokens)
    fingerprint = key_fingerprint(loaded.fingerprint, options.cache_salt)
    snapshots = Snapshots(
        policy=options.policy,
        block_size=options.block_size,
        fingerprint=fingerprint,
        pool=pool,
        pages=pages,
        page_tables=page_tables,
        persistence=persistence,
    )
    drafting = Drafting(
        Drafts(options.draft, options.draft_memory_bytes),
        loaded,
        range(first_draft, num_slots),
        plan.most_drafted,
        # A CPU's passes are compared by the time of this thread, which takes part in each: other programs' time is not
        # theirs.
        clock=time.thread_time if devices[0].type == "cpu" else time.perf_counter,
    )
    runs_ahead = devices[0].type != "cpu" or len(devices) > 1
    scheduler = Scheduler(
        snapshots,
        page_tables,
        max_batch_tokens=options.max_batch_tokens,
        max_running=options.max_running,
        capacity_bytes=options.pool_size_bytes,
        drafting=drafting,
        prompt_cost=COST_ON_DEVICE if runs_ahead else 0,
        groups=len(devices),
    )
    reading_tokens = _run_first_passes(options, folder, config, devices, plan, loaded, arena, store)
    return EngineParts(
        dtype,
        config,
        frozenset(end_tokens.files),
        devices,
        loaded,
        fingerprint,
        arena,
        store,
        persistence,
        pages,
        pool,
        page_tables,
        snapshots,
        drafting,
        scheduler,
        runs_ahead,
        reading_tokens,
    )


def _plan_memory(
    options: EngineOptions,
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: str,
    devices: Sequence[torch.device],
    warn: Callable[[str], None],
) -> MemoryPlan:
    """Plan the memory of an engine, by the sizes of the checkpoint's tensors. Checks that there is as much; takes
    none."""
    given = checkpoint.model_dir, config, options.weights, kind_of(devices), dtype, checkpoint.weights
    plan = MemoryPlan(
        layout=state_layout(config, dtype),
        dtype=dtype,
        sizes=checkpoint_sizes(*given, options.adapter),
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        gpus=len(devices),
        max_running=options.max_running,
        max_batch_tokens=options.max_batch_tokens,
        pool_bytes=options.pool_size_bytes,
        keeps=keeps_snapshots(options.policy),
        has_store=options.store is not None,
        drafts=bool(options.draft),
        draft_bytes=options.draft_memory_bytes,
        on_host=not writes_draft_states(devices[0]),
        smaller=dict if options.adapter else partial(smaller_sizes, *given),
    )
    plan.check(*memory_of(devices))
    plan.check_pool(warn)
    return plan


def _open_persistence(
    options: EngineOptions, name: str, model: Model, arena: Arena, warn: Callable[[str], None]
) -> tuple[Store | None, Persistence | None]:
    """Open the store, if snapshots are kept in one. Checks its folder; may make it, or repair it."""
    if options.store is None or not keeps_snapshots(options.policy):
        return None, None
    sizes = options.store_size_bytes, options.pool_size_bytes, arena.layout.slot_bytes
    store = open_store(Path(options.store), *sizes, arena.on_host, warn)
    return store, Persistence(store, arena, model.fingerprint, name)


def _run_first_passes(
    options: EngineOptions,
    folder: Path,
    config: ModelConfig,
    devices: list[torch.device],
    plan: MemoryPlan,
    model: Model,
    arena: Arena,
    store: Store | None,
) -> int | None:
    """Warm up a device. Return what reading a snapshot of the store costs, in tokens, if it is asked for; a cost that
    is measured here is kept in the store."""
    most_pages = plan.num_pages if arena.layout.has_tokens else None
    if devices[0].type != "cpu":
        most_rows = options.max_running + plan.num_draft_states if options.draft else 0
        warm_up(model, arena, options.max_batch_tokens, most_pages, most_rows)
    if not options.measures_reading or store is None:
        return None
    most_tokens = min(options.max_batch_tokens, config.context_length or options.max_batch_tokens)
    return store.reading_tokens(
        model_files_digest(folder),
        plan.dtype,
        name_of_devices(devices),
        lambda: measure_reading(model, arena, store, most_tokens, most_pages, config.vocab_size),
    )


def writes_draft_states(device: torch.device) -> bool:
    """Return whether a pass on this device writes the state after each drafted token to a slot. If not, the accepted
    tokens are replayed from the inputs that the pass kept (CausalLM.replay)."""
    return device.type != "cpu"


def use_processor(config: Config) -> None:
    """Set the instruction set and the threads of the CPU kernels. Default: a thread for each core that this process may
    use, up to torch's own setting. Raises UsageError."""
    set_threads(config.threads or min(num_threads(), find_cores().threads))
    if config.isa is None:
        return
    try:
        set_isa(config.isa)
    except ValueError as error:
        raise UsageError(f"{config.origins.get('isa', 'isa')}: {error}") from None
