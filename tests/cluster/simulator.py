"""Workers in virtual time behind the seam: they take seconds by their rates, and die, stammer and dawdle as they are
told.

A worker checks what it is given: a state is used only after it was made, what a plan resumes from is there, what it
keeps is read as often as it says, and what a unit is to export is kept by one of its requests.
"""

from __future__ import annotations

import hashlib
import heapq
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from apcbatch.cluster.seam import Event, Lost, Ready, Said, WorkerFacts, WorkerId, WorkerKind
from apcbatch.cluster.unit import Answer, Done, Key, Made, Message, Unit, Without
from apcbatch.plan.footprint import Footprint
from apcbatch.prefix import PrefixHasher, as_token_array
from apcbatch.types import Request, Result

MAX_RUNNING = 32
NEVER = float("inf")


@dataclass(frozen=True)
class Speeds:
    """What workers and the network do. state_bytes: of any state."""

    prefill_tokens_per_s: float = 2000.0
    decode_tokens_per_s: float = 1000.0
    call_s: float = 1e-3
    bytes_per_s: float = 1e9
    state_bytes: int = 20 << 20
    start_s: float = 0.0
    node_death_s: float = 1.5  # until the driver knows


@dataclass(frozen=True)
class Trouble:
    """What goes wrong. kills: (seconds, whether the whole node goes). twice: the share of messages that come again.
    delay_s: the longest a message takes beyond a call. poison: ids of requests that end their worker. mute: workers
    that stop talking when they are given their first unit. no_replacement: nobody comes after the first ones."""

    kills: tuple[tuple[float, bool], ...] = ()
    twice: float = 0.0
    delay_s: float = 0.0
    poison: frozenset[str] = frozenset()
    mute: frozenset[WorkerId] = frozenset()
    no_replacement: bool = False
    seed: int = 0


SPEEDS, CALM = Speeds(), Trouble()


@dataclass(eq=False)
class Token:
    """A state that was made."""

    key: Key
    position: int
    owner: WorkerId
    made: float
    nodes: set[str]


@dataclass(eq=False)
class SimWorker:
    kind: WorkerKind
    node: str
    fingerprint: str
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    ends: float = NEVER  # it was alive before this moment
    is_ready: bool = False
    is_busy: bool = False
    said_until: float = 0.0
    at_work: set[str] = field(default_factory=set)  # ids of the unit that it works on
    queue: deque[tuple[Unit, Mapping[Key, Token]]] = field(default_factory=deque)


