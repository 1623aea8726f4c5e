"""A worker in virtual time that computes in batches, as an engine on a GPU does: a pass takes hardly longer for many
requests than for one.

It stands behind the seam as the other simulated workers do, and takes units as `apcbatch.cluster.worker.Worker` does:
all that it was given are run together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from apcbatch.cluster.seam import Event, Ready, Said, WorkerFacts, WorkerId, WorkerKind
from apcbatch.cluster.unit import Answer, Done, Key, Made, Message, Piece, Unit
from apcbatch.plan.footprint import Footprint
from apcbatch.prefix import PrefixHasher, as_token_array
from apcbatch.types import Result
from tests.cluster.simulator import answer_of


@dataclass(frozen=True)
class Passes:
    """pass_s: of any pass. prefill_tokens_per_s: what prompts add to that. state_s: what a state that is sent, or taken
    in, keeps the engine from its passes. call_s: until a message is there, each way."""

    pass_s: float = 0.005
    prefill_tokens_per_s: float = 80_000.0
    max_running: int = 32
    max_batch_tokens: int = 2048
    state_bytes: int = 22 << 20
    state_s: float = 0.015
    call_s: float = 2e-3
    unit_s: float = 0.0


H200 = Passes()


@dataclass(eq=False)
class _Going:
    """A request at an engine."""

    unit: int
    piece: Piece
    left: int
    answer: list[int]
    resumes: Key | None
    keeps: dict[int, Key]
    position: int
    computed: int = 0
    num_answered: int = 0
    begun: float = 0.0


class Batcher:
    """One engine and the units that it was given. now: its own clock, at the end of the last pass."""

    def __init__(self, passes: Passes, key_fingerprint: bytes) -> None:
        self.passes, self._key_fingerprint = passes, key_fingerprint
        self.now = 0.0
        self.waiting: deque[_Going] = deque()
        self.running: list[_Going] = []
        self.units: dict[int, Unit] = {}
        self._left: dict[int, int] = {}
        self._spent: dict[int, list[float]] = {}
        self._held: set[Key] = set()
        self.num_passes = self.num_rows = 0
        self.busy_s = self.state_s = 0.0

    def begin(self, unit: Unit, states: Mapping[Key, object]) -> None:
        """Take a unit in."""
        self.units[unit.number] = unit
        self._left[unit.number] = len(unit.pieces)
        self._spent[unit.number] = [0.0, 0, 0]
        self._held.update(unit.imports)
        self.now += self.passes.state_s * len(unit.imports)
        self.state_s += self.passes.state_s * len(unit.imports)
        for piece in unit.pieces:
            tokens = as_token_array(piece.request.token_ids)
            plan = piece.plan
            keys = dict(PrefixHasher(self._key_fingerprint, tokens).keys_at(sorted({plan.resume_at, *plan.keep} - {0})))
            resumes = keys.get(plan.resume_at)
            keeps = {position: keys[position] for position in plan.keep}
            answer = answer_of(piece.request)
            left = len(tokens) - plan.resume_at
            self.waiting.append(_Going(unit.number, piece, left, answer, resumes, keeps, plan.resume_at, left))

    @property
    def is_busy(self) -> bool:
        return bool(self.units)

    def step(self) -> list[Message]:
        """One pass."""
        said: list[Message] = []
        begin = self.now
        decoding = [one for one in self.running if not one.left]
        budget = self.passes.max_batch_tokens - len(decoding)
        chunks = []
        for one in self.running:
            if one.left and budget > 0:
                chunks.append((one, min(one.left, budget)))
                budget -= chunks[-1][1]
        passed_over: deque[_Going] = deque()
        while self.waiting and len(self.running) < self.passes.max_running and budget > 0:
            one = self.waiting.popleft()
            if one.resumes is not None and one.resumes not in self._held:
                passed_over.append(one)
                continue
            self.running.append(one)
            chunks.append((one, min(one.left, budget)))
            budget -= chunks[-1][1]
        passed_over.extend(self.waiting)
        self.waiting = passed_over
        assert chunks or decoding, "an engine is stuck"
        num_prefill = sum(count for _, count in chunks)
        seconds = self.passes.pass_s + num_prefill / self.passes.prefill_tokens_per_s
        self.now += seconds
        self.busy_s += seconds
        self.num_passes += 1
        self.num_rows += len(chunks) + len(decoding)
        total = num_prefill + len(decoding)
        for one, count in chunks:
            spent = self._spent[one.unit]
            spent[0] += seconds * count / total
            spent[1] += count
            one.left -= count
            one.position += count
            for position, key in one.keeps.items():
                if one.position - count < position <= one.position:
                    self._held.add(key)
                    if key in self.units[one.unit].exports:
                        self.now += self.passes.state_s
                        self.state_s += self.passes.state_s
                        said.append(Made(one.unit, key, position, self.passes.state_bytes, key))
            if not one.left:
                one.num_answered = 1
        for one in decoding:
            spent = self._spent[one.unit]
            spent[0] += seconds / total
            spent[2] += 1
            one.num_answered += 1
        for one in [one for one in self.running if one.num_answered >= len(one.answer)]:
            self.running.remove(one)
            request, plan = one.piece.request, one.piece.plan
            said.append(
                Answer(
                    one.unit, one.piece.number,
                    Result(request.id, len(request.token_ids), token_ids=one.answer, cached_tokens=plan.resume_at,
                           computed_tokens=one.computed, boundary=plan.resume_at,
                           cached_from="memory" if plan.resume_at else "none", ideal_cached_tokens=plan.ideal),
                )
            )  # fmt: skip
            self._left[one.unit] -= 1
        for number in [number for number, left in self._left.items() if not left]:
            del self._left[number], self.units[number]
            self.now += self.passes.unit_s
            seconds, prefill, decode = self._spent.pop(number)
            said.append(Done(number, seconds, int(prefill), int(decode), {}))
        return said


class BatchSeam:
    """Implements apcbatch.cluster.seam.Seam over Batchers."""

    def __init__(self, passes: Passes = H200) -> None:
        self.passes = passes
        self.now = self.last_answer_s = 0.0
        self.workers: dict[WorkerId, Batcher] = {}
        self.num_units = 0
        self.trace: list[tuple] = []
        self._inbox: dict[WorkerId, deque[tuple[float, Unit, Mapping]]] = {}
        self._events: list[tuple[float, int, Event]] = []
        self._count = 0
        self.spent_s = 0.0
        self.check = lambda: None
        self.bytes_sent = 0
        self.idle: dict[WorkerId, float] = {}
        self.clock_cost_s = 0.0

    def spawn(self, kind: WorkerKind) -> WorkerId:
        worker = len(self.workers) + 1
        self.workers[worker] = Batcher(self.passes, b"key")
        self._inbox[worker] = deque()
        self.idle[worker] = 0.0
        footprint = Footprint(self.passes.state_bytes)
        facts = WorkerFacts("f", b"key", f"node{worker}", "cuda", "bfloat16", 1, footprint, None, 1 << 30, frozenset(), 1 << 30, self.passes.max_running)  # fmt: skip
        self._say(self.now, Ready(worker, facts))
        return worker

    def submit(self, worker: WorkerId, unit: Unit, states: Mapping[Key, object]) -> None:
        self.num_units += 1
        self.bytes_sent += len(states) * self.passes.state_bytes
        self.trace.append((self.now, "submit", worker, unit.number, len(unit.pieces), len(unit.imports), len(unit.exports)))  # fmt: skip
        self._inbox[worker].append((self.now + self.passes.call_s, unit, states))

    def wait(self, timeout_s: float) -> list[Event]:
        """Run the workers up to the first event."""
        end = self.now + timeout_s
        while True:
            when = self._events[0][0] if self._events else float("inf")
            able = {worker: self._next(worker) for worker in self.workers}
            worker = min(able, key=able.get)
            if min(when, able[worker]) > end:
                self.now = end
                return []
            if when <= able[worker]:
                break
            self._run(worker)
        self.now = max(self.now, when)
        events = []
        while self._events and self._events[0][0] <= self.now:
            event = self._events.pop(0)[2]
            if isinstance(event, Said) and isinstance(event.message, Answer):
                self.last_answer_s = self.now
            if isinstance(event, Said) and isinstance(event.message, Done):
                self.trace.append((self.now, "done", event.worker, event.message.unit))
            events.append(event)
        return events

    def get(self, handle: Key) -> bytes:
        return handle

    def kill(self, worker: WorkerId) -> None:
        self.workers.pop(worker, None)

    def clock(self) -> float:
        return self.now

    def close(self) -> None:
        pass

    def _next(self, worker: WorkerId) -> float:
        batcher = self.workers[worker]
        if batcher.is_busy:
            return batcher.now
        inbox = self._inbox[worker]
        return max(batcher.now, inbox[0][0]) if inbox else float("inf")

    def _run(self, worker: WorkerId) -> None:
        batcher, inbox = self.workers[worker], self._inbox[worker]
        when = self._next(worker)
        if not batcher.is_busy:
            self.idle[worker] += when - batcher.now
        batcher.now = when
        while inbox and inbox[0][0] <= batcher.now:
            _, unit, states = inbox.popleft()
            batcher.begin(unit, states)
        for message in batcher.step():
            self._say(batcher.now + self.passes.call_s, Said(worker, message))

    def _say(self, when: float, event: Event) -> None:
        self._count += 1
        self._events.append((when, self._count, event))
        self._events.sort(key=lambda entry: entry[:2])
