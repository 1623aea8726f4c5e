"""Workers in virtual time that compute in passes, as engines on GPUs do: a pass takes hardly longer for many requests
than for one, and a pass with prompts in it longer than one without. They stand behind the runtime like those of
simulator.py, and have all the units that they were given at a time.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from apcbatch.cluster.runtime import Event, Ready, Received, WorkerFacts, WorkerId
from apcbatch.cluster.wire import Answer, Done, Exported, Key, Message, Piece, Unit
from apcbatch.engine.admission import PrefillAdmission
from apcbatch.plan.footprint import Footprint
from apcbatch.prefix import PrefixHasher, as_token_array
from apcbatch.types import RequestPlan, Result
from tests.cluster.simulated_work import answer_of

NEVER = float("inf")
KEYS = b"keys"


@dataclass(frozen=True)
class Speeds:
    """Seconds of a pass without prompts, of one with prompts, what a token of a prompt adds, of the engine for a state
    that is sent or taken in, of a message on its way. Measured on an H200, for the shape of mamba-2.8b."""

    decode_s: float = 0.0058
    prompts_s: float = 0.022
    token_s: float = 1 / 80_000
    state_s: float = 0.015
    call_s: float = 0.002
    state_bytes: int = 22 << 20
    pool_bytes: int = 4 << 30
    max_running: int = 32
    max_batch_tokens: int = 2048


H200 = Speeds()


@dataclass(eq=False)
class _Sequence:
    """A request at an engine. left: tokens of its prompt; num_answered: those of its answer that are there. keys: of
    what it keeps, by position. prefill_s, decode_s: its share of the passes."""

    unit: Unit
    piece: Piece
    plan: RequestPlan
    source: Key | None
    keys: dict[int, Key]
    left: int
    num_answered: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0

    @property
    def position(self) -> int:
        return len(self.piece.request.token_ids) - self.left


class Batcher:
    """An engine and its units. now: the end of its last pass."""

    def __init__(self, speeds: Speeds = H200) -> None:
        self.now = 0.0
        self.running: list[_Sequence] = []
        self._speeds = speeds
        self._prefill_admission = PrefillAdmission(speeds.max_running, cost=3)
        self._waiting: deque[_Sequence] = deque()
        self._held: set[Key] = set()
        self._left: dict[int, int] = {}  # requests without an answer, by unit

    @property
    def is_busy(self) -> bool:
        return bool(self._left)

    def begin(self, unit: Unit) -> None:
        """Take a unit in; a state that requests here still wait to read is there already."""
        awaited = {one.source for one in self._waiting}
        self.now += self._speeds.state_s * sum(key not in awaited for key in unit.imports)
        self._held.update(unit.imports)
        self._left[unit.number] = len(unit.pieces)
        for piece in unit.pieces:
            plan, tokens = piece.plan, as_token_array(piece.request.token_ids)
            assert plan is not None
            keys = dict(PrefixHasher(KEYS, tokens).keys_at(sorted({plan.resume_at, *plan.keep} - {0})))
            source = keys.pop(plan.resume_at, None)
            self._waiting.append(_Sequence(unit, piece, plan, source, keys, len(tokens) - plan.resume_at))

    def step(self) -> list[Message]:
        """One pass."""
        speeds, decoding = self._speeds, [one for one in self.running if not one.left]
        prompts = self._prompts(speeds.max_batch_tokens - len(decoding), bool(decoding))
        assert prompts or decoding, "nothing that the engine has can begin"
        num_tokens = sum(prompts.values())
        seconds = speeds.prompts_s + num_tokens * speeds.token_s if prompts else speeds.decode_s
        self.now += seconds
        for one in decoding:
            one.num_answered += 1
            one.decode_s += seconds / (num_tokens + len(decoding))
        said: list[Message] = []
        for one, count in prompts.items():
            one.prefill_s += seconds * count / (num_tokens + len(decoding))
            begin, one.left = one.position, one.left - count
            one.num_answered = int(not one.left)
            for position in [position for position in one.keys if begin < position <= one.position]:
                said += self._publish(one, position)
        for one in [one for one in self.running if one.num_answered == len(answer_of(one.piece.request))]:
            said += self._finish(one)
        return said

    def _prompts(self, budget: int, decodes: bool) -> dict[_Sequence, int]:
        """The tokens of prompts in the next pass; those begin that can, if the gate is open."""
        prompts: dict[_Sequence, int] = {}
        for one in self.running:
            if one.left and budget:
                prompts[one] = min(one.left, budget)
                budget -= prompts[one]
        num_before, most = len(self.running), self._speeds.max_running
        num_free = most - num_before
        if not (self._waiting and num_free and budget):
            return prompts
        if decodes and not prompts and not self._prefill_admission.opens(num_free):
            return prompts
        for one in list(self._waiting):
            if len(self.running) < most and budget and (one.source is None or one.source in self._held):
                self._waiting.remove(one)
                self.running.append(one)
                prompts[one] = min(one.left, budget)
                budget -= prompts[one]
        if len(self.running) in (num_before, most):
            self._prefill_admission.close()
        return prompts

    def _publish(self, one: _Sequence, position: int) -> list[Message]:
        key = one.keys[position]
        self._held.add(key)
        if key not in one.unit.exports:
            return []
        self.now += self._speeds.state_s
        return [Exported(one.unit.number, key, self._speeds.state_bytes, key)]

    def _finish(self, one: _Sequence) -> list[Message]:
        self.running.remove(one)
        unit, request, resumed = one.unit, one.piece.request, one.plan.resume_at
        num_prompt, answer = len(request.token_ids), answer_of(request)
        result = Result(
            request.id, num_prompt, token_ids=answer, cached_tokens=resumed, computed_tokens=num_prompt - resumed,
            boundary=resumed, cached_from="memory" if resumed else "none", ideal_cached_tokens=one.plan.ideal,
            prefill_ms=1e3 * one.prefill_s, decode_ms=1e3 * one.decode_s,
        )  # fmt: skip
        said: list[Message] = [Answer(unit.number, one.piece.number, result)]
        self._left[unit.number] -= 1
        if not self._left[unit.number]:
            del self._left[unit.number]
            said.append(Done(unit.number))
        return said


class BatchRuntime:
    """Implements apcbatch.cluster.runtime.Runtime over Batchers, each on a node of its own."""

    def __init__(self, speeds: Speeds = H200) -> None:
        self.now = self.last_answer_s = 0.0
        self.workers: dict[WorkerId, Batcher] = {}
        self._speeds = speeds
        self._inboxes: dict[WorkerId, deque[tuple[float, Unit]]] = {}
        self._agenda: list[tuple[float, int, Event]] = []
        self._num_said = 0

    def spawn(self) -> WorkerId:
        worker = len(self.workers) + 1
        self.workers[worker], self._inboxes[worker] = Batcher(self._speeds), deque()
        facts = WorkerFacts(
            "gpu", KEYS, f"node{worker}", "cuda", "bfloat16", 1, Footprint(self._speeds.state_bytes), None, 1 << 30,
            1 << 30, self._speeds.max_running, self._speeds.pool_bytes,
        )  # fmt: skip
        self._say(self.now, Ready(worker, facts))
        return worker

    def submit(self, worker: WorkerId, unit: Unit, states: Mapping[Key, Key]) -> None:
        assert set(states) == set(unit.imports)
        self._inboxes[worker].append((self.now + self._speeds.call_s, unit))

    def wait(self, timeout_s: float) -> list[Event]:
        end = self.now + timeout_s
        while True:
            said = self._agenda[0][0] if self._agenda else NEVER
            worker = min(self.workers, key=self._next)
            if min(said, self._next(worker)) > end:
                self.now = end
                return []
            if said <= self._next(worker):
                break
            self._run(worker)
        self.now = max(self.now, said)
        events: list[Event] = []
        while self._agenda and self._agenda[0][0] <= self.now:
            events.append(heapq.heappop(self._agenda)[2])
        if any(isinstance(event, Received) and isinstance(event.message, Answer) for event in events):
            self.last_answer_s = self.now
        return events

    def kill(self, worker: WorkerId) -> None:
        del self.workers[worker]

    def clock(self) -> float:
        return self.now

    def close(self) -> None:
        self.workers.clear()

    def _next(self, worker: WorkerId) -> float:
        """When a worker does something next."""
        batcher, inbox = self.workers[worker], self._inboxes[worker]
        if batcher.is_busy:
            return batcher.now
        return max(batcher.now, inbox[0][0]) if inbox else NEVER

    def _run(self, worker: WorkerId) -> None:
        """Take in what has come, and do a pass."""
        batcher, inbox = self.workers[worker], self._inboxes[worker]
        batcher.now = self._next(worker)
        while inbox and inbox[0][0] <= batcher.now:
            batcher.begin(inbox.popleft()[1])
        for message in batcher.step():
            self._say(batcher.now + self._speeds.call_s, Received(worker, message))

    def _say(self, when: float, event: Event) -> None:
        self._num_said += 1
        heapq.heappush(self._agenda, (when, self._num_said, event))
