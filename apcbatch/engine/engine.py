"""The engine: requests in, results out, one pass over a ragged batch at a time.

A step: begin passes of what the scheduler chooses, wait for the oldest one, append its tokens to the answers, publish
its snapshots, and end the sequences that have their last token.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from apcbatch.config import Config
from apcbatch.engine.counters import Counters
from apcbatch.engine.finish import Completion, failed_choice, failed_pass, no_room, not_finite, requests_of
from apcbatch.engine.parts import EngineOptions, open_parts, use_processor
from apcbatch.engine.pipeline import PassPipeline
from apcbatch.engine.sampler import NOT_FINITE, Sampler, top_logprobs
from apcbatch.engine.sequence import Chunk, Sequence, failed_result, fork_answers, make_sequence
from apcbatch.engine.serving import LOOK_AHEAD, answered
from apcbatch.engine.step import Pass, Row
from apcbatch.engine.transfer import SnapshotTransfer
from apcbatch.engine.validation import check_request
from apcbatch.errors import RequestError
from apcbatch.kernels.backend import Backend
from apcbatch.kernels.cpu.ops import ops
from apcbatch.model.causal_lm import CausalLM
from apcbatch.model.weight_files import WeightFiles
from apcbatch.plan.footprint import Footprint
from apcbatch.prefix import as_token_array
from apcbatch.store import Buffer
from apcbatch.types import Request, Result


class Engine:
    """Continuous-batching engine of one model.

    model: a bundled one (`demo`, `demo-jamba`), a folder or a cached hub id. options: an EngineOptions; named: its
    fields by name, in place of those of `options`: `Engine("demo", block_size=64)`. warn: gets each warning as a
    sentence. Raises UsageError (ModelError) for what cannot be used; a request's own failure is a Result with `error`.
    """

    def __init__(
        self,
        model: str | Path,
        options: EngineOptions | None = None,
        *,
        warn: Callable[[str], None] = lambda sentence: None,
        _files: WeightFiles | None = None,
        **named: Any,
    ) -> None:
        options = replace(options, **named) if options else EngineOptions(**named)
        parts = open_parts(model, options, warn, _files)
        self.dtype, self.block_size, self.policy = parts.dtype, options.block_size, options.policy
        self.device, num_devices = parts.devices[0].type, len(parts.devices)
        self.gpus = num_devices if self.device == "cuda" else 0
        self.key_fingerprint = parts.key_fingerprint
        self.fingerprint, self.weights_digest = parts.model.fingerprint.hex(), parts.model.weights_digest.hex()
        self.numerics, self.reading_tokens = parts.model.numerics, parts.reading_tokens
        self.footprint = Footprint.of(parts.arena.layout)
        self.context_length, self.vocab_size = parts.config.context_length, parts.config.vocab_size
        self.eos_token_ids = parts.eos_token_ids
        self._look_ahead = LOOK_AHEAD * num_devices * options.max_running
        self._max_request_tokens = options.max_request_tokens
        self._devices, self._model, self._arena = parts.devices, parts.model, parts.arena
        self._store, self._persistence = parts.store, parts.persistence
        self._pool, self._snapshots, self._scheduler = parts.pool, parts.snapshots, parts.scheduler
        self._drafting = parts.drafting
        self._transfer = SnapshotTransfer(
            parts.arena, parts.pool, parts.pages, parts.page_tables, parts.model.fingerprint
        )
        self._counters = Counters()
        self._pipeline = PassPipeline(
            parts.model,
            parts.arena,
            parts.scheduler,
            parts.pool,
            self._counters,
            num_devices=num_devices,
            runs_ahead=parts.runs_ahead,
        )
        self._completion = Completion(parts.scheduler, parts.snapshots, parts.drafting, self._pipeline)
        self._failed: list[Result] = []

    def run(self, requests: Iterable[Request]) -> Iterator[Result]:
        """Pull requests lazily and yield each result as its request finishes, failures included."""
        return answered(self, requests)

    @property
    def num_unfinished(self) -> int:
        """Return the number of submitted requests whose result was not returned yet."""
        return len(self._scheduler.waiting) + self._scheduler.places.num_begun + len(self._failed)

    @property
    def wants_more(self) -> bool:
        """Return whether another request would fill a pass further, or give the scheduler more choice."""
        return len(self._scheduler.waiting) < self._look_ahead

    def can_run(self, request: Request) -> bool:
        """Return whether the prompt and settings of a request are valid for this engine."""
        try:
            check_request(request, self.vocab_size, self.context_length, self._max_request_tokens)
        except RequestError:
            return False
        return True

    def held(self, keys: Collection[bytes]) -> set[bytes]:
        """Return the prefix keys whose snapshot is in the store, or kept in memory for it."""
        in_store = self._store.present(keys) if self._store and keys else set()
        return in_store | {key for key in keys if (one := self._pool.peek(key)) is not None and one.for_later}

    def submit(self, request: Request) -> None:
        """Queue a request. An invalid one is returned by the next step as a failure."""
        try:
            sequence = make_sequence(request, self.vocab_size, self.context_length, self._max_request_tokens)
        except RequestError as error:
            self._failed.append(failed_result(request, error))
            if request.plan is not None:
                self._hand_over(request)
            return
        self._snapshots.prepare(sequence)
        self._scheduler.submit(sequence)
        num_waiting = len(self._scheduler.waiting)
        if not num_waiting & (num_waiting - 1):  # at powers of two, since a check walks all of them
            self._snapshots.prefetch(self._scheduler.waiting)

    def learn_answer(self, token_ids: list[int]) -> None:
        """Add an answer of an earlier run to the draft index."""
        self._drafting.add_text(as_token_array(token_ids))

    def _hand_over(self, request: Request) -> None:
        """Hand the snapshots that an invalid planned request was to publish over to their readers."""
        try:
            tokens = as_token_array(request.token_ids)
        except (OverflowError, ValueError, TypeError):
            return  # unplanned
        sequence = Sequence(request, tokens, len(tokens), len(tokens), len(tokens))
        self._snapshots.prepare(sequence)
        self._scheduler.hand_over(sequence)

    def watch(self, on_begin: Callable[[Request], None], on_layer: Callable[[], None]) -> None:
        """Set the callbacks for what is about to run; if a pass never returns, they tell where it hangs. They must not
        raise, and change no answer. on_begin: called with each request before it runs. on_layer: called before each
        layer of a pass, on the CPU alone, where a layer may take seconds."""
        self._scheduler.on_begin = lambda sequence: on_begin(sequence.request)
        if isinstance(self._model, CausalLM):
            self._model.on_layer = on_layer

    def step(self) -> list[Result]:
        """Run one pass and return the requests that ended with it."""
        begin = time.perf_counter()
        if self._persistence:
            self._persistence.drain()
        results, self._failed = self._failed, []
        self._counters.seconds["store"] += time.perf_counter() - begin
        never, launching_s = self._pipeline.begin_passes()
        results += [failed_result(sequence.request, no_room(sequence)) for sequence in never]
        if not self._pipeline:
            return results
        begin = time.perf_counter()
        chunks, failed = self._read(self._pipeline.next())
        results += failed
        if not chunks:
            return results
        self._scheduler.advance(chunks)
        self._counters.add_pass(chunks, launching_s + time.perf_counter() - begin)
        ended = [chunk.sequence for chunk in chunks if chunk.sequence.finish_reason]
        for sequence in ended:
            results += self._completion.finish(sequence)
        self._counters.seconds["decode"] += self._drafting.learn(ended)
        return results

    def _read(self, current: Pass) -> tuple[list[Chunk], list[Result]]:
        """Read a pass: extend the answers, and take in the drafts that it verified. Return the chunks of requests that
        have not failed, and the results of those that have."""
        chunks = current.chunks
        try:
            broken = extend_answers(current, self.eos_token_ids)
            if broken:
                ended = requests_of(broken)
                chunks = [chunk for chunk in chunks if chunk.sequence not in ended]
            self._drafting.settle(chunks)
        except Exception as error:
            return [], self._completion.fail(current, dict.fromkeys(current.chunks, failed_pass(error)))
        return chunks, self._completion.fail(current, broken, was_read=True) if broken else []

    def drop_waiting(self) -> None:
        """Drop the waiting requests; running ones continue."""
        self._scheduler.drop_waiting()

    def abort(self) -> None:
        """Drop all unfinished requests."""
        self.drop_waiting()
        self._failed.clear()
        self._completion.drop_all()
        self._scheduler.handover.clear()

    def boundaries(self, token_ids: Iterable[int]) -> list[int]:
        """Return the positions in this prefix whose snapshot is in memory or in the store, ascending."""
        return self._snapshots.positions(as_token_array(list(token_ids)))

    def snapshot(self, token_ids: Iterable[int]) -> dict[str, torch.Tensor] | None:
        """Return the snapshot of exactly this prefix by role, or None without one. For example:

        ssm: (mamba layers, d_inner, d_state) float32. conv: (mamba layers, d_inner, d_conv - 1), oldest input first.
        kv (models with attention): (attention layers, 2, tokens, kv heads, head_dim), keys then values.
        """
        snapshot = self._snapshots.fetch(as_token_array(list(token_ids)))
        if snapshot is None:
            return None
        return self._arena.shown(snapshot.slot, torch.from_numpy(snapshot.pages), snapshot.position)

    def export_snapshot(self, key: bytes) -> list[Buffer] | None:
        """Return the bytes of a snapshot in memory, for `adopt_snapshot` of an engine with the same fingerprint; see
        SnapshotTransfer."""
        return self._transfer.export(key)

    def adopt_snapshot(self, key: bytes, position: int, data: Buffer, reads: int) -> bool:
        """Adopt another engine's snapshot. reads: the number of planned requests that will resume from it; see
        SnapshotTransfer."""
        return self._transfer.adopt(key, position, data, reads)

    def add_readers(self, key: bytes, count: int) -> None:
        """Count more pending readers of a snapshot, held or still to be published; -1: drop one. A reader is a planned
        request that is submitted later."""
        self._scheduler.handover.add_readers(key, count)

    @property
    def backend(self) -> Backend:
        """The backend that runs the model's ops. For benchmarks, which observe it."""
        return self._model.backend

    @property
    def counters(self) -> Counters:
        """Return the counters so far. The store's numbers freeze when it is closed."""
        counters, snapshots, pool = self._counters, self._snapshots, self._pool
        counters.snapshots_written, counters.snapshots_read = snapshots.num_written, snapshots.num_read
        counters.snapshots_for_later, counters.unique_tokens = snapshots.num_for_later, snapshots.coverage.unique_tokens
        counters.unique_tokens_is_bound = snapshots.coverage.has_forgotten
        counters.snapshots_evicted, counters.peak_live_snapshots = pool.evicted, pool.peak_held
        counters.preempted = self._scheduler.places.num_preempted
        drafting = self._drafting
        counters.drafts = {source: (drafted, accepted) for source, (drafted, accepted) in drafting.counts.items()}
        counters.drafts_saved_s = drafting.saved_s
        counters.peak_draft_bytes = max(counters.peak_draft_bytes, drafting.held_bytes)
        if self.device == "cuda":
            counters.peak_device_bytes = sum(torch.cuda.max_memory_allocated(device) for device in self._devices)
        if self._store:
            stored = self._store.counters
            counters.store_bytes_written, counters.store_bytes_read = stored.bytes_written, stored.bytes_read
            counters.store_skipped = stored.skipped
        return counters

    def flush(self) -> None:
        """Wait until every kept snapshot is on disk."""
        if self._persistence:
            self._snapshots.offer_again()
            self._persistence.wait()

    def close(self) -> None:
        """Finish the store's writes, evict down to its size limit, and close it."""
        if self._store and self._persistence:
            self.flush()
            self._store.shrink()
            self._persistence.close()
            self._store.close()
            self._store = None


