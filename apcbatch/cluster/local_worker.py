"""The process of a worker on this machine: units come on its standard input, what it says goes to its standard output.

Must not know: the driver, how units are cut. Invariants: it ends when its standard input does, so it never outlives the
run; what anybody prints goes to standard error; a state is written whole before it is told of.
"""

from __future__ import annotations

import os
import pickle
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any

from apcbatch.cluster.codec import Notice, Word, encode
from apcbatch.cluster.unit import Key, Made, Message, Unit
from apcbatch.errors import ApcbatchError

HEAD = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Order:
    """What a worker's process is told first. config: as Worker has it. salt: the secret itself. folder: for states.
    prefix: of the names of those that it writes."""

    config: Mapping[str, Any]
    salt: str | None
    threads: int
    node: str
    folder: str
    prefix: str


@dataclass(frozen=True, slots=True)
class Work:
    """A unit, and for each of its imports the file of its state."""

    unit: Unit
    states: Mapping[Key, str]


def at_work_path(folder: str, prefix: str) -> Path:
    """Where a worker notes which requests are at work."""
    return Path(folder) / f"{prefix}.at-work"


def framed(data: bytes) -> bytes:
    """Bytes with their number before them."""
    return HEAD.pack(len(data)) + data


def read_frame(source: IO[bytes], most_bytes: int) -> bytes | None:
    """The next framed bytes; None at the end. ValueError for more than so many."""
    head = source.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    (num_bytes,) = HEAD.unpack(head)
    if num_bytes > most_bytes:
        raise ValueError(f"a frame of {num_bytes:,} bytes; expected at most {most_bytes:,}")
    data = source.read(num_bytes)
    return data if len(data) == num_bytes else None


def main() -> None:
    """Work until the standard input ends."""
    source, target = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    order = _read(source)
    if not isinstance(order, Order):
        return
    try:
        _Process(order, source, target).run()
    except ApcbatchError as error:
        _say(target, Notice(str(error), is_last=True))
    except BrokenPipeError:
        return  # nobody listens any more
    except BaseException as error:
        _say(target, Notice(f"its engine broke ({error!r})", is_last=True))
        os._exit(1)  # whatever else still runs


class _Process:
    """The worker, what comes for it, and where its words go."""

    def __init__(self, order: Order, source: IO[bytes], target: IO[bytes]) -> None:
        from apcbatch.cluster.worker import Worker

        self._target, self._folder, self._prefix = target, Path(order.folder), order.prefix
        self._inbox: SimpleQueue[Work | None] = SimpleQueue()
        threading.Thread(target=self._listen, args=(source,), daemon=True).start()
        self._worker = Worker(
            order.config,
            salt=order.salt,
            threads=order.threads,
            node=order.node,
            at_work=str(at_work_path(order.folder, order.prefix)),
            warn=lambda sentence: _say(target, Notice(sentence)),
            speak=self._tell,
        )
        self._num_states = 0

    def run(self) -> None:
        """Do units as they come; a new one begins while those before it run."""
        _say(self._target, self._worker.facts())
        while True:
            try:
                work = self._inbox.get(block=not self._worker.is_busy)
            except Empty:
                for message in self._worker.step():
                    self._tell(message)
                continue
            if work is None:
                self._worker.close()
                return
            self._worker.begin(work.unit, {key: data for key, path in work.states.items() if (data := _bytes_at(path))})

    def _listen(self, source: IO[bytes]) -> None:
        while (work := _read(source)) is not None:
            self._inbox.put(work)
        self._inbox.put(None)

    def _tell(self, message: Message) -> None:
        """Say a message; a state goes into a file before."""
        if isinstance(message, Made):
            name = f"{self._prefix}-{self._num_states}"
            self._num_states += 1
            try:
                (self._folder / name).write_bytes(message.state)
            except OSError as error:
                sentence = (
                    f"a state cannot be written to {self._folder} ({error.strerror}), and is computed again where it "
                    "is needed; set TMPDIR to a folder with more room"
                )
                _say(self._target, Notice(sentence))
                return
            message = replace(message, state=name)
        _say(self._target, message)


def _read(source: IO[bytes]) -> Any:
    """The next object from the driver, which is trusted; None at the end."""
    data = read_frame(source, 1 << 62)
    return None if data is None else pickle.loads(data)


def _bytes_at(path: str) -> bytes:
    """A state's bytes; none if they cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def _say(target: IO[bytes], word: Word) -> None:
    target.write(framed(encode(word)))
    target.flush()
