"""LocalSeam: workers as processes of this machine.

Must not know: the driver, engines. Invariants: what a worker's process says is text, and what cannot be read ends it; a
state lies in a file, from when it is told of until nobody refers to it; every process ends with the seam.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import IO, Any

from apcbatch.cluster.at_work import read_at_work
from apcbatch.cluster.codec import Notice, Word, decode
from apcbatch.cluster.local_worker import Order, Work, at_work_path, framed, read_frame
from apcbatch.cluster.seam import Event, Lost, Ready, Said, WorkerFacts, WorkerId, WorkerKind
from apcbatch.cluster.unit import Done, Key, Made, Unit

MOST_FRAME_BYTES = 1 << 30
LAST_SECONDS = 5.0  # that workers get to end by themselves
_HERE = str(Path(__file__).resolve().parents[2])
_PROGRAM = "import sys; sys.path[:] = {path!r}; from apcbatch.cluster.local_worker import main; main()"


class StateFile:
    """A state that a worker has written. Its file goes when nobody refers to this any more."""

    def __init__(self, path: Path) -> None:
        self.path = path
        weakref.finalize(self, path.unlink, missing_ok=True)


@dataclass(eq=False)
class _Local:
    """lent: the states that its units were given, by unit. last_words: why it ends, as it says itself. gpus: those that
    it alone sees."""

    process: subprocess.Popen[bytes]
    gpus: range
    lent: dict[int, list[StateFile]] = field(default_factory=dict)
    last_words: str = ""


class LocalSeam:
    """Implements Seam. config: values of the run's Config by name, without the salt. warn: gets workers' sentences."""

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        salt: str | None = None,
        warn: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self._config, self._salt, self._warn = dict(config), salt, warn
        self._folder = Path(tempfile.mkdtemp(prefix="apcbatch-"))
        self._workers: dict[WorkerId, _Local] = {}
        self._num_spawned = 0
        self._heard: SimpleQueue[tuple[WorkerId, Word | None]] = SimpleQueue()
        self.close = weakref.finalize(self, _close, self._workers, self._folder)

    def spawn(self, kind: WorkerKind) -> WorkerId:
        """Start a process; it becomes Ready when its weights are loaded."""
        self._num_spawned += 1
        worker = self._num_spawned
        gpus = self._free_gpus(kind.gpus)
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        names = [seen[one] if one < len(seen) and seen[one] else str(one) for one in gpus]
        local = self._workers[worker] = _Local(
            subprocess.Popen(
                [sys.executable, "-c", _PROGRAM.format(path=[_HERE, *sys.path])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # out of reach of the terminal's signals
                env={**os.environ, **({"CUDA_VISIBLE_DEVICES": ",".join(names)} if names else {})},
            ),
            gpus,
        )
        self._send(local, Order(self._config, self._salt, kind.cpus, "here", str(self._folder), str(worker)))
        Thread(target=_listen, args=(worker, local.process.stdout, self._heard), daemon=True).start()
        return worker

    def submit(self, worker: WorkerId, unit: Unit, states: Mapping[Key, StateFile]) -> None:
        """Queue a unit at a worker."""
        local = self._workers.get(worker)
        if local is not None:
            local.lent[unit.number] = list(states.values())
            self._send(local, Work(unit, {key: str(state.path) for key, state in states.items()}))

    def wait(self, timeout_s: float) -> list[Event]:
        """What has happened, in order; empty after timeout_s."""
        events: list[Event] = []
        end = self.clock() + timeout_s
        while not events and (left := end - self.clock()) > 0:
            with suppress(Empty):
                self._hear(events, *self._heard.get(timeout=left))
        with suppress(Empty):
            while True:
                self._hear(events, *self._heard.get_nowait())
        return events

    def get(self, handle: StateFile) -> bytes:
        """The bytes of a state."""
        return handle.path.read_bytes()

    def at_work(self, worker: WorkerId) -> Collection[int] | None:
        """The numbers of the requests that a worker's engine is at, or was when it ended."""
        return read_at_work(str(at_work_path(str(self._folder), str(worker))))

    def kill(self, worker: WorkerId) -> None:
        """End a worker at once; it is not reported as lost."""
        local = self._workers.pop(worker, None)
        if local is not None:
            _end(local.process)

    def clock(self) -> float:
        """Seconds."""
        return time.monotonic()

    def _hear(self, events: list[Event], worker: WorkerId, word: Word | None) -> None:
        """What one worker said, as an event; None: it has ended."""
        local = self._workers.get(worker)
        if isinstance(word, Made):
            path = self._folder / word.state
            word = replace(word, state=StateFile(path))
        if local is None:
            return
        if word is None:
            self.kill(worker)
            events.append(Lost(worker, local.last_words or _ending(local.process.returncode)))
        elif isinstance(word, Notice) and word.is_last:
            local.last_words = word.text
        elif isinstance(word, Notice):
            self._warn(word.text)
        elif isinstance(word, WorkerFacts):
            events.append(Ready(worker, word))
        else:
            if isinstance(word, Done):
                local.lent.pop(word.unit, None)
            events.append(Said(worker, word))

    def _free_gpus(self, count: int) -> range:
        """The first so many in a row that no worker has."""
        taken = {gpu for local in self._workers.values() for gpu in local.gpus}
        begin = 0
        while taken & set(range(begin, begin + count)):
            begin += 1
        return range(begin, begin + count)

    def _send(self, local: _Local, value: Order | Work) -> None:
        """Write to a worker; one that has ended is heard of elsewhere."""
        assert local.process.stdin is not None
        with suppress(BrokenPipeError):
            local.process.stdin.write(framed(pickle.dumps(value)))
            local.process.stdin.flush()


def _listen(worker: WorkerId, source: IO[bytes], heard: SimpleQueue[tuple[WorkerId, Word | None]]) -> None:
    """Hand on what a worker says until it ends, or says what cannot be read."""
    try:
        while (data := read_frame(source, MOST_FRAME_BYTES)) is not None:
            word = decode(data)
            if isinstance(word, Made) and not str(word.state).replace("-", "").isdigit():
                raise ValueError(f"its state has the name {word.state!r}; expected numbers")
            heard.put((worker, word))
    except (ValueError, OSError) as error:
        heard.put((worker, Notice(f"what it says cannot be read: {error}", is_last=True)))
    heard.put((worker, None))


def _ending(status: int | None) -> str:
    """How a process ended, as a clause."""
    if status is not None and status < 0:
        return f"its process was ended by {signal.Signals(-status).name}"
    return f"its process ended with status {status}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and let go of its pipes."""
    with suppress(OSError):
        process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError, ValueError):
            if pipe is not None:
                pipe.close()


def _close(workers: dict[WorkerId, _Local], folder: Path) -> None:
    """End all workers, those first that end by themselves when nothing more comes."""
    processes = [local.process for local in workers.values()]
    workers.clear()
    for process in processes:
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.close()
    end = time.monotonic() + LAST_SECONDS
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(0.0, end - time.monotonic()))
        _end(process)
    shutil.rmtree(folder, ignore_errors=True)