def open_engine(
    config: Config, cache_salt: str | None, warn: Callable[[str], None], files: WeightFiles | None = None
) -> Engine:
    """Open an engine with the options of a run, on its threads and instruction set. cache_salt: the secret text. files:
    see open_parts."""
    use_processor(config)
    return Engine(config.model, EngineOptions.of(config, cache_salt), warn=warn, _files=files)


def extend_answers(current: Pass, eos_token_ids: Collection[int]) -> dict[Chunk, RequestError]:
    """Read a pass: append the next token to each answer that computed one, and scores to each scored sequence. Return
    the failed chunks with their errors.

    A chunk fails if its logits or a state that it keeps are not finite, if its settings allow no token, or if its stop
    condition or constraint raises. Raises the pass's own exception.
    """
    failed: dict[Chunk, RequestError] = {}
    due = current.read()
    for chunk, rows in due:
        error = _extend_chunk(current, chunk, rows, eos_token_ids)
        if error is not None:
            failed[chunk] = error
    if current.scores or len(due) < len(current.chunks):
        failed |= dict.fromkeys(_score(current), not_finite())
    for chunk in current.not_finite():
        if chunk in current.chunks:
            failed.setdefault(chunk, not_finite())
    return failed


def _extend_chunk(current: Pass, chunk: Chunk, rows: list[Row], eos_token_ids: Collection[int]) -> RequestError | None:
    """Append the next token of a chunk's answers, and one more after each accepted draft token. Return the error of a
    chunk that failed.

    A row of logits is read only after all drafted tokens before it are accepted, so rejected tokens have no effect.
    """
    draft, sequence = chunk.draft, chunk.sequence
    for place, row in enumerate(rows):
        if row.likeliest == NOT_FINITE:
            return not_finite()
        try:
            for answer in fork_answers(sequence) if sequence.will_fork else (sequence,):
                _extend(answer, current.logits, row, eos_token_ids)
        except Exception as error:  # the stop condition and the constraint belong to the request
            return failed_choice(error)
        if place == len(draft) or sequence.finish_reason or sequence.tokens[sequence.num_tokens - 1] != draft[place]:
            return None
        chunk.accepted += 1
    return None


