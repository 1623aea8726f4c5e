"""Benchmarks of one model on this machine: kernels, prefill, decode, the cost of snapshots, restores.

Must not know: how anything is printed. Every figure is a median; A and B of a ratio alternate in one run.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from apcbatch.config import Config
from apcbatch.engine.engine import Engine
from apcbatch.kernels import ops
from apcbatch.kernels.ragged import Ragged
from apcbatch.types import Request
from apcbatch.version import VERSION

PREFILL_TOKENS = (128, 512, 2048)
DECODE_RUNNING = (1, 8, 32)
SNAPSHOT_EVERY = 64
NEW_TOKENS = 16
REPEATS = 5


def measure(config: Config, note: Callable[[str], None]) -> dict[str, Any]:
    """All figures as one document; `note` gets a line for each as it comes."""
    document: dict[str, Any] = {
        "version": VERSION,
        "model": config.model,
        "dtype": config.dtype,
        "isa": ops.isa(),
        "threads": torch.get_num_threads(),
        "figures": [],
    }
    for name, value, unit in _figures(config):
        document["figures"].append({"name": name, "value": value, "unit": unit})
        note(f"{name:<44} {value:>12,.3f} {unit}")
    return document


def _figures(config: Config) -> Iterator[tuple[str, float, str]]:
    yield "scan, one thread, d_state 16, float32", _scan_ns(), "ns a token and channel"
    yield from _linear_figures()
    for tokens in PREFILL_TOKENS:
        yield f"prefill of {tokens}", _prefill_rate(config, tokens), "tokens/s"
    for running in DECODE_RUNNING:
        yield f"decode, {running} running", _decode_rate(config, running), "tokens/s"
    yield f"prefill with a snapshot every {SNAPSHOT_EVERY} over none", _snapshot_ratio(config), "x"
    memory_ms, disk_ms = _restore_ms(config)
    yield "restore of 1024 tokens from memory", memory_ms, "ms a request beyond its one token"
    yield "restore of 1024 tokens from disk", disk_ms, "ms a request beyond its one token"


def _median_s(run: Callable[[], object], repeats: int = REPEATS) -> float:
    run()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _scan_ns(tokens: int = 512, channels: int = 512, states: int = 16) -> float:
    x, dt, z = (torch.randn(tokens, channels) for _ in range(3))
    b, c = torch.randn(tokens, states), torch.randn(tokens, states)
    a, d = -torch.rand(states, channels) - 0.1, torch.randn(channels)
    state = torch.zeros(1, states, channels)
    integers = [[0, tokens], [-1], [0], [0, 0], [], []]
    ragged = Ragged.create(*(torch.tensor(values, dtype=torch.int64) for values in integers))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    seconds = _median_s(lambda: ops.selective_scan(x, dt, a, b, c, d, z, d, state, ragged))
    torch.set_num_threads(threads)
    return 1e9 * seconds / (tokens * channels)


def _linear_figures() -> Iterator[tuple[str, float, str]]:
    for rows in (1, 32, 512):
        for dtype in (torch.float32, torch.bfloat16):
            weight, x = torch.randn(3072, 768).to(dtype), torch.randn(rows, 768).to(dtype)
            packed = ops.pack_linear(weight)
            seconds = _median_s(partial(ops.linear, x, packed))
            name = f"linear {rows} x 768 x 3072, {str(dtype).removeprefix('torch.')}"
            yield name, 2e-9 * rows * 768 * 3072 / seconds, "GFLOP/s"


def _engine(config: Config, policy: Any = "none", **options: Any) -> Engine:
    options = {"block_size": SNAPSHOT_EVERY, "max_running": max(DECODE_RUNNING), **options}
    return Engine(config.model, dtype=config.dtype, policy=policy, **options)


def _prompt(engine: Engine, tokens: int) -> list[int]:
    return [random.randrange(engine.vocab_size) for _ in range(tokens)]


def _serve(engine: Engine, prompts: list[list[int]], new_tokens: int = 1) -> None:
    requests = [Request(str(i), p, max_tokens=new_tokens, ignore_eos=True) for i, p in enumerate(prompts)]
    for result in engine.run(requests):
        if result.error is not None:
            raise result.error


def _prefill_rate(config: Config, tokens: int) -> float:
    engine = _engine(config)
    return tokens / _median_s(lambda: _serve(engine, [_prompt(engine, tokens)]))


def _decode_rate(config: Config, running: int) -> float:
    engine = _engine(config)
    prompts = [_prompt(engine, 16) for _ in range(running)]
    rates = []
    for _ in range(REPEATS):
        before = engine.counters.seconds["decode"]
        _serve(engine, prompts, 1 + NEW_TOKENS)
        rates.append(running * NEW_TOKENS / (engine.counters.seconds["decode"] - before))
    return statistics.median(rates)


def _snapshot_ratio(config: Config, tokens: int = 2048) -> float:
    """Time of a prefill that keeps every boundary over that of one that keeps none, alternating."""
    keeping, plain = _engine(config, "all"), _engine(config)
    ratios = []
    for _ in range(REPEATS):
        prompt = _prompt(plain, tokens)
        times = []
        for engine in (keeping, plain):
            begin = time.perf_counter()
            _serve(engine, [prompt])
            times.append(time.perf_counter() - begin)
        ratios.append(times[0] / times[1])
    return statistics.median(ratios)


def _restore_ms(config: Config, tokens: int = 1024) -> tuple[float, float]:
    """(from memory, from disk): a prompt whose first 1024 tokens are held, against a prompt of one token."""
    with tempfile.TemporaryDirectory() as folder:
        engine = _engine(config, "all", store=folder)
        prompt = _prompt(engine, tokens + 1)
        _serve(engine, [prompt])
        one = _median_s(lambda: _serve(engine, [prompt[:1]]))
        memory = _median_s(lambda: _serve(engine, [prompt]))
        engine.close()
        disk = []
        for _ in range(REPEATS):
            fresh = _engine(config, "all", store=folder)
            _serve(fresh, [prompt[:1]])
            begin = time.perf_counter()
            _serve(fresh, [prompt])
            disk.append(time.perf_counter() - begin)
            fresh.close()
    return 1e3 * (memory - one), 1e3 * (statistics.median(disk) - one)
