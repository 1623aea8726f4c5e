"""The runtime over Ray, with workers that have no engine: what they say comes in order, what befalls them is told."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from apcbatch.cluster.ray_cluster import RayCluster
from apcbatch.cluster.ray_runtime import SLOW_START_S, RayRuntime, StateRef, _Remote
from apcbatch.cluster.ray_worker import WorkerActor
from apcbatch.cluster.recovery import read_in_flight
from apcbatch.cluster.runtime import MOST_UNITS, Event, Lost, Ready, Received, WorkerKind
from apcbatch.cluster.wire import Alive, Answer, Done, Exported, Import, ImportFailed, Piece, Unit
from apcbatch.errors import UsageError
from tests.ray.conftest import add_node
from tests.ray.fakes import make_fake

PATIENCE_S = 30.0

pytestmark = pytest.mark.ray


class Talk:
    """A runtime, and all that came of it."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.options = {"threads": 3}
        self.runtime = RayRuntime(RayCluster("auto"), WorkerKind(cpus=1), self.options, self.warnings.append, make_fake)
        self.events: list[Event] = []
        self.pids: dict[int, int] = {}

    def until(self, wanted: Callable[[Event], bool]) -> Event:
        """The first event like this that has not been waited for; bounded."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            for event in self.events:
                if wanted(event):
                    self.events.remove(event)
                    return event
            self.events += self.runtime.wait(0.25)
        raise AssertionError(f"it did not come; there were {self.events}")

    def spawn(self) -> int:
        """A worker that is ready."""
        worker = self.runtime.spawn()
        ready = self.until(lambda event: isinstance(event, Ready) and event.worker == worker)
        assert isinstance(ready, Ready)
        self.pids[worker] = ready.facts.pool_bytes
        return worker

    def done(self, unit: int) -> list[Any]:
        """All that was said of a unit, up to Done."""
        self.until(lambda event: isinstance(event, Received) and event.message == Done(unit))
        said = [event.message for event in self.events if isinstance(event, Received) and event.message.unit == unit]
        self.events = [event for event in self.events if not isinstance(event, Received) or event.message.unit != unit]
        return said


@pytest.fixture
def talk(nodes: Any) -> Iterator[Talk]:
    one = Talk()
    yield one
    one.runtime.close()
    end = time.monotonic() + PATIENCE_S
    while any(alive(pid) for pid in one.pids.values()):
        assert time.monotonic() < end, "closing the runtime left a worker's process"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def unit(number: int, *orders: str, exports: tuple[bytes, ...] = (), imports: tuple[bytes, ...] = ()) -> Unit:
    pieces: list[Any] = [Piece(100 * number + index, order, None) for index, order in enumerate(orders)]
    return Unit(number, tuple(pieces), frozenset(exports), dict.fromkeys(imports, Import(1, (0,))))


def test_what_a_worker_says_comes_whole_and_in_order(talk: Talk) -> None:
    """Catches messages that are lost, doubled or swapped, a state taken for a message, warnings that nobody gets."""
    import ray

    worker = talk.spawn()
    orders = ["say"] * 50 + ["warn beware", "make 300000"] + ["say"] * 50
    talk.runtime.submit(worker, unit(1, *orders, exports=(b"ab", b"cd")), {})
    talk.runtime.submit(worker, unit(2, "say"), {})
    said = talk.done(1)
    assert [one.number for one in said if isinstance(one, Answer)] == list(range(100, 202))
    made = [one for one in said if isinstance(one, Exported)]
    assert [(one.key, one.num_bytes) for one in made] == [(b"ab", 300000), (b"cd", 300000)]
    for one in made:
        assert bytes(memoryview(ray.get(one.state.ref))) == one.key * (one.num_bytes // 2)
    talk.done(2)
    assert talk.warnings == ["a worker was opened", "beware"]


def test_a_worker_is_heard_while_it_works(talk: Talk) -> None:
    """Catches a word from the middle of a pass that comes when the pass is over, or after what was said before it; and
    a worker that is asked what it is at, and does not say it."""
    worker = talk.spawn()
    talk.runtime.submit(worker, unit(1, "say", "report_alive", "sleep 60"), {})
    talk.until(lambda event: isinstance(event, Received) and event.message == Alive(1))
    talk.until(lambda event: isinstance(event, Received) and isinstance(event.message, Answer))
    end = time.monotonic() + PATIENCE_S
    path = talk.runtime._remotes[worker].in_flight
    while read_in_flight(path) != {102}:  # these nodes share a disk
        assert time.monotonic() < end
        time.sleep(0.05)
    assert talk.runtime.in_flight(worker) == {102}
    assert not os.path.exists(path)
    talk.runtime.kill(worker)


def test_a_worker_has_all_its_units_at_a_time(talk: Talk) -> None:
    """Catches an actor with fewer threads than a worker is given units: those left over would wait for one to end."""
    worker = talk.spawn()
    talk.runtime.submit(worker, unit(1, f"gather {MOST_UNITS}"), {})
    for number in range(2, MOST_UNITS + 1):
        talk.runtime.submit(worker, unit(number, "say"), {})
    answers = [one.result.token_ids for one in talk.done(1) if isinstance(one, Answer)]
    assert answers[-1] == [MOST_UNITS]


def test_states_go_from_worker_to_worker(talk: Talk) -> None:
    """Catches a state that does not arrive on another node, or not whole, or that ends with the process that made it
    while its node lives."""
    import ray

    first, second = talk.spawn(), talk.spawn()
    talk.runtime.submit(first, unit(1, "make 20", exports=(b"ab",)), {})
    [small] = [one.state for one in talk.done(1) if isinstance(one, Exported)]
    talk.runtime.submit(first, unit(2, "make 2000000", "sleep 60", exports=(b"ab",)), {})
    made = talk.until(lambda event: isinstance(event, Received) and isinstance(event.message, Exported))
    assert isinstance(made, Received) and isinstance(made.message, Exported)
    large = made.message.state
    assert ray.wait([large.ref], timeout=PATIENCE_S, fetch_local=False)[0], "it never comes"
    os.kill(talk.pids[first], signal.SIGKILL)
    lost = talk.until(lambda event: isinstance(event, Lost))
    assert isinstance(lost, Lost) and not lost.with_node
    talk.events.clear()
    for number, handle, count in ((3, large, 1000000), (4, small, 10), (5, large, 1000000)):
        talk.runtime.submit(second, unit(number, "say", imports=(b"ab",)), {b"ab": handle})
        done = talk.until(lambda event: isinstance(event, Received) and isinstance(event.message, Done))
        assert isinstance(done, Received) and isinstance(done.message, Done)
        said = [event.message for event in talk.events if isinstance(event, Received)]
        assert not [one for one in said if isinstance(one, ImportFailed)], f"unit {number}: {said}"
        assert [one.result.token_ids for one in said if isinstance(one, Answer)] == [[count]]
        talk.events.clear()
    assert talk.runtime.held([b"here", b"there"]) == {b"here"}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("end", ["die", "raise", "kill while idle"])
def test_the_end_of_a_worker_is_told(talk: Talk, end: str) -> None:
    """Catches a driver that waits for a dead worker, and answers that are dropped because their worker died after."""
    worker = talk.spawn()
    if end == "kill while idle":
        os.kill(talk.pids[worker], signal.SIGKILL)
    else:
        talk.runtime.submit(worker, unit(1, "say", "say", "sleep 0.5", end, "say"), {})
    lost = talk.until(lambda event: isinstance(event, Lost))
    assert isinstance(lost, Lost) and lost.worker == worker and not lost.with_node
    assert ("the device is broken" in lost.reason) == (end == "raise")
    in_flight = talk.runtime.in_flight(worker)
    assert in_flight == (set() if end == "kill while idle" else {103}), "who is to blame"
    answers = [event.message for event in talk.events if isinstance(event, Received)]
    numbers = [one.number for one in answers if isinstance(one, Answer)]
    # A process that is killed may take with it what it had said last.
    assert numbers[:2] == ([] if end == "kill while idle" else [100, 101])
    assert end != "raise" or numbers == [100, 101, 102]
    talk.runtime.submit(worker, unit(2, "say"), {})
    assert talk.runtime.wait(0.1) == []


def test_a_worker_that_is_ended_leaves_its_room(talk: Talk) -> None:
    """Catches an actor that stays on the cluster although its worker was ended, so that no machine can ever go and no
    other worker has its room."""
    import ray

    first, second = talk.spawn(), talk.spawn()
    third = talk.runtime.spawn()  # both nodes are full
    assert not any(isinstance(event, Ready) for event in talk.runtime.wait(1.0))
    talk.runtime.kill(first)
    talk.until(lambda event: isinstance(event, Ready) and event.worker == third)
    talk.runtime.kill(third)
    talk.runtime.kill(second)
    end = time.monotonic() + PATIENCE_S
    while ray.available_resources().get("CPU", 0) < 2:
        assert time.monotonic() < end, "the room of ended workers is not free"
        talk.runtime.wait(0.1)


def test_a_worker_keeps_a_state_until_the_driver_drops_it(nodes: Any) -> None:
    """Fault: Ray never hands over a state that a worker releases with one unit and is given with the next; and states
    that nobody reads any more fill the object stores."""
    import ray

    actor = WorkerActor()
    actor.start(make_fake, {"threads": 1})
    calls: list[tuple[Any, ...]] = []
    work = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *given: calls.append(given)))
    runtime = RayRuntime(RayCluster("auto"), WorkerKind(cpus=1), {})
    runtime._remotes[1] = _Remote(1, SimpleNamespace(work=work), None, 0.0)
    handles = {key: StateRef(ray.put(np.frombuffer(key * 3, np.uint8))) for key in (b"ab", b"cd")}

    def submit(number: int, *keys: bytes) -> None:
        runtime.submit(1, unit(number, "say", imports=keys), {key: handles[key] for key in keys})
        [answer] = [one for sent in actor.work(*calls.pop()) for one in sent if isinstance(one, Answer)]
        assert answer.result.token_ids == [3 * len(keys)]

    submit(1, b"ab", b"cd")
    submit(2)
    assert set(actor._imported) == {b"ab", b"cd"}
    del handles[b"cd"]
    submit(3, b"ab")
    assert set(actor._imported) == {b"ab"}
    os.unlink(actor._in_flight)


def test_the_end_of_a_run_waits_for_a_worker_that_has_answered(talk: Talk) -> None:
    """Fault: a worker that has sent its last answer is killed before its snapshots are stored, and leaves its file."""
    worker = talk.spawn()
    path = talk.runtime._remotes[worker].in_flight
    talk.runtime.submit(worker, unit(1, "say", "sleep 1"), {})
    talk.until(lambda event: isinstance(event, Received) and isinstance(event.message, Answer))
    assert os.path.exists(path)
    talk.runtime.close()
    assert not os.path.exists(path)


def test_workers_that_are_slow_to_start_are_told_once(talk: Talk) -> None:
    """Fault: a full cluster is waited for without a word, or each worker warns again."""
    now = talk.runtime.clock
    first, second = talk.runtime.spawn(), talk.runtime.spawn()
    talk.runtime.clock = lambda: now() + SLOW_START_S - 5
    talk.runtime.wait(0)
    assert not talk.warnings
    talk.runtime.clock = lambda: now() + SLOW_START_S + 5
    talk.events += talk.runtime.wait(0)
    [warning] = talk.warnings
    assert warning.startswith(f"worker {first} is not ready after {SLOW_START_S:g} s")
    talk.runtime.kill(first)
    talk.events += talk.runtime.wait(0)
    assert talk.warnings == [warning]
    ready = talk.until(lambda event: isinstance(event, Ready) and event.worker == second)
    assert isinstance(ready, Ready)
    talk.pids[second] = ready.facts.pool_bytes


def test_a_worker_that_cannot_be_opened_ends_the_run(talk: Talk) -> None:
    """Catches workers that are asked for again and again although the model is wrong."""
    talk.options["threads"] = -1
    talk.runtime.spawn()
    with pytest.raises(UsageError, match="give another --model"):
        talk.until(lambda event: False)


@pytest.mark.parametrize("dies", [True, False])
def test_a_worker_may_end_before_ray_knows_that_its_node_is_dead(
    dies: bool, nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: the requests of a worker whose machine failed are suspected, if its process is seen to end first."""
    import ray

    cluster = RayCluster("auto")
    runtime = RayRuntime(cluster, WorkerKind(cpus=1), {})
    live = {"node"}

    def take_from_node(worker: int) -> tuple[()] | set[int]:
        live.difference_update({"node"} if dies else ())
        return () if dies else {7}

    remote = runtime._remotes[1] = _Remote(1, None, None, 0.0, node="there", node_id="node", in_flight="file")
    with monkeypatch.context() as patched:
        patched.setattr(cluster, "live_nodes", lambda: live)
        patched.setattr(runtime, "in_flight", take_from_node)
        patched.setattr(runtime, "_end", lambda actor: None)
        lost = runtime._lose(remote, ray.exceptions.RayError("broken pipe"))
    assert (lost.with_node, lost.reason.split(" (")[0]) == (
        (True, "its machine there is gone") if dies else (False, "its process has ended")
    )
    assert dies or runtime.in_flight(1) == {7}