def _score(current: Pass) -> list[Chunk]:
    """Append the scores of a pass to the sequences, and finish each prompt-only sequence at its last token."""
    broken = []
    for chunk, scores in current.scores:
        if scores is None:
            broken.append(chunk)
            continue
        noted = chunk.sequence.scores
        assert noted is not None
        noted.logprobs += scores.logprobs
        noted.ranks += scores.ranks
        noted.top += scores.top
    for chunk in current.chunks:
        if chunk.end == chunk.sequence.num_prompt == chunk.sequence.limit:
            chunk.sequence.finish_reason = "length"
    return broken


def _extend(sequence: Sequence, logits: torch.Tensor, row: Row, eos_token_ids: Collection[int]) -> None:
    """Append a sequence's next token. logits: (rows, vocabulary) float32 of the pass; row: the one of this token."""
    if sequence.is_plain:
        token = row.likeliest
        sequence.append(token, row.logprob)
        ends, reason = token in eos_token_ids and not sequence.request.ignore_eos, None
    else:
        ends, reason = _sample(sequence, logits[row.number], row.likeliest, row.logprob, eos_token_ids)
    if ends:
        sequence.finish_reason, sequence.stop_reason = "stop", reason
    elif sequence.num_tokens == sequence.limit:
        sequence.finish_reason = "length"


def _sample(
    sequence: Sequence, row: torch.Tensor, likeliest: int, logprob: float, eos_token_ids: Collection[int]
) -> tuple[bool, int | str | None]:
    """Append the token that the request's settings give. Return whether the answer ends with it, and the
    stop_reason."""
    request, step = sequence.request, sequence.num_tokens - sequence.num_prompt
    if sequence.sampler is None:
        prompt = sequence.tokens[: sequence.num_prompt]
        sequence.sampler = Sampler(request, prompt, row.numel(), eos_token_ids, sequence.answer)
    token = likeliest
    if sequence.needs_logits:
        row = row.cpu()
        token = sequence.sampler.sample(row.numpy(), step)
        if sequence.sampler.processed is not None:
            logprob, likely = sequence.sampler.processed
        elif token != likeliest:
            chosen = torch.tensor([token])
            logprob = ops.token_logprobs(row.unsqueeze(0), chosen).item() if request.logprobs else math.nan
        if request.top_logprobs:
            if sequence.sampler.processed is None:
                likely = top_logprobs(row.numpy(), request.top_logprobs)
            sequence.top_logprobs.append([(one, logprob if one == token else value) for one, value in likely])
    sequence.append(token, logprob)
    return sequence.sampler.ends_with(token, step)
