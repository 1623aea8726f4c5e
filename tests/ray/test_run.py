"""`apcbatch run --ray`: OUT is that of a run without Ray, whatever ends while it is made."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from apcbatch.model.locate import DEMO_DIR
from tests.ray.conftest import ROOT, STORE_BYTES, add_node

PATIENCE_S = 120.0
TIMES = ("created", "prefill_ms", "decode_ms", "begin_s", "end_s", "drafted_tokens", "accepted_tokens")

pytestmark = [pytest.mark.ray, pytest.mark.effort(3)]


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "apcbatch", "run", *map(str, words), "--progress", "none", "--max-tokens", "12"]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run(*words: object) -> dict[str, Any]:
    """Do a run to its end; its summary."""
    done = subprocess.run(
        command(*words, "-q"), env=environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1, "something else than the summary is on the standard output"
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(one) for key, one in value.items() if key not in TIMES}
    return [without_times(one) for one in value] if isinstance(value, list) else value


def records(path: Path) -> dict[str, Any]:
    """The records of an OUT by id, each there once, without times."""
    found: dict[str, Any] = {}
    for line in path.read_text().splitlines():
        record = without_times(json.loads(line))
        assert record["id"] not in found, "a request was answered twice"
        found[record["id"]] = record
    return found


def answers(path: Path) -> dict[str, Any]:
    """What each request was answered, without what says how it was computed."""
    return {id: (one["line"], one["error"], one["response"]["body"]["choices"]) for id, one in records(path).items()}


@pytest.fixture(params=["demo", "jamba"])
def model(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> str:
    """The demo model, and a random Jamba with the demo's tokenizer."""
    if request.param == "demo":
        return "demo"
    folder = Path(shutil.copytree(tiny_checkpoint("jamba", vocab_size=4096), tmp_path / "jamba"))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO_DIR / name, folder / name)
    return str(folder)


