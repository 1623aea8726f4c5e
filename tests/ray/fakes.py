"""A worker without an engine that obeys its units: the id of a request is an order. Its pool_bytes are its pid."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from apcbatch.cluster.recovery import InFlightFile
from apcbatch.cluster.runtime import WorkerFacts
from apcbatch.cluster.wire import Alive, Answer, Done, Exported, ImportFailed, Key, Message, Piece, Unit
from apcbatch.errors import UsageError
from apcbatch.plan.footprint import Footprint
from apcbatch.types import Result

GATHER_S = 60.0


class FakeWorker:
    """Orders: `say N`, N answers' worth of tokens; `make N`, a state of N bytes for each export; `sleep S`; `die`;
    `raise`; `warn`; `report_alive`, that it computes; `gather N`, the units that have begun once there are N. threads:
    -1 cannot be opened."""

    def __init__(self, *, node: str, in_flight: str, warn: Any, report_alive: Any, threads: int) -> None:
        if threads < 0:
            raise UsageError("the model cannot be read; give another --model")
        self._node, self._warn, self._report_alive, self._threads = node, warn, report_alive, threads
        self._in_flight = InFlightFile(in_flight)
        self._going: list[Iterator[Message]] = []
        self._num_begun = 0
        warn("a worker was opened")

    def facts(self) -> WorkerFacts:
        return WorkerFacts(
            fingerprint="f", key_fingerprint=b"k", node=self._node, device="cpu", dtype="float32",
            threads=self._threads, footprint=Footprint(1), context_length=None, vocab_size=8,
            max_request_tokens=99, max_running=0, pool_bytes=os.getpid(),
        )  # fmt: skip

    def held(self, keys: Collection[Key]) -> set[Key]:
        return {key for key in keys if key.startswith(b"h")}

    def close(self) -> None:
        pass

    @property
    def is_busy(self) -> bool:
        return bool(self._going)

    def begin(self, unit: Unit, states: Mapping[Key, Any]) -> None:
        self._going.append(self._work(unit, dict(states)))
        self._num_begun += 1  # Ray may hand over a later unit first, which then ends before the others begin

    def step(self) -> list[Message]:
        """One message of the first unit."""
        message = next(self._going[0], None)
        if message is None:
            del self._going[0]
        return [] if message is None else [message]

    def _work(self, unit: Unit, states: Mapping[Key, Any]) -> Iterator[Message]:
        for key in unit.imports:
            if key not in states:
                yield ImportFailed(unit.number, key)
        for piece in unit.pieces:
            yield from self._obey(unit, piece, states)
        yield Done(unit.number)

    def _obey(self, unit: Unit, piece: Piece, states: Mapping[Key, Any]) -> Iterator[Message]:
        self._in_flight.begin(piece.number)
        order, _, operand = piece.request.split()[0], None, piece.request.split()[-1]
        if order == "make":
            for key in sorted(unit.exports):
                state = key * (int(operand) // len(key))
                yield Exported(unit.number, key, len(state), state)
        elif order == "sleep":
            time.sleep(float(operand))
        elif order == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif order == "raise":
            raise RuntimeError("the device is broken")
        elif order == "report_alive":
            self._report_alive(Alive(unit.number))
        elif order == "warn":
            self._warn(operand)
        elif order == "gather":
            end = time.monotonic() + GATHER_S
            while self._num_begun < int(operand) and time.monotonic() < end:
                time.sleep(0.02)
                yield Alive(unit.number)
            yield Answer(unit.number, piece.number, Result(id="units", prompt_tokens=1, token_ids=[self._num_begun]))
            return
        read = [sum(bytes(states[key]).count(key) for key in unit.imports if key in states)]
        self._in_flight.end(piece.number)
        yield Answer(unit.number, piece.number, Result(id=piece.request, prompt_tokens=1, token_ids=read))


def make_fake(**options: Any) -> FakeWorker:
    return FakeWorker(**options)