class SimSeam:
    """Implements apcbatch.cluster.seam.Seam. speed_of, class_of: by kind name, factors and fingerprints."""

    def __init__(
        self,
        speeds: Speeds = SPEEDS,
        trouble: Trouble = CALM,
        workers_per_node: int = 1,
        speed_of: Mapping[str, float] | None = None,
        longest_s: float = 1e7,
    ) -> None:
        self.speeds, self.trouble = speeds, trouble
        self.now = 0.0
        self.longest_s = longest_s
        self.workers: dict[WorkerId, SimWorker] = {}
        self.computed_tokens = self.num_units = self.bytes_sent = self.num_killed = 0
        self.last_answer_s = 0.0
        self.spent_s = 0.0  # of real time, in here
        self.busy_s = 0.0
        self.deaths: Counter[str] = Counter()  # by request: workers that ended while they worked on its unit
        self.check: Callable[[], None] = lambda: None
        self._per_node, self._speed_of = workers_per_node, speed_of or {}
        self._random = random.Random(trouble.seed)
        self._agenda: list[tuple[float, int, Callable[[], Event | None]]] = []
        self._num_agenda = 0
        self._num_spawned_first = 0
        for when, with_node in trouble.kills:
            self._at(when, lambda with_node=with_node: self._strike(with_node))

    def spawn(self, kind: WorkerKind) -> WorkerId:
        worker = len(self.workers) + 1
        speed = self._speed_of.get(kind.name, 1.0)
        one = self.workers[worker] = SimWorker(
            kind,
            f"node{(worker - 1) // self._per_node}",
            kind.name,
            speed * self.speeds.prefill_tokens_per_s,
            speed * self.speeds.decode_tokens_per_s,
        )
        if self.trouble.no_replacement and self.now > 0:
            one.ends = self.now
            self._at(self.now, lambda: Lost(worker, "there is no room for it"))
        else:
            self._at(self.now + self.speeds.start_s, lambda: self._ready(worker))
        return worker

    def submit(self, worker: WorkerId, unit: Unit, states: Mapping[Key, Token]) -> None:
        begin = time.thread_time()
        one = self.workers[worker]
        assert set(states) == set(unit.imports), "the states that come along are not the imports"
        for key, token in states.items():
            assert token.key == key and token.made <= self.now, "an import is used before it is made"
        one.queue.append((unit, states))
        assert len(one.queue) + one.is_busy <= 2 or one.ends <= self.now, "a worker has more than two units"
        self.num_units += 1
        if not one.is_busy:
            self._begin(worker)
        self.spent_s += time.thread_time() - begin

    def wait(self, timeout_s: float) -> list[Event]:
        begin = time.thread_time()
        events = self._wait(timeout_s)
        self.spent_s += time.thread_time() - begin
        return events

    def _wait(self, timeout_s: float) -> list[Event]:
        assert self.now < self.longest_s, "the driver waits forever"
        self.check()
        end, events = self.now + timeout_s, list[Event]()
        while self._agenda and self._agenda[0][0] <= end and not events:
            self.now = when = max(self.now, self._agenda[0][0])
            while self._agenda and self._agenda[0][0] <= when:
                event = heapq.heappop(self._agenda)[2]()
                if event is not None:
                    events.append(event)
        if not events:
            self.now = end
        return events

    def get(self, handle: Token) -> bytes:
        return handle.key

    def kill(self, worker: WorkerId) -> None:
        self.workers[worker].ends = min(self.workers[worker].ends, self.now)

    def clock(self) -> float:
        return self.now

    def close(self) -> None:
        for worker in self.workers:
            self.kill(worker)

    def _at(self, when: float, act: Callable[[], Event | None]) -> None:
        self._num_agenda += 1
        heapq.heappush(self._agenda, (when, self._num_agenda, act))

    def _ready(self, worker: WorkerId) -> Event | None:
        one = self.workers[worker]
        if one.ends <= self.now:
            return None
        one.is_ready = True
        footprint = Footprint(self.speeds.state_bytes)
        print_of = one.fingerprint
        facts = WorkerFacts(
            print_of, print_of.encode(), one.node, "cpu", "float32", 1, footprint, None, 1 << 30, frozenset(), 1 << 30
        )
        return Ready(worker, facts)

    def _strike(self, with_node: bool) -> Event | None:
        """End a worker that is alive, or all of its node."""
        alive = [worker for worker, one in self.workers.items() if one.is_ready and one.ends > self.now]
        if not alive:
            return None
        first = self._random.choice(alive)
        self.num_killed += 1
        if not with_node:
            return self._die(first, self.now, "it was killed")
        for worker in alive:
            if self.workers[worker].node == self.workers[first].node:
                self.workers[worker].ends = self.now
                lost = Lost(worker, "its node is gone", with_node=True)
                self._at(self.now + self.speeds.node_death_s, lambda lost=lost: lost)
        return None

    def _die(self, worker: WorkerId, when: float, reason: str) -> Event | None:
        one = self.workers[worker]
        if one.ends <= when:
            return None
        one.ends = when
        self.deaths.update(one.at_work)
        return Lost(worker, reason)

    def _begin(self, worker: WorkerId) -> None:
        """Start the next unit of a worker: everything that it will say is put on the agenda."""
        one = self.workers[worker]
        if not one.queue or one.ends <= self.now or worker in self.trouble.mute:
            return
        unit, states = one.queue.popleft()
        one.is_busy = True
        one.at_work = {piece.request.id for piece in unit.pieces}
        work = _Work(self, worker, one, unit, states)
        work.run()
        self.busy_s += min(work.now, one.ends) - self.now

        def end() -> None:
            one.is_busy = False
            one.at_work = set()
            self._begin(worker)

        self._at(work.now, end)

    def say(self, worker: WorkerId, when: float, message: Message) -> None:
        """Put a message on its way; what a worker says comes in its order, but what comes twice may come at any
        time."""
        one = self.workers[worker]
        call_s, dice = self.speeds.call_s, self._random
        late = dice.random() * self.trouble.delay_s if self.trouble.delay_s else 0.0
        one.said_until = arrives = max(one.said_until, when + call_s + late)
        said = Said(worker, message)

        def arrive() -> Event | None:
            if one.ends < when:
                return None  # it was never said
            if isinstance(message, Answer):
                self.last_answer_s = self.now
            return said

        self._at(arrives, arrive)
        if self.trouble.twice and dice.random() < self.trouble.twice:
            self._at(arrives + dice.random() * 5, lambda: said if one.ends >= when else None)


