"""Cluster options that cannot be used are refused with a sentence, before anything is started."""

from __future__ import annotations

import builtins
from pathlib import Path

import pytest

from apcbatch.cli.program import main
from apcbatch.cluster.ray_cluster import RayCluster
from apcbatch.errors import UsageError
from apcbatch.resolution import resolve


def test_what_cannot_be_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an option that is ignored in silence, and OUT being made for a run that cannot be."""
    for words, sentence in [
        (("--workers", "2"), "--workers is for a run on a cluster; give --ray"),
        (("--worker-memory", "1GiB"), "--worker-memory is for a run on a cluster"),
        (("--ray", "local", "--device", "cuda", "--worker-gpus", "0"), "--worker-gpus gives none"),
        (("--ray", "local", "--device", "cpu", "--worker-gpus", "1"), "--worker-gpus asks for one"),
        (("--ray", "local", "--worker-gpus", "2"), "up to 1"),
        (("--ray", "local", "--gpus", "2", "--worker-gpus", "0"), "--worker-gpus gives none"),
        (("--ray", "local", "--cpu-workers", "2"), "--cpu-workers is not an option any more; all workers"),
        (("--window", "2"), "--window is not an option any more; what is read ahead is bounded by tokens"),
        (("--config", "gone.yaml"), "cpu_workers is not an option any more; all workers of a run are of one kind"),
    ]:
        monkeypatch.chdir(tmp_path)
        Path("gone.yaml").write_text("ray: local\ncpu-workers: 2\n")
        (tmp_path / "in.jsonl").write_text('{"messages": [{"role": "user", "content": "hello"}]}\n')
        out = tmp_path / "out.jsonl"
        assert main(["run", str(tmp_path / "in.jsonl"), "-o", str(out), *words]) == 2
        assert sentence in capsys.readouterr().err
        assert not out.exists()


def test_an_option_that_is_gone_is_refused_in_the_environment() -> None:
    """Catches an option that there was and that is ignored in silence, or a hint at one that means something else."""
    with pytest.raises(UsageError, match="APCBATCH_CPU_WORKERS is not an option of apcbatch any more; all workers"):
        resolve({}, {"APCBATCH_CPU_WORKERS": "2"}, {}, "")


def test_without_ray_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a traceback where the package is not installed."""
    plain = builtins.__import__

    def refuse(name: str, *rest: object) -> object:
        if name == "ray":
            raise ImportError("No module named 'ray'")
        return plain(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UsageError, match="pip install 'apcbatch\\[ray\\]'"):
        RayCluster("local")
