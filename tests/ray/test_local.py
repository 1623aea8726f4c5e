"""`apcbatch run --ray local` to its end, in the suite that every change runs."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.ray.test_run import PATIENCE_S, answers, command, environment, run

pytestmark = pytest.mark.ray


@pytest.mark.effort(3)
def test_a_run_on_a_cluster_of_its_own(conversations: Path, tmp_path: Path) -> None:
    """Catches a cluster that cannot be started, other answers than without it, a port that is open to other machines,
    workers that get no time beside other processes, and processes that are left."""
    words = (conversations, "-o", tmp_path / "ray.jsonl", "--ray", "local", "--workers", 1, "--worker-cpus", 1)
    heard: set[str] = set()
    left: set[psutil.Process] = set()
    niceness: set[int] = set()
    run_of_ray = subprocess.Popen(
        command(*words, "-q"),
        env={**environment(), "HOME": str(tmp_path)},  # where Ray puts a token
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    watched = psutil.Process(run_of_ray.pid)
    try:
        while run_of_ray.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                run_of_ray.wait(timeout=0.5)
            with suppress(psutil.NoSuchProcess):
                found = [watched, *watched.children(recursive=True)]
                left.update(found)
                for one in found:
                    with suppress(psutil.Error):
                        if "WorkerActor" in " ".join(one.cmdline()):
                            niceness.add(one.nice() - watched.nice())
                        heard |= {link.laddr.ip for link in one.net_connections("inet") if link.status == "LISTEN"}
        _, stderr = run_of_ray.communicate(timeout=PATIENCE_S)
    finally:
        run_of_ray.kill()
    assert run_of_ray.returncode == 0, stderr
    assert niceness == {0}
    assert heard and all(ip.removeprefix("::ffff:").startswith("127.") or ip == "::1" for ip in heard), heard
    run(conversations, "-o", tmp_path / "alone.jsonl")
    assert answers(tmp_path / "ray.jsonl") == answers(tmp_path / "alone.jsonl")
    _, alive = psutil.wait_procs(left, timeout=PATIENCE_S)
    assert not alive, "processes of the cluster outlive the run"
