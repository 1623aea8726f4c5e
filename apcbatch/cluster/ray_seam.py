"""RaySeam: the seam over Ray Core. A worker is an actor, a unit a streaming call, a state an object reference.

Must not know: what units hold, how a cluster is found (see ray_cluster.py). Invariants: Ray never runs a call again or
restarts an actor by itself; the driver fetches messages and no state; every call has a bound; what a worker said comes
before the news that it is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from apcbatch.cluster.ray_actor import CONCURRENCY, Make, StateRef, Warned, WorkerActor, make_worker
from apcbatch.cluster.ray_cluster import RayCluster
from apcbatch.cluster.seam import Event, Lost, Ready, Said, WorkerId, WorkerKind
from apcbatch.cluster.unit import Done, Key, Made, Unit
from apcbatch.errors import UsageError

MESSAGE_S = 60.0  # until a message that is said to be there has come
HELD_S = 60.0
CLOSE_S = 60.0  # for the writing of all workers' stores
SHOWN_CHARACTERS = 300


@dataclass(eq=False)
class _Stream:
    """A unit at a worker. refs: Ray's generator of references. made: a Made whose state comes next."""

    refs: Any
    made: Made | None = None


@dataclass(eq=False)
class _Remote:
    """A worker. starting: the call that opens it, until it is ready; watch: the call that fails when it ends. node: as
    its facts have it; node_id: Ray's."""

    id: WorkerId
    actor: Any
    starting: Any
    watch: Any = None
    node: str = ""
    node_id: str = ""
    pid: int = 0
    streams: dict[int, _Stream] = field(default_factory=dict)