def test_out_equals_a_run_without_ray(nodes: Any, conversations: Path, model: str, tmp_path: Path) -> None:
    """Catches answers that depend on where a request ran, cold or from a store; tokens that are computed again beyond
    the cluster's grid; a --resume that refuses another number of workers; sums that count what several workers have
    more than once; and Ray's words on the standard output."""
    words = (conversations, "--model", model, "--logprobs")
    cluster = ("--ray", nodes.address, "--workers", 2, "--worker-cpus", 1)
    for run_name in ("cold", "warm"):
        alone, together = tmp_path / f"{run_name}-alone.jsonl", tmp_path / f"{run_name}-ray.jsonl"
        summary = run(*words, "-o", alone, "--store", tmp_path / "store-alone")
        of_cluster = run(*words, "-o", together, "--store", tmp_path / "store-ray", *cluster)
        assert answers(together) == answers(alone)
        for name in ("requests", "errors", "unique_tokens"):
            assert of_cluster[name] == summary[name], name
        again = of_cluster["computed_tokens"] - summary["computed_tokens"]
        assert 0 <= again < summary["block_size"] * summary["requests"], again
    kept = together.read_bytes().splitlines(keepends=True)
    together.write_bytes(b"".join(kept[: len(kept) // 2]) + kept[-1][:40])
    run(*words, "-o", together, "--resume")
    assert answers(together) == answers(alone)


@pytest.fixture
def many(conversations: Path, tmp_path: Path) -> Path:
    """Conversations for two workers, with beginnings of their own."""
    path, lines = tmp_path / "many.jsonl", []
    for number, line in enumerate(4 * conversations.read_text().splitlines()):
        record = json.loads(line)
        record["messages"][0]["content"] = f"{number} {record['messages'][0]['content']}"
        lines.append(json.dumps(record | {"id": f"{number}"}) + "\n")
    path.write_text("".join(lines))
    return path


@contextmanager
def begun(address: str, many: Path, out: Path, num_workers: int) -> Iterator[subprocess.Popen[str]]:
    """A run on a cluster, once its workers are ready and it has some answers."""
    words = ("--workers", num_workers, "--worker-cpus", 1, "--worker-timeout", 15)
    process = subprocess.Popen(
        command(many, "-o", out, "--ray", address, *words),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    told: list[str] = []
    try:
        while sum("is ready" in line for line in told) < num_workers:
            line = process.stderr.readline()
            assert line, "".join(told)
            told.append(line)
        end = time.monotonic() + PATIENCE_S
        while not out.exists() or not out.stat().st_size:
            assert time.monotonic() < end and process.poll() is None, process.communicate()[1]
            time.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.fixture
def going(nodes: Any, many: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run on two workers."""
    with begun(nodes.address, many, tmp_path / "out.jsonl", 2) as process:
        yield process


def workers() -> list[psutil.Process]:
    """The processes of actors that the cluster of these tests has."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE and "WorkerActor" in " ".join(process.cmdline()):
                found.append(process)
    return found


@pytest.mark.parametrize("end", ["worker", "hang", "node"])
def test_what_a_death_leaves_is_done_by_others(
    end: str, going: subprocess.Popen[str], nodes: Any, many: Path, tmp_path: Path
) -> None:
    """Catches a run that hangs, loses or doubles requests, or answers otherwise, when a worker or its machine goes."""
    stopped = workers()[0]
    if end == "worker":
        stopped.kill()
    elif end == "hang":
        stopped.suspend()
    else:
        victim = next(node for node in nodes.list_all_nodes() if not node.head)
        nodes.remove_node(victim, allow_graceful=False)
        add_node(nodes)
    try:
        _, stderr = going.communicate(timeout=PATIENCE_S)
    finally:
        with suppress(psutil.NoSuchProcess):
            stopped.kill()
    assert going.returncode == 0, stderr
    reasons = {"worker": "its process has ended", "hang": "it said nothing for 15 s", "node": "its machine"}
    assert f"is lost: {reasons[end]}" in stderr, stderr
    run(many, "-o", tmp_path / "alone.jsonl")
    assert answers(tmp_path / "out.jsonl") == answers(tmp_path / "alone.jsonl")


def test_a_dead_driver_leaves_no_worker_and_can_be_continued(
    going: subprocess.Popen[str], nodes: Any, many: Path, tmp_path: Path
) -> None:
    """Catches workers that outlive their driver, and a --resume that does not go on from what a killed driver left."""
    going.send_signal(signal.SIGKILL)
    going.communicate()
    end = time.monotonic() + PATIENCE_S
    while workers():
        assert time.monotonic() < end, "a worker outlives its driver"
        time.sleep(0.1)
    out = tmp_path / "out.jsonl"
    run(many, "-o", out, "--resume", "--ray", nodes.address, "--workers", 1, "--worker-cpus", 1)
    run(many, "-o", tmp_path / "alone.jsonl")
    assert answers(out) == answers(tmp_path / "alone.jsonl")


@pytest.fixture
def own_head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Callable[[], list[psutil.Process]]]]:
    """(address, its processes) of a cluster that is this machine alone, beside the one of the other tests."""
    folder = tmp_path_factory.mktemp("r")
    ray = str(Path(sys.executable).with_name("ray"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = (f"--port={port}", "--num-cpus=1", f"--object-store-memory={STORE_BYTES}", f"--temp-dir={folder}")
    started = subprocess.run(
        [ray, "start", "--head", "--include-dashboard=false", *words],
        env={**environment(), "RAY_worker_niceness": "0"},
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert started.returncode == 0, started.stderr

    def processes() -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if str(folder) in " ".join(process.cmdline()):
                    found.append(process)
        return found

    yield f"127.0.0.1:{port}", processes
    for process in processes():
        with suppress(psutil.Error):
            process.kill()


@pytest.mark.parametrize("ended", [("gcs_server",), ("raylet",), ("gcs_server", "raylet")], ids="+".join)
def test_a_dead_head_is_a_sentence_and_the_command_that_continues(
    ended: tuple[str, ...], own_head: tuple[str, Callable[[], list[psutil.Process]]], many: Path, tmp_path: Path
) -> None:
    """Catches a run that waits for minutes for a worker, or ends with Ray's words or none, after its cluster."""
    address, processes = own_head
    out = tmp_path / "out.jsonl"
    with begun(address, many, out, 1) as process:
        victims = [one for one in processes() if one.name() in ended]
        assert len(victims) == len(ended)
        for one in victims:
            one.kill()
        _, stderr = process.communicate(timeout=PATIENCE_S)
    sentence, last = stderr.splitlines()[-2:]
    assert process.returncode == 1 and sentence.startswith("apcbatch: the ") and "is gone" in sentence, stderr
    assert shlex.split(last)[1:4] == ["-m", "apcbatch", "run"] and last.endswith(" --resume"), stderr
    assert ".cc:" not in stderr and "Traceback" not in stderr, stderr
    kept = len(records(out))
    summary = run(many, "-o", out, "--resume")
    assert len(records(out)) == kept + summary["requests"] and not summary["errors"]
