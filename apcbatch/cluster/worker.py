"""Worker: one engine that works on units, and says what comes of them.

Must not know: Ray, the driver, where its states come from and go to. Invariants: what a request gets here is what its
plan says, as in one process; a state that cannot be had costs time and never an answer; the last word about a unit is
Done, after an Answer for each of its requests.

Units may overlap: what the engine has no work for in one, it finds in the next.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from apcbatch.cluster.at_work import AtWork
from apcbatch.cluster.open_unit import OpenUnit
from apcbatch.cluster.seam import WorkerFacts
from apcbatch.cluster.unit import Alive, Answer, Done, Key, Made, Message, Piece, Unit, Without
from apcbatch.cluster.unit_plan import UnitPlan
from apcbatch.cluster.wire import Assembler
from apcbatch.config import Config
from apcbatch.data.chat_options import ChatOptions
from apcbatch.data.model_files import model_files_digest
from apcbatch.engine.opening import open_engine
from apcbatch.model.locate import locate_model
from apcbatch.store import BadSnapshot, Buffer
from apcbatch.types import Request, Result

SPEAKS_EVERY_S = 5.0


class Worker:
    """An engine for units. config: the values of the run's Config by name, without the salt. salt: the secret itself.

    threads: of the CPU's kernels, None to leave them as they are. node: the machine's name. at_work: the file that says
    which requests are at work, None for none. warn: gets sentences. speak: gets an Alive while a pass takes long.
    Raises UsageError (ModelError) for what cannot be used.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        salt: str | None = None,
        threads: int | None = None,
        node: str = "",
        at_work: str | None = None,
        warn: Callable[[str], None] = lambda sentence: None,
        speak: Callable[[Message], None] = lambda message: None,
    ) -> None:
        self._config = Config(**{**config, "threads": threads or config.get("threads")})
        self._engine = open_engine(self._config, salt, warn)
        self._assembler = Assembler.of(self._config.model, ChatOptions.of(self._config))
        self._node, self._speak, self._spoke = node, speak, time.monotonic()
        self._at_work = AtWork(at_work)
        self._engine.watch(self)
        self._units: dict[int, OpenUnit] = {}
        self._queue: deque[Request] = deque()
        self._counted = self._counters()

    def facts(self) -> WorkerFacts:
        """What the driver needs to know of it."""
        engine = self._engine
        return WorkerFacts(
            fingerprint=engine.fingerprint,
            key_fingerprint=engine.key_fingerprint,
            node=self._node,
            device=engine.device,
            dtype=engine.dtype,
            threads=torch.get_num_threads(),
            footprint=engine.footprint,
            context_length=engine.context_length,
            vocab_size=engine.vocab_size,
            max_request_tokens=self._config.max_request_tokens,
            numerics=engine.numerics,
            weights_digest=engine.weights_digest,
            model_files=model_files_digest(locate_model(self._config.model)),
            max_running=self._config.max_running * engine.gpus,
            pool_bytes=self._config.pool_size,
        )

    def held(self, keys: Collection[Key]) -> set[Key]:
        """Those of the prefix keys whose snapshot is in memory or in the store."""
        return self._engine.held(keys)

    def begin(self, unit: Unit, states: Mapping[Key, Buffer]) -> None:
        """Take a unit on: its states in, its requests into the queue. states: the bytes of its imports."""
        plan = UnitPlan(unit, self._engine.key_fingerprint)
        requests = [self._put_together(piece) for piece in unit.pieces]
        opened = self._units[unit.number] = OpenUnit(unit, plan.makers)
        for key in unit.imports:
            if not self._adopt(key, plan, states.get(key)):
                opened.said.append(Without(unit.number, key))
                plan.go_without(key)
        for index, (piece, request) in enumerate(zip(unit.pieces, requests, strict=True)):
            self._queue.append(replace(request, plan=plan.plans[index], tag=(unit.number, piece.number)))

    def step(self) -> list[Message]:
        """One pass of the engine, and what came of the units that were begun, each one's in order. Whatever is raised
        means that the engine is broken: the process should end."""
        self.moves()
        while self._queue and self._engine.wants_more:
            self._submit(self._queue.popleft())
        results = self._engine.step()
        for opened in self._units.values():
            self._tell_made(opened)
        for result in results:
            self._tell_answer(result)
        said: list[Message] = []
        for opened in list(self._units.values()):
            if not opened.num_left:
                self._end(opened)
            said += opened.said
            opened.said.clear()
        return said

    @property
    def is_busy(self) -> bool:
        """Whether a unit that was begun is not done."""
        return bool(self._units)

    def close(self) -> None:
        """Finish the store's writing."""
        self._engine.close()

    def begins(self, request: Request) -> None:
        """The engine is about to run a request."""
        self._at_work.begin(request.tag[1])

    def moves(self) -> None:
        """The engine goes on: that is said if nothing was said for some seconds. What hangs does not come by here."""
        now = time.monotonic()
        if self._units and now - self._spoke >= SPEAKS_EVERY_S:
            self._spoke = now
            self._speak(Alive(next(iter(self._units))))

    def _put_together(self, piece: Piece) -> Request:
        self._at_work.begin(piece.number)
        request = self._assembler.put_together(piece.request, piece.plan)
        self._at_work.end(piece.number)
        return request

    def _submit(self, request: Request) -> None:
        """Queue a request at the engine, which has not begun with it then."""
        number = request.tag[1]
        self._at_work.begin(number)
        self._engine.submit(request)
        self._at_work.end(number)

    def _adopt(self, key: Key, plan: UnitPlan, data: Buffer | None) -> bool:
        """Take the state of an import in for those that resume from it; False if they must do without."""
        reads = len(plan.readers(key))
        if not reads:
            return True
        if data is None:
            return False
        try:
            return self._engine.adopt_snapshot(key, plan.position(key), data, reads)
        except BadSnapshot:
            return False

    def _tell_made(self, opened: OpenUnit) -> None:
        """Send the exports that the last pass has published, and let go of them."""
        for key in [key for key in opened.exports if self._engine.holds(key)]:
            opened.exports.remove(key)
            buffers = self._engine.export_snapshot(key)
            assert buffers is not None, "it is held, and nothing runs in between"
            state = b"".join(buffers)
            opened.said.append(Made(opened.unit.number, key, opened.makers[key].position, len(state), state))
            self._engine.release_snapshot(key)

    def _tell_answer(self, result: Result) -> None:
        """Hand on a request's result; a unit whose last one this is has ended."""
        if self._engine.device == "cuda" and result.error is not None and result.error.code == "internal":
            torch.cuda.synchronize()  # raises where an error has left nothing that can be used
        number, piece = result.tag
        for answer in result.answers:
            answer.tag = None
        opened = self._units[number]
        self._at_work.end(piece)
        opened.count(result)
        opened.said.append(Answer(number, piece, result))

    def _end(self, opened: OpenUnit) -> None:
        """The last word about a unit: what it kept for later is in the store, and what a failed request did not make
        for others is not awaited any more. What the engine did since the last unit's end is counted with it."""
        for key in opened.exports:
            self._engine.release_snapshot(key)
        self._engine.flush()
        del self._units[opened.unit.number]
        now = self._counters()
        added = {
            name: value if name.startswith("peak_") else value - self._counted[name] for name, value in now.items()
        }
        self._counted = now
        opened.said.append(Done(opened.unit.number, opened.seconds, opened.prefill_tokens, opened.decode_tokens, added))

    def _counters(self) -> dict[str, float]:
        """The engine's counters as plain numbers."""
        counters = asdict(self._engine.counters)
        seconds = counters.pop("seconds")
        return counters | {f"{phase}_s": value for phase, value in seconds.items()}
