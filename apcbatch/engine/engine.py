"""The engine: requests in, results out, one pass over a ragged batch at a time.

Must not know: text, files other than the store's folder and the model's, the command line.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from apcbatch.engine.accounting import account
from apcbatch.engine.answers import extend_answers
from apcbatch.engine.arguments import DTYPES, check_arguments
from apcbatch.engine.counters import Counters, facts_between
from apcbatch.engine.exits import Exits, requests_of
from apcbatch.engine.failures import failed_pass, no_room
from apcbatch.engine.gate import COST_ON_DEVICE
from apcbatch.engine.launcher import Launcher
from apcbatch.engine.observer import Observer, Watcher
from apcbatch.engine.page_tables import PageTables
from apcbatch.engine.pages import PagePool
from apcbatch.engine.persistence import Persistence, open_store
from apcbatch.engine.policy import keeps_snapshots
from apcbatch.engine.pool import SnapshotPool
from apcbatch.engine.room import MAX_REQUEST_TOKENS
from apcbatch.engine.scheduler import Scheduler, num_live_slots
from apcbatch.engine.sequence import Sequence, failed, make_sequence
from apcbatch.engine.serving import LOOK_AHEAD, answered
from apcbatch.engine.settings import check_request
from apcbatch.engine.snapshots import Snapshots
from apcbatch.engine.travel import Travel
from apcbatch.engine.warm_up import warm_up
from apcbatch.errors import RequestError
from apcbatch.fingerprint import key_fingerprint
from apcbatch.kernels.ops import Backend
from apcbatch.model.causal_lm import CausalLM, check_sizes
from apcbatch.model.families import load_model_config, state_layout
from apcbatch.model.locate import locate_model, name_of
from apcbatch.model.place import choose_devices, load_model, make_arena
from apcbatch.model.spread import stage_layers
from apcbatch.plan.footprint import Footprint
from apcbatch.prefix import as_token_array
from apcbatch.store import Buffer
from apcbatch.types import Policy, Request, Result

DEFAULT_POOL_BYTES = 4 << 30
DEFAULT_STORE_BYTES = 20 << 30
MAX_SNAPSHOT_SLOTS = 1 << 20


class Engine:
    """Runs requests on one model.

    model: a bundled one (`demo`, `demo-jamba`), a folder or a cached hub id. device: `cpu`, `cuda`, or `auto` for CUDA
    if it is there. gpus: over so many CUDA devices the layers are spread, with the answers that one gives; as many
    groups of max_running sequences run side by side. exact: on CUDA, products of one order of sums, so that a cached
    answer equals a cold one bit for bit, as it does on the CPU; False: the libraries' products.
    block_size: the grid of positions that may be kept, in tokens.
    policy: `all` keeps every boundary, `last` the last one of each prompt and answer, `planned` what each request's
    plan says (without a plan: like `last`, and where prompts were seen to fork), `none` nothing; see policy.py. store:
    a folder that outlives the process, or None. cache_salt: a secret text; engines with another one, or none, find
    nothing of this one's in a store that they share. pool_size_bytes: for snapshots, in RAM or in the memory of the
    CUDA devices together. max_batch_tokens, max_running: tokens and sequences per pass. max_request_tokens: of a prompt
    and its answer; a longer request fails. Raises UsageError (ModelError) for what cannot be used; a request's own
    failure is a Result with `error`.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        gpus: int = 1,
        exact: bool = True,
        block_size: int = 64,
        policy: Policy = "all",
        store: str | Path | None = None,
        store_size_bytes: int = DEFAULT_STORE_BYTES,
        cache_salt: str | None = None,
        pool_size_bytes: int = DEFAULT_POOL_BYTES,
        max_batch_tokens: int = 2048,
        max_running: int = 32,
        max_request_tokens: int = MAX_REQUEST_TOKENS,
        warn: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        check_arguments(
            dtype=dtype,
            policy=policy,
            block_size=block_size,
            max_batch_tokens=max_batch_tokens,
            max_running=max_running,
            max_request_tokens=max_request_tokens,
            pool_size_bytes=pool_size_bytes,
            store_size_bytes=store_size_bytes,
            gpus=gpus,
        )
        places = choose_devices(device, gpus)
        if device == "auto" and places[0].type == "cpu" and torch.cuda.is_available():
            warn("a CUDA device is here and this build has no kernels for it, so the CPU is used; see apcbatch doctor")
        self.dtype, self.device, self.block_size, self.policy = dtype, places[0].type, block_size, policy
        self.gpus = len(places) if self.device == "cuda" else 0
        folder = locate_model(str(model))
        self.model_name = name_of(str(model))
        config = load_model_config(folder)
        check_sizes(folder, config)
        layout = state_layout(config, dtype)
        per_slot, per_page = layout.slot_bytes, layout.page_bytes
        num_snapshots = min(pool_size_bytes // per_slot, MAX_SNAPSHOT_SLOTS) if keeps_snapshots(policy) else 0
        # Live sequences and snapshots may each fill the pool's size with KV.
        num_pages = 2 * pool_size_bytes // per_page if per_page else 0
        num_live = num_live_slots(len(places) * max_running)
        layers = stage_layers(folder, config, len(places))
        arena = make_arena(layout, num_live + num_snapshots, num_pages, places, layers)
        # One that is read, one for each device, and one that it takes next, so that none waits for the host.
        self._model = load_model(folder, config, DTYPES[dtype], arena, layers, exact=exact, passes=len(places) + 2)
        pages = PagePool(num_pages)
        slots = range(num_live, num_live + num_snapshots)
        self._store = None
        if store is not None and keeps_snapshots(policy):
            self._store = open_store(Path(store), store_size_bytes, pool_size_bytes, arena.on_host, warn)
        fingerprint = self._model.fingerprint
        self.fingerprint, self.key_fingerprint = fingerprint.hex(), key_fingerprint(fingerprint, cache_salt)
        self.numerics, self.weights_digest = self._model.numerics, self._model.weights_digest.hex()
        self._persistence = None
        if self._store is not None:
            self._persistence = Persistence(self._store, arena, fingerprint, self.model_name)
        finish_writes = self._persistence.wait if self._persistence else lambda: False
        self._pool = SnapshotPool(slots, pages, per_slot, per_page, pool_size_bytes, finish_writes)
        self._arena = arena
        page_tables = PageTables(pages, self._pool, arena, layout.has_tokens)
        self._travel = Travel(arena, self._pool, pages, page_tables, fingerprint)
        self._snapshots = Snapshots(
            policy=policy,
            block_size=block_size,
            fingerprint=self.key_fingerprint,
            pool=self._pool,
            pages=pages,
            page_tables=page_tables,
            persistence=self._persistence,
        )
        runs_ahead = self.device != "cpu" or len(places) > 1
        self._places = places
        self._scheduler = Scheduler(
            self._snapshots,
            page_tables,
            max_batch_tokens=max_batch_tokens,
            max_running=max_running,
            capacity_bytes=pool_size_bytes,
            prompt_cost=COST_ON_DEVICE if runs_ahead else 0,
            groups=len(places),
        )
        if self.device != "cpu":
            warm_up(self._model, arena, max_batch_tokens, num_pages if layout.has_tokens else None)
        self._look_ahead = LOOK_AHEAD * len(places) * max_running
        self._max_request_tokens = max_request_tokens
        self._failed: deque[Result] = deque()
        self._counters = Counters()
        self._launcher = Launcher(
            self._model,
            arena,
            self._scheduler,
            self._pool,
            self._counters,
            num_devices=len(places),
            runs_ahead=runs_ahead,
        )
        self._flight = self._launcher.flight
        self._exits = Exits(self._scheduler, self._snapshots, self._flight)
        self._observer: Observer | None = None
        self.footprint = Footprint.of(layout)
        self.context_length = config.context_length
        self.vocab_size = config.vocab_size
        self.eos_token_ids = frozenset(config.eos_token_ids)

    def run(self, requests: Iterable[Request]) -> Iterator[Result]:
        """Pull requests lazily and yield results as they finish, failures included."""
        return answered(self, requests)

    @property
    def num_unfinished(self) -> int:
        """Requests that were submitted and not yet handed back."""
        return len(self._scheduler.waiting) + self._scheduler.num_begun + len(self._failed)

    @property
    def wants_more(self) -> bool:
        """Whether another request would let more run, or let the scheduler choose better."""
        return len(self._scheduler.waiting) < self._look_ahead

    def can_run(self, request: Request) -> bool:
        """Whether a request is one that `submit` would take: its prompt and its settings are checked."""
        try:
            check_request(request, self.vocab_size, self.context_length, self._max_request_tokens)
        except RequestError:
            return False
        return True

    def held(self, keys: Collection[bytes]) -> set[bytes]:
        """Those of the prefix keys whose snapshot is in memory or in the store."""
        in_store = self._store.present(keys) if self._store and keys else set()
        return in_store | {key for key in keys if key in self._pool}

    def submit(self, request: Request) -> None:
        """Queue a request; one that cannot run comes back from the next step as a failure."""
        try:
            sequence = make_sequence(request, self.vocab_size, self.context_length, self._max_request_tokens)
        except RequestError as error:
            self._failed.append(failed(request, error))
            if request.plan is not None:
                self._refuse(request)
            return
        self._snapshots.prepare(sequence)
        self._scheduler.submit(sequence)
        num_waiting = len(self._scheduler.waiting)
        if not num_waiting & (num_waiting - 1):  # now and then: each time all of them are looked at
            self._snapshots.expect(self._scheduler.waiting)

    def _refuse(self, request: Request) -> None:
        """Leave what a planned request that cannot run was to publish to those that come after it."""
        try:
            tokens = as_token_array(request.token_ids)
        except (OverflowError, ValueError, TypeError):
            return  # no plan was made of these
        sequence = Sequence(request, tokens, len(tokens), len(tokens), len(tokens))
        self._snapshots.prepare(sequence)
        self._scheduler.refuse(sequence)

    def observe(self, observer: Observer) -> None:
        """Tell an observer (apcbatch/engine/observer.py) from now on of each step, each prompt that is answered, and
        each snapshot that is kept or let go; one at a time. Without one, nothing of it is worked out."""
        self._observer = self._snapshots.observer = self._exits.observer = observer
        self._pool.on_drop = observer.let_go

    def watch(self, watcher: Watcher) -> None:
        """Tell a watcher (apcbatch/engine/observer.py) from now on what is about to run."""
        self._scheduler.on_begin = lambda sequence: watcher.begins(sequence.request)
        if isinstance(self._model, CausalLM):
            self._model.on_layer = watcher.moves

    def step(self) -> list[Result]:
        """Run one pass and return the requests that ended with it."""
        if self._observer is None:
            return self._step()
        begin, before = time.perf_counter(), replace(self._counters, seconds=dict(self._counters.seconds))
        results = self._step()
        written = self._store.counters.bytes_written if self._store else 0
        queues = len(self._scheduler.waiting), self._pool.held_bytes, written
        self._observer.stepped(facts_between(before, self._counters, time.perf_counter() - begin, *queues))
        return results

    def _step(self) -> list[Result]:
        begin = time.perf_counter()
        if self._persistence:
            self._persistence.drain()
        results = list(self._failed)
        self._failed.clear()
        self._counters.seconds["store"] += time.perf_counter() - begin
        never, launching_s = self._launcher.begin_passes()
        results += [sequence.failure(no_room(sequence)) for sequence in never]
        if not self._flight:
            return results
        begin = time.perf_counter()
        current = self._flight.next()
        self._launcher.begin_next(current)
        try:
            broken = extend_answers(current, self.eos_token_ids)
        except Exception as error:
            return results + self._exits.fail(current, dict.fromkeys(current.chunks, failed_pass(error)))
        chunks = current.chunks
        if broken:
            results += self._exits.fail(current, broken, was_read=True)
            failed = requests_of(broken)
            chunks = [chunk for chunk in chunks if chunk.sequence not in failed]
        if not chunks:
            return results
        for chunk in chunks:
            if chunk.keep:
                self._snapshots.publish(chunk)
        account(chunks, launching_s + time.perf_counter() - begin, self._counters)
        for chunk in chunks:
            self._scheduler.advance(chunk)
        for sequence in [chunk.sequence for chunk in chunks]:
            if sequence.finish_reason or sequence.forks is not None:
                self._snapshots.cover(sequence)
                results += self._exits.finish(sequence)
        return results

    def drop_waiting(self) -> None:
        """Drop what has not begun; what runs goes on."""
        self._scheduler.drop_waiting()

    def abort(self) -> None:
        """Drop everything that is not finished."""
        self.drop_waiting()
        self._failed.clear()
        self._exits.drop_all()
        self._scheduler.heirs.clear()

    def boundaries(self, token_ids: Iterable[int]) -> list[int]:
        """Positions whose snapshot is held (memory or store) for this prefix, ascending."""
        return self._snapshots.positions(as_token_array(list(token_ids)))

    def snapshot(self, token_ids: Iterable[int]) -> dict[str, torch.Tensor] | None:
        """The snapshot of exactly this prefix by role, or None if it is not held. For example:

        ssm: (mamba layers, d_inner, d_state) float32. conv: (mamba layers, d_inner, d_conv - 1), oldest input first.
        kv (models with attention): (attention layers, 2, tokens, kv heads, head_dim), keys then values.
        """
        snapshot = self._snapshots.fetch(as_token_array(list(token_ids)))
        if snapshot is None:
            return None
        return self._arena.shown(snapshot.slot, torch.from_numpy(snapshot.pages), snapshot.position)

    def holds(self, key: bytes) -> bool:
        """Whether the snapshot of a prefix key is in memory."""
        return key in self._pool

    def export_snapshot(self, key: bytes) -> list[Buffer] | None:
        """The bytes of a snapshot in memory, for `adopt_snapshot` of an engine with the same fingerprint; see
        Travel."""
        return self._travel.export(key)

    def adopt_snapshot(self, key: bytes, position: int, data: Buffer, reads: int) -> bool:
        """Take in a snapshot that so many requests will resume from by their plans; see Travel."""
        return self._travel.adopt(key, position, data, reads, self._scheduler.owed_pages)

    def release_snapshot(self, key: bytes) -> None:
        """A request that a snapshot was held for, or is to be published for, will not come."""
        self._scheduler.heirs.release(key)

    @property
    def backend(self) -> Backend:
        """What runs the model's ops: for benchmarks, which observe it."""
        return self._model.backend

    @property
    def counters(self) -> Counters:
        """A current view of what was done."""
        self._counters.update(self._snapshots, self._pool, self._store, self._places)
        return self._counters

    def flush(self) -> None:
        """Wait until everything that was kept is on disk."""
        if self._persistence:
            self._persistence.wait()

    def close(self) -> None:
        """Finish the store's writing, have it within its size, and let go of it."""
        if self._store and self._persistence:
            self.flush()
            self._store.shrink()
            self._persistence.close()
            self._store.close()
            self._store = None
