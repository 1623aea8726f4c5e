"""What a simulated worker does with a unit: prompts, then answers, in virtual time.

It checks what it is given: a state is used only after it was made, what a plan resumes from is there, what it keeps is
read as often as it says, and what a unit is to export is kept by one of its requests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from apcbatch.cluster.runtime import WorkerId
from apcbatch.cluster.wire import Alive, Answer, Done, Exported, ImportFailed, Key, Unit
from apcbatch.prefix import PrefixHasher, as_token_array
from apcbatch.types import Request, Result

if TYPE_CHECKING:
    from tests.cluster.simulator import SimRuntime

MAX_RUNNING = 32
NEVER = float("inf")
KEYS = b"keys"
ALIVE_EVERY_S = 5.0


@dataclass(eq=False)
class Token:
    """A state that was made. home: the node that it goes with."""

    key: Key
    position: int
    home: str
    made: float
    nodes: set[str]


@dataclass
class Span:
    """When a worker's engine is at a request."""

    id: str
    number: int
    begin: float
    end: float = NEVER


@dataclass(eq=False)
class SimWorker:
    node: str
    ends: float = NEVER  # it was alive before this moment
    is_ready: bool = False
    is_busy: bool = False
    said_until: float = 0.0
    spans: list[Span] = field(default_factory=list)  # of the requests of the unit that it works on


class SimWork:
    """One unit, computed in virtual time: prompts first, then answers, so many requests at a time."""

    def __init__(
        self, runtime: SimRuntime, worker: WorkerId, one: SimWorker, unit: Unit, states: Mapping[Key, Token]
    ) -> None:
        self.runtime, self.worker, self.one, self.unit = runtime, worker, one, unit
        self.now = self.spoke = runtime.now
        self.reads: dict[Key, int] = {}  # of what is held
        self.missing: set[Key] = set()
        self.made: set[Key] = set()
        self._adopt(states)

    def run(self) -> None:
        runtime, unit = self.runtime, self.unit
        pieces = unit.pieces
        for first in range(0, len(pieces), MAX_RUNNING):
            results, spans = [], dict[int, Span]()
            for piece in pieces[first : first + MAX_RUNNING]:
                span = spans[piece.number] = Span(piece.request.id, piece.number, self.now)
                self.one.spans.append(span)
                if piece.request.id in runtime.trouble.poison:
                    runtime.at(self.now, lambda: runtime.die(self.worker, runtime.now, "a request ended it"))
                    self.now += 1.0
                    return
                if piece.request.id in runtime.trouble.hanging:
                    self.now = NEVER
                    return
                results.append((piece, self._prefill(piece)))
            for piece, result in results:
                decode_s = len(result.token_ids) / runtime.speeds.decode_tokens_per_s
                self._compute(decode_s)
                result.decode_ms = 1e3 * decode_s
                spans[piece.number].end = self.now
                runtime.say(self.worker, self.now, Answer(unit.number, piece.number, result))
        assert unit.exports <= self.made | self.missing, "nobody in the unit makes what it is to export"
        left = {key for key, reads in self.reads.items() if reads and key not in self.missing}
        assert not left or self.missing, "a snapshot was kept for readers that do not come"
        runtime.say(self.worker, self.now, Done(unit.number))

    def _compute(self, seconds: float) -> None:
        """Let time pass, and say now and then that the worker is alive."""
        runtime, end = self.runtime, self.now + seconds
        while self.spoke + ALIVE_EVERY_S < end:
            self.spoke += ALIVE_EVERY_S
            runtime.report_alive(self.worker, self.spoke, Alive(self.unit.number))
        self.now = end

    def _adopt(self, states: Mapping[Key, Token]) -> None:
        speeds = self.runtime.speeds
        for key, token in states.items():
            if token.home in self.runtime.gone:
                self.missing.add(key)
                self.runtime.say(self.worker, self.now, ImportFailed(self.unit.number, key))
                continue
            if self.one.node not in token.nodes:
                token.nodes.add(self.one.node)
                self.now += speeds.call_s + speeds.state_bytes / speeds.bytes_per_s
                self.runtime.bytes_sent += speeds.state_bytes
            self.reads[key] = len(self.unit.imports[key].readers)

    def _prefill(self, piece) -> Result:
        request: Request = piece.request
        tokens = as_token_array(request.token_ids)
        plan, cached = piece.plan, 0
        keys: dict[int, Key] = {}
        if plan is not None:
            positions = sorted({plan.resume_at, *plan.keep} - {0})
            keys = dict(PrefixHasher(KEYS, tokens).keys_at(positions))
            cached = self._resume(plan.resume_at, keys)
            self._keep(piece, keys, cached)
        prefill_s = (len(tokens) - cached) / self.runtime.speeds.prefill_tokens_per_s
        self._compute(prefill_s)
        self.runtime.computed_tokens += len(tokens) - cached
        return Result(
            request.id,
            len(tokens),
            token_ids=answer_of(request),
            cached_tokens=cached,
            computed_tokens=len(tokens) - cached,
            boundary=cached,
            cached_from="memory" if cached else "none",
            ideal_cached_tokens=plan.ideal if plan else None,
            prefill_ms=1e3 * prefill_s,
        )

    def _resume(self, resume_at: int, keys: Mapping[int, Key]) -> int:
        if not resume_at:
            return 0
        key = keys[resume_at]
        if key in self.reads:
            self.reads[key] -= 1
            assert self.reads[key] >= 0, "more requests resume from a snapshot than its plan says"
            return resume_at
        assert key in self.missing, "a request resumes from what is neither made in its unit nor imported"
        return 0

    def _keep(self, piece, keys: Mapping[int, Key], cached: int) -> None:
        for position, reads in zip(piece.plan.keep, piece.plan.reads, strict=True):
            assert position > cached, "a request keeps what it has resumed from already"
            key = keys[position]
            is_exported = key in self.unit.exports and key not in self.made
            assert reads, "a snapshot is kept for nobody"
            self.reads[key] = self.reads.get(key, 0) + reads - is_exported
            if is_exported:
                self.made.add(key)
                when = self.now + (position - cached) / self.runtime.speeds.prefill_tokens_per_s
                token = Token(key, position, self.one.node, when, {self.one.node})
                size = self.runtime.speeds.state_bytes
                self.runtime.say(self.worker, when, Exported(self.unit.number, key, size, token))


def answer_of(request: Request) -> list[int]:
    """The answer to a request: any function of its prompt."""
    digest = hashlib.sha256(as_token_array(request.token_ids).tobytes()).digest()
    length = 1 + digest[0] * request.max_tokens // 256
    return [int.from_bytes(digest[1:4], "little")] * min(length, request.max_tokens)
