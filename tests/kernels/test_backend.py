"""Backends: every device has every op, an engine's own is its own, and who observes one sees all that it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from apcbatch import Engine, Request
from apcbatch.kernels.cpu.backend import CpuBackend
from apcbatch.kernels.ops import OPS
from apcbatch.model.devices import backend_for

CUDA = torch.device("cuda", 0)


def test_backends_of_one_process_keep_their_own_exactness(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: an engine that asks for exact products makes another one's exact, or names their arithmetic so."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    exact, free = backend_for(CUDA), backend_for(CUDA, exact=False)
    weight = torch.ones(3, 4)
    for backend, is_exact in ((exact, True), (free, False), (exact, True)):
        assert backend.exact == backend.pack_linear(weight).exact == is_exact
        assert ("exact" in backend.numerics(torch.bfloat16)) == is_exact
        assert ("fast" in backend.numerics(torch.bfloat16)) != is_exact


def test_engines_of_one_process_share_no_backend(tiny_checkpoint) -> None:
    """Fault: what is asked of one engine's ops reaches another engine. On the CPU both are exact, to the bit."""
    folder = tiny_checkpoint("mamba")
    prompts = [Request("a", [1, 2, 3, 4], max_tokens=4, ignore_eos=True, logprobs=True)]
    one, other = Engine(folder, pool_size_bytes=1 << 20), Engine(folder, exact=False, pool_size_bytes=1 << 20)
    assert one.backend is not other.backend
    assert one.fingerprint == other.fingerprint
    answers = [[(r.token_ids, r.logprobs) for r in engine.run(prompts)] for engine in (one, other)]
    assert answers[0] == answers[1]


def test_an_observer_is_left_every_op_of_its_backend() -> None:
    """Faults: an op that goes round the observer; one that another backend's calls, or later ones, are left to."""
    backend, other = CpuBackend(), CpuBackend()
    seen: list[str] = []

    def note(name: str, op: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        seen.append(name)
        return None

    with backend.observed(note):
        for name in OPS:
            getattr(backend, name)(1, 2, key=3)
        other.rms_norm(torch.ones(2, 4), None, 1e-5, torch.float32)
    assert seen == list(OPS)
    assert vars(backend) == {}
    y = backend.rms_norm(torch.ones(2, 4), None, 1e-5, torch.float32)
    assert seen == list(OPS) and y.shape == (2, 4)
    with pytest.raises(KeyError), backend.observed(lambda name, op: None):
        raise KeyError
    assert vars(backend) == {}, "a measurement that fails stops timing the engine"
