"""A model over two CUDA devices: the bits of one device, alone and in company, from memory and from disk."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from apcbatch import Request
from apcbatch.model import graphs
from apcbatch.model.batch import Batch
from apcbatch.model.peer_transfer import Hop
from tests.engine.opened import OpenedEngine
from tests.engine.runs import told
from tests.engine.test_cuda_engine import MODELS
from tests.engine.test_sameness import agent_prompts
from tests.engine.test_stages import of_every_kind, serve
from tests.tiny import VOCAB

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are fewer than two CUDA devices"),
]
COLD = {"policy": "none", "max_running": 1}


@pytest.fixture(params=MODELS)
def folder(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path]) -> Path:
    name, shape = MODELS[request.param]
    return tiny_checkpoint(name, **{"num_hidden_layers": 4, **shape})


def open_engine(folder: Path, gpus: int, **options: object) -> OpenedEngine:
    return OpenedEngine(folder, device="cuda", gpus=gpus, **{"block_size": 16, "pool_size_bytes": 64 << 20, **options})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_devices_change_no_bit(folder: Path, dtype: str, tmp_path: Path) -> None:
    """Catches what one device does and two do not: launches on the wrong one, a residual or tokens that are read
    before they are there, memory that is given away too early, states of another stage."""
    seed = random.randrange(1 << 30)
    requests = of_every_kind(seed)
    cold = open_engine(folder, 1, dtype=dtype, **COLD)
    expected = {key: told(result) for key, result in serve(cold, requests).items()}
    cold.close()
    num_cached = 0
    for gpus, options in (
        (2, COLD),
        (2, {"policy": "none", "max_running": 32}),
        (2, {"policy": "all", "max_running": 3, "max_batch_tokens": 64, "store": tmp_path / "two"}),
        (1, {"policy": "all", "max_running": 8, "store": tmp_path / "two"}),
        (1, {"policy": "all", "max_running": 4, "store": tmp_path / "one"}),
        (2, {"policy": "all", "max_running": 5, "store": tmp_path / "one"}),
        (2, {"policy": "last", "max_running": 4, "pool_size_bytes": 1 << 18}),
    ):
        engine = open_engine(folder, gpus, dtype=dtype, **options)
        assert engine.fingerprint == cold.fingerprint
        results = serve(engine, requests)
        engine.close()
        found = {key: told(result) for key, result in results.items()}
        num_cached += sum(result.cached_tokens for result in results.values())
        differing = [key for key in expected if found[key] != expected[key]]
        assert not differing, f"seed {seed}, {gpus} GPUs, {options}: {differing}"
    assert num_cached, "of all engines together: the smallest pool may have no room for a snapshot's KV"


def test_snapshots_have_the_same_bytes(folder: Path) -> None:
    """Catches a state that is kept before its layers have written it, or in another order of layers."""
    seed = random.randrange(1 << 30)
    requests = agent_prompts(seed, 3)
    one, two = (open_engine(folder, gpus, dtype="bfloat16", max_running=4) for gpus in (1, 2))
    for engine in (one, two):
        serve(engine, requests)
    history = list(requests[-1].token_ids)
    positions = one.boundaries(history)
    assert positions and positions == two.boundaries(history)
    for position in positions:
        expected, found = one.snapshot(history[:position]), two.snapshot(history[:position])
        assert all(torch.equal(expected[name], found[name]) for name in expected), f"seed {seed}, {position}"


def test_both_devices_replay_graphs(tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches decode passes that one of the devices takes op by op, and graphs that answer otherwise than that."""
    replays, replay = [], graphs._Graph.replay

    def noted(graph: graphs._Graph, batch: Batch, entering: torch.Tensor | None = None) -> torch.Tensor:
        made = replay(graph, batch, entering)
        replays.append(made.device)
        return made

    monkeypatch.setattr(graphs._Graph, "replay", noted)
    folder = tiny_checkpoint("jamba", **MODELS["jamba whole"][1])
    source = random.Random(1)
    requests = [
        Request(str(n), [source.randrange(VOCAB) for _ in range(20 + n)], max_tokens=150, ignore_eos=True)
        for n in range(7)
    ]
    options = {"policy": "none", "dtype": "bfloat16", "max_running": 3}
    replayed = {key: told(one) for key, one in serve(open_engine(folder, 2, **options), requests).items()}
    first, second = (replays.count(torch.device("cuda", number)) for number in range(2))
    assert first == second > 290
    monkeypatch.setattr(graphs, "MOST_CAPTURED", 0)
    assert replayed == {key: told(one) for key, one in serve(open_engine(folder, 2, **options), requests).items()}


def test_a_hop_waits_for_its_tensor_alone() -> None:
    """Catches a tensor that is copied before it is made or read before it is there, memory that is used again while it
    is under way, a source that waits for what the target is asked for, and a copy that waits for what the source is
    asked for later: each of the last two lets one device of a pipeline wait for the other."""
    source, target = (torch.device("cuda", number) for number in range(2))
    hop, sums = Hop(source, target), []
    for number in range(50):
        with torch.cuda.device(source):
            made = torch.full((1 << 20,), float(number), device=source).mul_(2)
            sent = hop.send(made)
            del made
            torch.full((1 << 20,), -1.0, device=source)
        with torch.cuda.device(target):
            sums.append(sent.receive().sum())
    assert [float(one) for one in sums] == [2.0 * number * (1 << 20) for number in range(50)]

    def busy(device: torch.device) -> None:
        with torch.cuda.device(device):
            one = torch.zeros((8192, 8192), device=device)
            for _ in range(60):
                one = one @ one

    for device in (source, target):  # what is asked for first loads kernels
        busy(device)
        torch.cuda.synchronize(device)
    with torch.cuda.device(source):
        made = torch.ones(1 << 20, device=source)
    busy(target)
    sent = hop.send(made)
    busy(source)
    sent.arrived.synchronize()
    streams = [torch.cuda.current_stream(device) for device in (source, target)]
    assert not any(stream.query() for stream in streams), "the copy has waited for the work beside it"
    assert float(sent.receive().sum()) == 1 << 20
