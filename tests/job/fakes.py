"""A fake engine: tokens and log-probabilities computed from the prompt, reuse counted from a set; no weights.

FAKE_* variables of the process steer it, for the tests that kill and interrupt real processes:
FAKE_LOAD_S, FAKE_STEP_S: seconds that loading and a step take. FAKE_FINGERPRINT: the model fingerprint.
FAKE_HOLD_AT: a number of answers; behind them nothing is answered until a signal drains the run, or, with
FAKE_HOLD_ON, at all.
FAKE_FAIL_ONCE: a file; until it is there, every third request fails with out_of_memory.
"""

from __future__ import annotations

import os
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import xxhash

from apcbatch.errors import RequestError
from apcbatch.types import Request, Result

CONTEXT_LENGTH = 4000
VOCAB_SIZE = 4096
EOS = 2


class FakeEngine:
    """Gives each running request one token a step; a prefix that was seen is cached up to a boundary."""

    def __init__(self, config, warn, files=None) -> None:
        self.dtype, self.device = config.dtype, "cpu"
        self.fingerprint = os.environ.get("FAKE_FINGERPRINT", "f" * 64)
        self.context_length, self.vocab_size = CONTEXT_LENGTH, VOCAB_SIZE
        self.reading_tokens: int | None = None
        self.step_s = float(os.environ.get("FAKE_STEP_S", "0"))
        self.hold_at = int(os.environ.get("FAKE_HOLD_AT", "0"))
        self.fail_until = os.environ.get("FAKE_FAIL_ONCE")
        self.waiting, self.running, self.seen = deque(), [], set()
        self.max_running, self.block_size = config.max_running, config.block_size
        self.most_waiting = self.answered = 0
        self.closed = False
        if load_s := float(os.environ.get("FAKE_LOAD_S", "0")):
            warn("loading")
            time.sleep(load_s)
        counts = """snapshots_written snapshots_read snapshots_for_later snapshots_evicted peak_live_snapshots
        store_bytes_written store_bytes_read store_skipped preempted recomputed_tokens"""
        self.counters = SimpleNamespace(**dict.fromkeys(counts.split(), 0))
        self.counters.peak_device_bytes = self.counters.unique_tokens = self.counters.peak_draft_bytes = 0
        self.counters.unique_tokens_is_bound = False
        self.counters.decode_tokens = self.counters.decode_chunks = 0
        self.counters.drafts, self.counters.drafts_saved_s = {}, None
        self.learnt, self.submitted = [], []
        self.counters.seconds = {"prefill": 0.0, "decode": 0.0, "store": 0.0}

    @property
    def num_unfinished(self) -> int:
        return len(self.waiting) + len(self.running)

    @property
    def wants_more(self) -> bool:
        return len(self.waiting) < 2 * self.max_running

    def submit(self, request: Request) -> None:
        self.waiting.append((request, []))
        self.submitted.append(request)
        self.most_waiting = max(self.most_waiting, len(self.waiting))

    def learn_answer(self, token_ids) -> None:
        self.learnt.append(list(token_ids))

    def step(self) -> list[Result]:
        if self.step_s:
            time.sleep(self.step_s)
        while self.waiting and len(self.running) < self.max_running:
            self.running.append((*self.waiting.popleft(), time.perf_counter()))
        if 0 < self.hold_at <= self.answered:
            time.sleep(0.01)
            return []
        finished = self._step()
        self.answered += len(finished)
        return finished

    def _step(self) -> list[Result]:
        finished = [result for entry in self.running if (result := self._advance(*entry)) is not None]
        ended = {result.id for result in finished}
        self.running = [entry for entry in self.running if entry[0].id not in ended]
        return finished

    def drop_waiting(self) -> None:
        self.waiting.clear()
        if "FAKE_HOLD_ON" not in os.environ:
            self.hold_at = 0

    def abort(self) -> None:
        self.waiting.clear()
        self.running.clear()

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def _advance(self, request: Request, tokens: list[int], admitted_s: float) -> Result | None:
        prompt = [int(token) for token in request.token_ids]
        if len(prompt) >= CONTEXT_LENGTH:
            message = f"the prompt has {len(prompt)} tokens; the model takes {CONTEXT_LENGTH}"
            return self._failure(request, RequestError("context_length_exceeded", message))
        if self.fail_until and int(request.id[-6:]) % 3 == 1 and not Path(self.fail_until).exists():
            return self._failure(request, RequestError("out_of_memory", "no room"))
        tokens.append(self._token(request, prompt, len(tokens)))
        stopped = tokens[-1] == EOS and not request.ignore_eos
        if not stopped and len(tokens) < request.max_tokens:
            return None
        cached = self._cached(prompt)
        return Result(
            request.id,
            len(prompt),
            tokens,
            [-token / 3 for token in tokens] if request.logprobs else None,
            finish_reason="stop" if stopped else "length",
            cached_tokens=cached,
            computed_tokens=len(prompt) - cached,
            cached_from="memory" if cached else "none",
            ideal_cached_tokens=cached,
            boundary=cached,
            miss_reason=None if cached else "cold",
            running_s=time.perf_counter() - admitted_s,
            tag=request.tag,
        )

    def _failure(self, request: Request, error: RequestError) -> Result:
        return Result(request.id, len(request.token_ids), error=error, tag=request.tag)

    def _token(self, request: Request, prompt: list[int], number: int) -> int:
        """Greedy: a function of the prompt; otherwise of the seed and the random stream as well."""
        salt = f"{request.seed}/{request.random_stream}" if request.temperature > 0 else ""
        return 3 + xxhash.xxh3_64_intdigest(f"{salt}{prompt[-64:]}{len(prompt)}/{number}".encode()) % (VOCAB_SIZE - 3)

    def _cached(self, prompt: list[int]) -> int:
        boundaries = range(self.block_size, len(prompt), self.block_size)
        keys = [(boundary, xxhash.xxh3_64_intdigest(str(prompt[:boundary]).encode())) for boundary in boundaries]
        cached = max((boundary for boundary, key in keys if key in self.seen), default=0)
        self.seen.update(key for _, key in keys)
        return cached
