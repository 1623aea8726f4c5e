"""Workers as processes of this machine: the whole way of units, states and answers, and every way that one ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from apcbatch import Engine, Request
from apcbatch.cluster.driver import ClusterEngine
from apcbatch.cluster.local_seam import LocalSeam
from apcbatch.cluster.seam import Lost, Ready, WorkerKind
from apcbatch.cluster.settings import ClusterSettings, Hooks
from apcbatch.cluster.unit import Piece, Unit
from apcbatch.cluster.wire import take_apart
from apcbatch.engine.serving import serve
from apcbatch.plan.planner import Planner
from tests.cluster.test_worker import BLOCK, POOL_BYTES, alone, record, requests_of
from tests.plan.plan_oracle import Dataset, make_plan, random_dataset, within_vocabulary
from tests.tiny import VOCAB

KIND = WorkerKind()


@pytest.fixture
def open_seam(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LocalSeam]]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    opened: list[LocalSeam] = []

    def make(model: str, **options: object) -> LocalSeam:
        values = {"model": model, "device": "cpu", "block_size": BLOCK, "pool_size": POOL_BYTES, **options}
        opened.append(LocalSeam(values))
        return opened[-1]

    yield make
    for seam in opened:
        processes = [local.process for local in seam._workers.values()]
        seam.close()
        assert all(process.returncode is not None for process in processes)
    assert not list(tmp_path.glob("apcbatch-*")), "states are left behind"


def events_until(seam: LocalSeam, kind: type, limit_s: float = 120) -> list:
    events: list = []
    end = time.monotonic() + limit_s
    while not any(isinstance(event, kind) for event in events):
        assert time.monotonic() < end, f"no {kind.__name__} after {limit_s} s, only {events}"
        events += seam.wait(1.0)
    return events


def many_prompts() -> Dataset:
    """Some small datasets together."""
    parts = [within_vocabulary(random_dataset(seed), VOCAB, stretch=3) for seed in range(5, 12)]
    prompts = [prompt for part in parts for prompt in part.prompts]
    return Dataset(prompts, list(range(len(prompts))))


@pytest.mark.parametrize(("family", "kills"), [("mamba", 0), ("jamba", 1)])
def test_a_plan_over_processes(
    family: str, kills: int, tiny_checkpoint: Callable[..., Path], open_seam: Callable[..., LocalSeam]
) -> None:
    """Catches an answer that depends on where it was computed or on a worker that was killed, one that is lost or
    doubled, and a state that stays behind when its last reader has come."""
    folder, data = str(tiny_checkpoint(family)), many_prompts()
    requests, plan = requests_of(data), make_plan(data, Planner(BLOCK))
    expected = alone(folder, requests, plan)
    seam = open_seam(folder)
    engine = ClusterEngine(seam, ClusterSettings((KIND, KIND), least_unit_s=1e-6), Hooks(to_wire=take_apart))
    while len(engine._crew.ready) < 2:
        engine._listen(1.0)
    source = iter([replace(requests[index], plan=plan.requests[index]) for index in plan.order])
    found: dict[int, tuple] = {}
    lent, killed = set(), 0
    for results in serve(engine, lambda: next(source, None)):
        for result in results:
            assert int(result.id) not in found
            found[int(result.id)] = record(result)
        lent |= {state.path for local in seam._workers.values() for states in local.lent.values() for state in states}
        if killed < kills and found:
            pid = next(local.process.pid for local in seam._workers.values() if local.lent)
            os.kill(pid, signal.SIGKILL)
            killed += 1
    assert engine.counters.workers_lost == killed == kills
    assert {index: one[:5] for index, one in found.items()} == {index: one[:5] for index, one in expected.items()}
    if not kills:
        assert found == expected and lent
    while any(local.lent for local in seam._workers.values()):  # until the last unit is said to be done
        engine._listen(1.0)
    assert not [path for path in seam._folder.iterdir() if path.suffix != ".at-work"]


def test_how_a_worker_ends_is_told(
    tiny_checkpoint: Callable[..., Path], open_seam: Callable[..., LocalSeam], tmp_path: Path
) -> None:
    """Catches a worker that cannot start and says nothing, a death that is not told, and work for one that is gone
    that ends the driver."""
    seam = open_seam(str(tmp_path / "no-model"))
    worker = seam.spawn(KIND)
    (lost,) = [event for event in events_until(seam, Lost) if isinstance(event, Lost)]
    assert lost.worker == worker and "no-model" in lost.reason
    seam = open_seam(str(tiny_checkpoint("mamba")))
    worker = seam.spawn(KIND)
    (ready,) = events_until(seam, Ready)
    assert ready.facts.fingerprint == _fingerprint(str(tiny_checkpoint("mamba")))
    os.kill(seam._workers[worker].process.pid, signal.SIGKILL)
    unit = Unit(1, (Piece(1, take_apart(Request("r", [1, 2, 3])), None),))
    for _ in range(3):
        seam.submit(worker, unit, {})
    assert events_until(seam, Lost) == [Lost(worker, "its process was ended by SIGKILL")]
    seam.submit(worker, unit, {})
    seam.kill(worker)
    assert seam.wait(0.01) == []


def _fingerprint(folder: str) -> str:
    engine = Engine(folder, pool_size_bytes=1 << 20)
    engine.close()
    return engine.fingerprint


def test_workers_end_with_the_driver(tiny_checkpoint: Callable[..., Path]) -> None:
    """Catches processes that go on when the one that started them was killed."""
    code = (
        "import sys, time\n"
        "from apcbatch.cluster.local_seam import LocalSeam\n"
        "from apcbatch.cluster.seam import WorkerKind\n"
        "seam = LocalSeam({'model': sys.argv[1], 'device': 'cpu', 'pool_size': 1 << 20})\n"
        "worker = seam.spawn(WorkerKind())\n"
        "while not seam.wait(1.0): pass\n"
        "print(seam._workers[worker].process.pid, seam._folder, flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", code, str(tiny_checkpoint("mamba"))]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    pid, folder = driver.stdout.readline().split()
    driver.kill()
    driver.wait()
    driver.stdout.close()
    end = time.monotonic() + 60
    while _is_alive(int(pid)):
        assert time.monotonic() < end, "the worker goes on"
        time.sleep(0.05)
    shutil.rmtree(folder)


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