def test_a_node_goes_and_another_comes(talk: Talk, nodes: Any) -> None:
    """Catches a machine that is taken for its worker alone, a state of a lost machine that is waited for, and a
    worker that is not placed on a machine that comes later."""
    third = add_node(nodes)
    workers = [talk.spawn() for _ in range(3)]
    ids = {talk.runtime._remotes[worker].node_id: worker for worker in workers}
    doomed = ids[third.node_id]
    other = next(worker for worker in workers if worker != doomed)
    talk.runtime.submit(doomed, unit(1, "make 2000000", exports=(b"ab",)), {})
    [state] = [one.state for one in talk.done(1) if isinstance(one, Exported)]
    talk.runtime.submit(doomed, unit(2, "say", "sleep 60"), {})
    talk.until(lambda event: isinstance(event, Received) and isinstance(event.message, Answer))
    nodes.remove_node(third, allow_graceful=False)
    lost = talk.until(lambda event: isinstance(event, Lost))
    assert isinstance(lost, Lost) and lost.worker == doomed and lost.with_node
    talk.runtime.submit(other, unit(3, "say", imports=(b"ab",)), {b"ab": state})
    assert ImportFailed(3, b"ab") in talk.done(3)
    late = talk.runtime.spawn()
    assert talk.runtime.wait(0.5) == []
    nodes_before = len(nodes.list_all_nodes())
    fourth = add_node(nodes)
    talk.until(lambda event: isinstance(event, Ready) and event.worker == late)
    assert len(nodes.list_all_nodes()) == nodes_before + 1
    talk.runtime.kill(late)
    nodes.remove_node(fourth)
