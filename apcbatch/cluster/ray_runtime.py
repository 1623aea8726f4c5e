"""RayRuntime: the Runtime on Ray Core. A worker is an actor, a unit a streaming call, a state an object reference.

Invariants:
- Ray never repeats a call or restarts an actor by itself.
- The driver fetches messages, but never states.
- Every call is bounded, and none begins before RayCluster.check: StoppedError if the head or the raylet here is gone.
- The messages of a worker arrive before its Lost event.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from apcbatch.cluster.ray_cluster import RayCluster
from apcbatch.cluster.ray_worker import (
    CONCURRENCY,
    Make,
    Opened,
    Sent,
    WorkerActor,
    make_worker,
    take_in_flight,
)
from apcbatch.cluster.runtime import Event, Lost, Ready, Received, WorkerId, WorkerKind
from apcbatch.cluster.wire import Done, Exported, Key, Unit
from apcbatch.errors import StoppedError, UsageError

MESSAGE_S = 60.0  # maximum time to fetch a message that is ready
HELD_S = 60.0  # maximum time for the answers of `held`
IN_FLIGHT_S = 20.0  # maximum time for a node to read an in-flight file
UNREACHABLE_S = 60.0  # an actor unavailable for longer counts as lost
RETRY_S = 1.0  # interval between attempts to reach an unavailable actor
SLOW_START_S = 60.0  # a worker that is not ready by then is warned about
NODE_DIED = "its node has died"  # part of Ray's error message for an actor
CLOSE_S = 60.0  # maximum time for all workers to finish writing their stores
SHOWN_CHARACTERS = 300


@dataclass(eq=False)
class StateRef:
    """The runtime's handle of an exported state. ref: Ray's reference to its bytes."""

    ref: Any


@dataclass(eq=False)
class _Remote:
    """A worker's actor.

    starting: the call of `start`. watch: the call of `hold`, which fails when the process ends. node: name in its
    facts. node_id: Ray's id of its node. in_flight: path of its in-flight file on that node. unreachable: time since
    which it is unavailable, else 0. asked: time of the last attempt to reach it. streams: by unit number, the streaming
    call of each unit, Ray's generator of object references. imported: handles of the states that it keeps references
    to, by key.
    """

    id: WorkerId
    actor: Any
    starting: Any
    spawned: float
    watch: Any = None
    node: str = ""
    node_id: str = ""
    in_flight: str = ""
    is_ready: bool = False
    unreachable: float = 0.0
    asked: float = 0.0
    streams: dict[int, Any] = field(default_factory=dict)
    imported: dict[Key, weakref.ref[StateRef]] = field(default_factory=dict)


class RayRuntime:
    """Runs workers as actors of a cluster, and closes the cluster with the runtime.

    kind: resources of each worker. options: arguments of its constructor. warn: receives each distinct warning of the
    workers once. make: creates a worker in its process.
    """

    def __init__(
        self,
        cluster: RayCluster,
        kind: WorkerKind,
        options: Mapping[str, Any],
        warn: Callable[[str], None] = lambda sentence: None,
        make: Make = make_worker,
    ) -> None:
        self._cluster, self._ray, self._make = cluster, cluster.ray, make
        self._kind, self._options, self._warn = kind, options, warn
        self._class = self._ray.remote(WorkerActor)
        self._remotes: dict[WorkerId, _Remote] = {}
        self._lost: dict[WorkerId, Collection[int] | None] = {}  # the requests that were in flight
        self._warned: set[str] = set()
        self._num_workers = 0
        self._was_ready = self._has_warned_of_slow_start = False

    def spawn(self) -> WorkerId:
        """Request an actor. It is pending until Ray has room for it, which Ray's autoscaler sees as demand."""
        self._num_workers += 1
        kind = self._kind
        create = self._class.options(
            num_cpus=kind.cpus,
            num_gpus=kind.gpus,
            memory=kind.memory_bytes or None,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=CONCURRENCY,
            scheduling_strategy="SPREAD",
        )
        actor = self._cluster.call(create.remote)
        # The worker's options, with the salt, go to its process alone: the cluster keeps an actor's own arguments.
        starting = actor.start.remote(self._make, self._options)
        self._remotes[self._num_workers] = _Remote(self._num_workers, actor, starting, self.clock())
        return self._num_workers

    def submit(self, worker: WorkerId, unit: Unit, states: Mapping[Key, StateRef]) -> None:
        """Start a unit's streaming call, which also names the worker's earlier imports that the driver has dropped.

        The references are nested in a list, so that the worker waits for the states instead of Ray.
        """
        remote = self._remotes.get(worker)
        if remote is not None:
            self._cluster.check()
            dropped = [key for key, handle in remote.imported.items() if handle() is None]
            for key in dropped:
                del remote.imported[key]
            remote.imported.update((key, weakref.ref(state)) for key, state in states.items())
            call = remote.actor.work.options(num_returns="streaming")
            remote.streams[unit.number] = call.remote(
                unit, [(key, state.ref) for key, state in states.items()], dropped
            )

    def wait(self, timeout_s: float) -> list[Event]:
        """Return the next events. Raises StoppedError if the cluster is gone, and UsageError if a worker fails with a
        UsageError before any worker was ready."""
        self._cluster.check()
        self._warn_of_slow_start()
        lost: list[Event] = list(self._unreachable_lost())
        if lost:
            return lost
        ray, by_ref = self._ray, self._awaited()
        if not by_ref:
            time.sleep(min(timeout_s, RETRY_S))
            return []
        refs = list(by_ref)
        ready, _ = ray.wait(refs, num_returns=1, timeout=timeout_s, fetch_local=False)
        if not ready:
            return []
        self._cluster.check()
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
        events: list[Event] = []
        for remote in dict.fromkeys(by_ref[ref] for ref in ready):
            events += self._events(remote)
        return events

    def in_flight(self, worker: WorkerId) -> Collection[int] | None:
        """Read the numbers of a worker's requests in flight from the file on its node; None if unknown."""
        if worker in self._lost:
            return self._lost.pop(worker)
        remote = self._remotes.get(worker)
        if remote is None or not remote.in_flight:
            return None
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(remote.node_id, soft=False)
        take = self._ray.remote(take_in_flight).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
        try:
            numbers: Collection[int] | None = self._cluster.call(
                lambda: self._ray.get(take.remote(remote.in_flight), timeout=IN_FLIGHT_S)
            )
            return numbers
        except self._ray.exceptions.RayError:  # the node is gone, so no request is suspected; or it is too busy
            return None if remote.node_id in self._cluster.live_nodes() else ()

    def kill(self, worker: WorkerId) -> None:
        """End a worker's process at once."""
        remote = self._remotes.pop(worker, None)
        if remote is not None:
            self._end(remote.actor)

    def held(self, keys: Collection[Key]) -> set[Key]:
        """Return the subset of the prefix keys whose snapshot is in the store of every node with a worker."""
        actors = {remote.node_id: remote.actor for remote in self._remotes.values() if remote.is_ready}
        if not keys or not actors:
            return set()
        try:
            answers = self._cluster.call(
                lambda: self._ray.get([actor.held.remote(set(keys)) for actor in actors.values()], timeout=HELD_S)
            )
        except self._ray.exceptions.RayError:  # a worker is gone, which `wait` reports
            return set()
        return set.intersection(*answers)

    def clock(self) -> float:
        """Return this machine's monotonic time in seconds."""
        return time.monotonic()

    def close(self) -> None:
        """End all workers once they have finished writing their stores, and leave the cluster. A local cluster ends."""
        remotes = list(self._remotes.values())
        self._remotes.clear()
        actors = [remote.actor for remote in remotes if remote.is_ready and not remote.unreachable]
        if actors:
            with suppress(StoppedError):  # the workers have ended with the cluster
                self._cluster.call(
                    lambda: self._ray.wait([a.close.remote() for a in actors], num_returns=len(actors), timeout=CLOSE_S)
                )
        for remote in remotes:
            self._end(remote.actor)
        self._cluster.close()

    def _end(self, actor: Any) -> None:
        """End an actor's process. If the cluster is gone it has ended, which `wait` reports."""
        with suppress(StoppedError):
            self._cluster.call(lambda: self._ray.kill(actor))

    def _awaited(self) -> dict[Any, _Remote]:
        """Return the calls and streams that can produce events, each with its worker."""
        awaited: dict[Any, _Remote] = {}
        for remote in self._remotes.values():
            call = remote.watch if remote.is_ready else remote.starting
            if call is not None:
                awaited[call] = remote
            for stream in remote.streams.values():
                awaited[stream] = remote
        return awaited

    def _events(self, remote: _Remote) -> Iterator[Event]:
        """Yield the events of one worker."""
        ray = self._ray
        try:
            if not remote.is_ready:
                yield from self._started(remote)
            for number in list(remote.streams):
                yield from self._messages(remote, number)
            ray.get(remote.watch, timeout=0)
        except ray.exceptions.GetTimeoutError:  # it is alive
            return
        except ray.exceptions.ActorUnavailableError:  # its process or machine may be gone; its units are lost
            remote.streams.clear()
            remote.watch, remote.asked = None, self.clock()
            remote.unreachable = remote.unreachable or remote.asked
        except ray.exceptions.RayError as error:
            yield self._lose(remote, error)

    def _started(self, remote: _Remote) -> Iterator[Event]:
        """Yield Ready for a worker that has opened. Raises Ray's error if opening failed."""
        opened: Opened = self._ray.get(remote.starting, timeout=0)
        remote.node, remote.node_id = opened.facts.node, opened.node_id
        remote.in_flight = opened.in_flight
        remote.watch = remote.actor.hold.remote()
        remote.is_ready = self._was_ready = True
        for sentence in opened.warnings:
            self._warn_once(sentence)
        yield Ready(remote.id, replace(opened.facts, state_bytes=self._cluster.state_bytes(opened.node_id)))

    def _messages(self, remote: _Remote, unit: int) -> Iterator[Event]:
        """Yield the messages of a unit that have arrived, with each exported state as a reference."""
        stream = remote.streams[unit]
        while unit in remote.streams and stream.next_ready():
            ref = next(stream, None)
            if ref is None:
                del remote.streams[unit]
                return
            sent: Sequence[Sent] = self._ray.get(ref, timeout=MESSAGE_S)
            for message in sent:
                if isinstance(message, str):
                    self._warn_once(message)
                    continue
                if isinstance(message, Exported):
                    message = replace(message, state=StateRef(remote.actor.state.remote(message.unit, message.key)))
                elif isinstance(message, Done):
                    del remote.streams[unit]
                yield Received(remote.id, message)

    def _warn_of_slow_start(self) -> None:
        """Warn once about a worker that is slow to start."""
        if self._has_warned_of_slow_start:
            return
        latest = self.clock() - SLOW_START_S
        slow = [remote.id for remote in self._remotes.values() if not remote.is_ready and remote.spawned < latest]
        if slow:
            self._has_warned_of_slow_start = True
            self._warn_once(
                f"worker {slow[0]} is not ready after {SLOW_START_S:g} s: it loads the model, or the cluster has no "
                "room for it yet; `ray status` says which"
            )

    def _unreachable_lost(self) -> Iterator[Lost]:
        """Yield Lost for each unavailable worker whose machine is gone, or that stayed unavailable for
        UNREACHABLE_S."""
        unreachable = [remote for remote in self._remotes.values() if remote.unreachable]
        live = self._cluster.live_nodes() if unreachable else set()
        now = self.clock()
        for remote in unreachable:
            if remote.node_id not in live or now - remote.unreachable > UNREACHABLE_S:
                yield self._forget(remote, f"its machine {remote.node} is gone or cannot be reached", with_node=True)
            elif remote.watch is None and now - remote.asked > RETRY_S:
                remote.watch, remote.asked = remote.actor.hold.remote(), now

    def _warn_once(self, sentence: str) -> None:
        if sentence not in self._warned:
            self._warned.add(sentence)
            self._warn(sentence)

    def _lose(self, remote: _Remote, error: Exception) -> Lost:
        """Return the Lost event of a worker whose calls fail.

        Raises UsageError if it could not be opened and no worker was ready before.
        """
        cause = getattr(error, "cause", None)
        if isinstance(cause, UsageError) and not self._was_ready:
            raise UsageError(f"no worker can be opened: {cause}") from None
        if NODE_DIED not in str(error):
            in_flight = self.in_flight(remote.id)  # after which a node that died with the worker is known to be dead
            if not remote.node_id or remote.node_id in self._cluster.live_nodes():
                self._lost[remote.id] = in_flight
                if isinstance(cause, Exception):
                    return self._forget(remote, f"its engine failed ({_shown(f'{type(cause).__name__}: {cause}')})")
                return self._forget(remote, f"its process has ended ({_shown(_plain_reason(error))})")
        return self._forget(remote, f"its machine {remote.node} is gone", with_node=True)

    def _forget(self, remote: _Remote, reason: str, with_node: bool = False) -> Lost:
        del self._remotes[remote.id]
        self._end(remote.actor)
        return Lost(remote.id, reason, with_node)


def _plain_reason(error: Exception) -> str:
    """Return Ray's reason for an actor's end, without its advice."""
    text = str(error)
    for mark in ("Worker exit type:", "The actor is dead because", "The actor died because of an error"):
        if mark in text:
            return text[text.index(mark) :]
    return text


def _shown(text: str) -> str:
    """Return the text on one line, shortened to SHOWN_CHARACTERS."""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARACTERS else line[: SHOWN_CHARACTERS - 3] + "..."
