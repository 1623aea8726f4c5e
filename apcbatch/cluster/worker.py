"""Worker: an engine that computes units and returns messages about them.

The engine batches the requests of all units that have begun.

Invariants:
- Each request resumes where its plan says, as in one process.
- A missing state costs time, but never changes an answer.
- The last message of a unit is Done, after an Answer for each of its requests.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from apcbatch.cluster.plan_view import without_import
from apcbatch.cluster.recovery import InFlightFile
from apcbatch.cluster.runtime import WorkerFacts
from apcbatch.cluster.wire import (
    Alive,
    Answer,
    Done,
    Exported,
    Import,
    ImportFailed,
    Key,
    Message,
    Piece,
    RequestDecoder,
    Unit,
)
from apcbatch.config import Config
from apcbatch.data.model_files import model_files_digest
from apcbatch.data.template_options import ChatOptions
from apcbatch.engine.engine import open_engine
from apcbatch.model.locate import locate_model
from apcbatch.store import BadSnapshot, Buffer
from apcbatch.types import Request, Result

ALIVE_EVERY_S = 5.0


class RunningUnit:
    """A unit that has begun.

    exports: exports not sent yet. messages: messages not taken yet. num_left: number of unanswered requests.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.exports = set(unit.exports)
        self.messages: deque[Message] = deque()
        self.num_left = len(unit.pieces)


class Worker:
    """An engine that computes units.

    config: values of the run's Config by name, without the salt. salt: the cache salt itself. threads: threads of the
    CPU kernels; None for the default. node: the machine's name. in_flight: path of the in-flight file; None for no
    file. warn: receives warnings. report_alive: receives an Alive message during a long pass.

    Raises UsageError (ModelError) if the config or the model cannot be used.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        salt: str | None = None,
        threads: int | None = None,
        node: str = "",
        in_flight: str | None = None,
        warn: Callable[[str], None] = lambda sentence: None,
        report_alive: Callable[[Message], None] = lambda message: None,
    ) -> None:
        self._config = Config(**{**config, "threads": threads or config.get("threads")})
        self._engine = open_engine(self._config, salt, warn)
        self._decoder = RequestDecoder(self._config.model, ChatOptions.of(self._config))
        self._node, self._report_alive, self._reported = node, report_alive, time.monotonic()
        self._in_flight = InFlightFile(in_flight)
        self._engine.watch(self.begins, self.moves)
        self._units: dict[int, RunningUnit] = {}
        self._queue: deque[Request] = deque()

    def facts(self) -> WorkerFacts:
        """Return the facts about this worker, for the driver."""
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
            reading_tokens=engine.reading_tokens,
        )

    def held(self, keys: Collection[Key]) -> set[Key]:
        """Return the subset of the prefix keys whose snapshot is in memory or in the store."""
        return self._engine.held(keys)

    def begin(self, unit: Unit, states: Mapping[Key, Buffer]) -> None:
        """Import a unit's states and queue its requests. states: bytes of the imports by key."""
        requests = [self._decode(piece) for piece in unit.pieces]
        plans = [piece.plan for piece in unit.pieces]
        running = self._units[unit.number] = RunningUnit(unit)
        for key, imported in unit.imports.items():
            if not self._adopt(key, imported, states.get(key)):
                running.messages.append(ImportFailed(unit.number, key))
                without_import(plans, imported)
        for piece, request, plan in zip(unit.pieces, requests, plans, strict=True):
            self._queue.append(replace(request, plan=plan, tag=(unit.number, piece.number)))

    def step(self) -> list[Message]:
        """Run one pass of the engine, and return the messages of all units, those of each unit in order.

        An exception means that the engine is broken, and the process should end.
        """
        self.moves()
        while self._queue and self._engine.wants_more:
            self._submit(self._queue.popleft())
        results = self._engine.step()
        for running in self._units.values():
            self._send_exports(running)
        for result in results:
            self._send_answer(result)
        messages: list[Message] = []
        for running in list(self._units.values()):
            if not running.num_left:
                self._end(running)
            messages += running.messages
            running.messages.clear()
        return messages

    @property
    def is_busy(self) -> bool:
        """Whether a unit has begun and is not done."""
        return bool(self._units)

    def close(self) -> None:
        """Finish writing the store."""
        self._engine.close()

    def begins(self, request: Request) -> None:
        """Record a request as in flight. The engine calls this before it runs the request."""
        self._in_flight.begin(request.tag[1])

    def moves(self) -> None:
        """Send Alive if the last one was sent at least ALIVE_EVERY_S ago. The engine calls this as it progresses."""
        now = time.monotonic()
        if self._units and now - self._reported >= ALIVE_EVERY_S:
            self._reported = now
            self._report_alive(Alive(next(iter(self._units))))

    def _decode(self, piece: Piece) -> Request:
        """Decode a request, recorded as in flight meanwhile."""
        self._in_flight.begin(piece.number)
        request = self._decoder.decode(piece.request)
        self._in_flight.end(piece.number)
        return request

    def _submit(self, request: Request) -> None:
        """Submit a request to the engine, recorded as in flight while the engine checks it."""
        number = request.tag[1]
        self._in_flight.begin(number)
        self._engine.submit(request)
        self._in_flight.end(number)

    def _adopt(self, key: Key, imported: Import, data: Buffer | None) -> bool:
        """Import a state. Return False if it is missing or damaged."""
        try:
            return data is not None and self._engine.adopt_snapshot(key, imported.position, data, len(imported.readers))
        except BadSnapshot:
            return False

    def _send_exports(self, running: RunningUnit) -> None:
        """Queue the exports that the last pass has published, and release their snapshots."""
        for key in list(running.exports):
            if (buffers := self._engine.export_snapshot(key)) is None:
                continue
            running.exports.remove(key)
            state = b"".join(buffers)
            running.messages.append(Exported(running.unit.number, key, len(state), state))
            self._engine.add_readers(key, -1)

    def _send_answer(self, result: Result) -> None:
        """Queue the message of a result."""
        if self._engine.device == "cuda" and result.error is not None and result.error.code == "internal":
            torch.cuda.synchronize()  # raises if the error has left the device unusable
        number, piece = result.tag
        for answer in result.answers:
            answer.tag = None
        self._in_flight.end(piece)
        running = self._units[number]
        running.num_left -= 1
        running.messages.append(Answer(number, piece, result))

    def _end(self, running: RunningUnit) -> None:
        """End a unit: release the exports that were never made, flush the store, and queue Done."""
        for key in running.exports:
            self._engine.add_readers(key, -1)
        self._engine.flush()
        del self._units[running.unit.number]
        running.messages.append(Done(running.unit.number, self._engine.counters.copy()))