class RaySeam:
    """Workers as actors of a cluster, which is closed with the seam. options_for: what a worker of a kind is made with.
    warn: gets the workers' warnings, each once. make: makes a worker in its process."""

    def __init__(
        self,
        cluster: RayCluster,
        options_for: Callable[[WorkerKind], Mapping[str, Any]],
        warn: Callable[[str], None] = lambda sentence: None,
        make: Make = make_worker,
    ) -> None:
        self._cluster, self._ray, self._make = cluster, cluster.ray, make
        self._options_for, self._warn = options_for, warn
        self._class = self._ray.remote(WorkerActor)
        self._remotes: dict[WorkerId, _Remote] = {}
        self._closing: list[tuple[Any, Any]] = []
        self._warned: set[str] = set()
        self._num_workers = 0
        self._was_ready = False

    def spawn(self, kind: WorkerKind) -> WorkerId:
        """Ask for an actor. Until Ray has room for it, it is what Ray's autoscaler sees as wanted."""
        self._num_workers += 1
        actor = self._class.options(
            num_cpus=kind.cpus,
            num_gpus=kind.gpus,
            memory=kind.memory_bytes or None,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=CONCURRENCY,
            scheduling_strategy="SPREAD",
        ).remote()
        # What the worker is made with goes to its process alone: an actor's own arguments are kept by the cluster.
        starting = actor.start.remote(self._make, self._options_for(kind))
        self._remotes[self._num_workers] = _Remote(self._num_workers, actor, starting)
        return self._num_workers

    def submit(self, worker: WorkerId, unit: Unit, states: Mapping[Key, StateRef]) -> None:
        """Begin a stream. References go inside a list, so that the worker and not Ray waits for them."""
        remote = self._remotes.get(worker)
        if remote is not None:
            call = remote.actor.work.options(num_returns="streaming")
            remote.streams[unit.number] = _Stream(call.remote(unit, list(states.items())))

    def wait(self, timeout_s: float) -> list[Event]:
        """What has happened. UsageError if the first worker cannot be opened: the others could not either."""
        ray, by_ref = self._ray, self._awaited()
        if not by_ref:
            time.sleep(timeout_s)
            return []
        refs = list(by_ref)
        ready, _ = ray.wait(refs, num_returns=1, timeout=timeout_s, fetch_local=False)
        if not ready:
            return []
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
        events: list[Event] = []
        for remote in dict.fromkeys(by_ref[ref] for ref in ready):
            events += self._news(remote)
        return events

    def get(self, handle: StateRef) -> bytes:
        """The bytes of a state."""
        return bytes(memoryview(self._ray.get(handle.ref, timeout=MESSAGE_S)))

    def kill(self, worker: WorkerId) -> None:
        """End a worker; one that is idle may first finish its store's writing, for which `close` waits."""
        remote = self._remotes.pop(worker, None)
        if remote is None:
            return
        if remote.watch is not None and not remote.streams:
            self._closing.append((remote.actor, remote.actor.close.remote()))
        else:
            self._ray.kill(remote.actor)

    def held(self, keys: Collection[Key]) -> set[Key]:
        """Those of the prefix keys whose snapshot every node with a worker has in its store."""
        actors = {remote.node_id: remote.actor for remote in self._remotes.values() if remote.watch is not None}
        if not keys or not actors:
            return set()
        try:
            answers = self._ray.get([actor.held.remote(set(keys)) for actor in actors.values()], timeout=HELD_S)
        except self._ray.exceptions.RayError:  # a worker is gone, which `wait` tells; nothing is counted on
            return set()
        return set.intersection(*answers)

    def clock(self) -> float:
        """Seconds of this machine."""
        return time.monotonic()

    def close(self) -> None:
        """End all workers and leave the cluster; a local one ends."""
        for worker in list(self._remotes):
            self.kill(worker)
        if self._closing:
            calls = [call for _, call in self._closing]
            self._ray.wait(calls, num_returns=len(calls), timeout=CLOSE_S)
            for actor, _ in self._closing:
                self._ray.kill(actor)
            self._closing.clear()
        self._cluster.close()

    def pids(self) -> dict[WorkerId, int]:
        """The process of each worker that is ready, on its own machine."""
        return {remote.id: remote.pid for remote in self._remotes.values() if remote.pid}

    def _awaited(self) -> dict[Any, _Remote]:
        """All that may bring news, and whose it is."""
        awaited: dict[Any, _Remote] = {}
        for remote in self._remotes.values():
            awaited[remote.starting if remote.watch is None else remote.watch] = remote
            for stream in remote.streams.values():
                awaited[stream.refs] = remote
        return awaited

    def _news(self, remote: _Remote) -> Iterator[Event]:
        """What a worker said, and that it is ready or lost."""
        ray = self._ray
        try:
            if remote.watch is None:
                yield from self._started(remote)
            for number, stream in list(remote.streams.items()):
                yield from self._said(remote, stream)
                if stream.refs.is_finished():
                    del remote.streams[number]
            ray.get(remote.watch, timeout=0)
        except ray.exceptions.GetTimeoutError:  # it lives
            return
        except ray.exceptions.RayError as error:
            yield self._lose(remote, error)

    def _started(self, remote: _Remote) -> Iterator[Event]:
        """Ready, if it is; an error of Ray's if it cannot be."""
        facts, remote.node_id, remote.pid, warnings = self._ray.get(remote.starting, timeout=0)
        remote.node = facts.node
        remote.watch = remote.actor.hold.remote()
        self._was_ready = True
        for sentence in warnings:
            self._tell(sentence)
        yield Ready(remote.id, facts)

    def _said(self, remote: _Remote, stream: _Stream) -> Iterator[Event]:
        """The messages of a unit that have come."""
        while stream.refs.next_ready():
            ref = next(stream.refs)
            if stream.made is not None:
                made, stream.made = stream.made, None
                state = StateRef(ref, remote.node, made.num_bytes)
                yield Said(remote.id, replace(made, state=state))
                continue
            for message in self._ray.get(ref, timeout=MESSAGE_S):
                if isinstance(message, Warned):
                    self._tell(message.sentence)
                elif isinstance(message, Made):
                    stream.made = message
                else:
                    yield Said(remote.id, message)

    def _tell(self, sentence: str) -> None:
        if sentence not in self._warned:
            self._warned.add(sentence)
            self._warn(sentence)

    def _lose(self, remote: _Remote, error: Exception) -> Lost:
        """Forget a worker whose calls fail."""
        del self._remotes[remote.id]
        self._ray.kill(remote.actor)
        cause = getattr(error, "cause", None)
        if isinstance(cause, UsageError) and not self._was_ready:
            raise UsageError(f"no worker can be opened: {cause}") from None
        with_node = bool(remote.node_id) and remote.node_id not in self._cluster.live_nodes()
        if with_node:
            return Lost(remote.id, f"its machine {remote.node} is gone", with_node=True)
        if isinstance(cause, Exception):
            return Lost(remote.id, f"its engine failed ({_shown(type(cause).__name__ + ': ' + str(cause))})")
        return Lost(remote.id, f"its process has ended ({_shown(_plain_reason(error))})")


def _plain_reason(error: Exception) -> str:
    """What Ray says of a death, without its advice."""
    text = str(error)
    for mark in ("Worker exit type:", "The actor is dead because", "The actor died because of an error"):
        if mark in text:
            return text[text.index(mark) :]
    return text


def _shown(text: str) -> str:
    """The text on one line, not long."""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARACTERS else line[: SHOWN_CHARACTERS - 3] + "..."