class _Work:
    """One unit, computed in virtual time: prompts first, then answers, so many requests at a time."""

    def __init__(
        self, seam: SimSeam, worker: WorkerId, one: SimWorker, unit: Unit, states: Mapping[Key, Token]
    ) -> None:
        self.seam, self.worker, self.one, self.unit = seam, worker, one, unit
        self.now = seam.now
        self.reads: dict[Key, int] = {}  # of what is held
        self.given: set[Key] = set()
        self.missing: set[Key] = set()
        self.made: set[Key] = set()
        self.prefill_tokens = self.decode_tokens = 0
        self.import_bytes, self.import_s = 0, 0.0
        self._adopt(states)

    def run(self) -> None:
        seam, unit = self.seam, self.unit
        begin, pieces = seam.now, unit.pieces
        for first in range(0, len(pieces), MAX_RUNNING):
            results = []
            for piece in pieces[first : first + MAX_RUNNING]:
                if piece.request.id in seam.trouble.poison:
                    seam._at(self.now, lambda: seam._die(self.worker, seam.now, "a request ended it"))
                    self.now += 1.0
                    return
                results.append((piece, self._prefill(piece)))
            for piece, result in results:
                tokens = len(result.token_ids)
                self.decode_tokens += tokens
                self.now += tokens / self.one.decode_tokens_per_s
                seam.say(self.worker, self.now, Answer(unit.number, piece.number, result))
        assert unit.exports <= self.made | self.missing, "nobody in the unit makes what it is to export"
        left = {key for key, reads in self.reads.items() if reads and key not in self.missing}
        assert not left or self.missing, "a snapshot was kept for readers that do not come"
        counters = {"store_bytes_written": 1.0, "import_bytes": self.import_bytes, "import_s": self.import_s}
        done = Done(unit.number, self.now - begin, self.prefill_tokens, self.decode_tokens, counters)
        seam.say(self.worker, self.now, done)

    def _adopt(self, states: Mapping[Key, Token]) -> None:
        speeds = self.seam.speeds
        for key, token in states.items():
            if self.seam.workers[token.owner].ends <= self.now:
                self.missing.add(key)
                self.seam.say(self.worker, self.now, Without(self.unit.number, key))
                continue
            if self.one.node not in token.nodes:
                token.nodes.add(self.one.node)
                took_s = speeds.call_s + speeds.state_bytes / speeds.bytes_per_s
                self.now += took_s
                self.import_bytes += speeds.state_bytes
                self.import_s += took_s
                self.seam.bytes_sent += speeds.state_bytes
            self.given.add(key)

    def _prefill(self, piece) -> Result:
        request: Request = piece.request
        tokens = as_token_array(request.token_ids)
        plan, cached = piece.plan, 0
        keys: dict[int, Key] = {}
        if plan is not None:
            positions = sorted({plan.resume_at, *plan.keep} - {0})
            keys = dict(PrefixHasher(self.one.fingerprint.encode(), tokens).keys_at(positions))
            cached = self._resumed(plan.resume_at, keys)
            self._keep(plan, keys, cached)
        self.now += (len(tokens) - cached) / self.one.prefill_tokens_per_s
        self.prefill_tokens += len(tokens) - cached
        self.seam.computed_tokens += len(tokens) - cached
        return Result(
            request.id,
            len(tokens),
            token_ids=answer_of(request),
            cached_tokens=cached,
            computed_tokens=len(tokens) - cached,
            boundary=cached,
            cached_from="memory" if cached else "none",
            ideal_cached_tokens=plan.ideal if plan else None,
        )

    def _resumed(self, resume_at: int, keys: Mapping[int, Key]) -> int:
        if not resume_at:
            return 0
        key = keys[resume_at]
        if key in self.given:
            return resume_at
        if key in self.reads:
            self.reads[key] -= 1
            assert self.reads[key] >= 0, "more requests resume from a snapshot than its plan says"
            return resume_at
        assert key in self.missing, "a request resumes from what is neither made in its unit nor imported"
        return 0

    def _keep(self, plan, keys: Mapping[int, Key], cached: int) -> None:
        for position, reads in zip(plan.keep, plan.reads, strict=True):
            assert position > cached, "a request keeps what it has resumed from already"
            key = keys[position]
            is_exported = key in self.unit.exports
            assert reads or is_exported, "a snapshot is kept for nobody"
            self.reads[key] = self.reads.get(key, 0) + reads
            if is_exported:
                self.made.add(key)
                when = self.now + (position - cached) / self.one.prefill_tokens_per_s
                token = Token(key, position, self.worker, when, {self.one.node})
                size = self.seam.speeds.state_bytes
                self.seam.say(self.worker, when, Made(self.unit.number, key, position, size, token))


def answer_of(request: Request) -> list[int]:
    """The answer to a request: any function of its prompt."""
    digest = hashlib.sha256(as_token_array(request.token_ids).tobytes()).digest()
    length = 1 + digest[0] * request.max_tokens // 256
    return [int.from_bytes(digest[1:4], "little")] * min(length, request.max_tokens)
