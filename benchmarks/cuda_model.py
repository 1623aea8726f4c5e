"""Whole models on a CUDA device, with exact products and with fast ones, for performance-cuda-models.md.

    python benchmarks/make_shapes.py shapes --shape mamba-2.8b --shape jamba-mini-block
    python benchmarks/cuda_model.py shapes/mamba-2.8b shapes/jamba-mini-block --input chats.jsonl \\
        --out benchmarks/results/cuda_models.json
    python tools/make_performance_docs.py

Both kinds of products go through the public Engine, in turns; figures are medians. Whole runs (--input) are those of
the first model, each a process of its own. The last line is the document; OUT grows as figures come.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from growing import growing

from apcbatch import Engine, Request, __version__
from apcbatch.model.attention import Attention
from apcbatch.model.families import load_model_config, state_layout
from apcbatch.model.feed_forward import Mixture, Mlp
from apcbatch.model.hf_config import ModelConfig
from apcbatch.model.mamba import Mamba
from apcbatch.model.sub_blocks import SubBlockKind
from apcbatch.plan.footprint import Footprint
from apcbatch.resolution import load
from apcbatch.tuning.measurement import measure

REPEATS = 5
TIMED_CALLS = 20
PREFILL = ((1, 2048), (1, 8192), (1, 32768), (16, 512), (64, 128))
DECODE = (1, 8, 32, 128)
NEW_TOKENS = 64
MAX_BATCH_TOKENS = 8192
NUMBERS = itertools.count()
KINDS = {"exact": True, "fast": False}  # of products: whether they are exact
RUN_FLAGS = ["--max-tokens", "16", "--ignore-eos", "--max-batch-tokens", "8192", "--max-running", "128"]
RUN_FLAGS += ["--pool-size", "16GiB", "--store-size", "40GiB"]
RUNS: dict[str, tuple[list[str], str | None]] = {  # flags, and the store: of each round, a new one
    "planned, no store": (["--policy", "planned"], None),
    "planned, no store, fast": (["--policy", "planned", "--fast"], None),
    "planned, cold store": (["--policy", "planned"], "planned"),
    "planned, warm store": (["--policy", "planned"], "planned"),
    "all, cold store": (["--policy", "all"], "all"),
    "all, warm store": (["--policy", "all"], "all"),
}


def serve(engine: Engine, prompts: Sequence[list[int]], new_tokens: int) -> float:
    """Seconds until all prompts are answered."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    requests = [Request(str(next(NUMBERS)), p, max_tokens=new_tokens, ignore_eos=True) for p in prompts]
    for result in engine.run(requests):
        if result.error is not None:
            raise result.error
    return time.perf_counter() - begin


def in_turns(runs: Mapping[str, Callable[[], float]]) -> dict[str, float]:
    """The median of each: REPEATS rounds after one that warms up."""
    rounds = [{name: run() for name, run in runs.items()} for _ in range(1 + REPEATS)]
    return {name: statistics.median(one[name] for one in rounds[1:]) for name in runs}


def device_seconds(run: Callable[[], object]) -> float:
    """Return the device time of one call: the mean of TIMED_CALLS, by events around all of them."""
    run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(TIMED_CALLS):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / TIMED_CALLS


def bandwidth() -> float:
    """Bytes a second of a large copy, read and written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / device_seconds(lambda: target.copy_(source))


def bus() -> list[float]:
    """Bytes a second to the device and from it, of copies of pinned memory as large as a snapshot."""
    host, device = torch.empty(22 << 20, dtype=torch.uint8, pin_memory=True), torch.empty(22 << 20, dtype=torch.uint8)
    device = device.cuda()
    pairs = (device, host), (host, device)
    return [host.numel() / device_seconds(partial(target.copy_, source, True)) for target, source in pairs]


def snapshot_costs(folder: Path, dtype: str) -> dict[str, Any]:
    """What tune-block-size measures of snapshots, in seconds, and the break-even length of a restore from disk."""
    options = {"model": str(folder), "dtype": dtype, "device": "cuda", "max_batch_tokens": MAX_BATCH_TOKENS}
    footprint = Footprint.of(state_layout(load_model_config(folder), dtype))
    found = measure(load(options, None, {}), footprint, print)
    return {
        "name": "snapshots",
        "unit": "costs",
        "bytes": footprint.state_bytes,
        "keep_s": found.snapshot_s,
        "restore_memory_s": found.restore_ram_s,
        "restore_disk_s": found.restore_disk_s,
        "write_s": found.write_byte_s * footprint.state_bytes,
        "break_even_tokens": found.break_even_disk,
    }


def kinds(config: ModelConfig) -> Counter[SubBlockKind]:
    """The kinds of sub-blocks, and how many layers have each."""
    return Counter(block.kind for layer in range(config.num_layers) for block in config.layer(layer))


def products(config: ModelConfig, tokens: int) -> Iterator[tuple[int, int, int, int]]:
    """(how many, rows, inputs, outputs) of the products of all layers; experts share their tokens evenly."""
    h = config.hidden_size
    for kind, count in kinds(config).items():
        rows = tokens
        if isinstance(kind, Mamba):
            d, n, r = kind.d_inner, kind.d_state, kind.dt_rank
            shapes = (h, 2 * d), (d, r + 2 * n), (r, d), (d, h)
        elif isinstance(kind, Attention):
            heads, kv = kind.heads * kind.head_dim, kind.kv_heads * kind.head_dim
            shapes = (h, heads), (h, kv), (h, kv), (heads, h)
        elif isinstance(kind, Mixture):
            count, rows = count * kind.experts, -(-tokens * kind.per_token // kind.experts)
            shapes = (h, 2 * kind.expert.columns), (kind.expert.columns, h)
        else:
            assert isinstance(kind, Mlp)
            shapes = (h, 2 * kind.columns), (kind.columns, h)
        for inputs, outputs in shapes:
            yield count, rows, inputs, outputs


def products_seconds(config: ModelConfig, tokens: int, dtype: torch.dtype) -> float:
    """The products of all layers for a number of tokens, alone."""
    total = 0.0
    for count, rows, inputs, outputs in products(config, tokens):
        x = torch.randn(rows, inputs, device="cuda").to(dtype)
        weight = torch.randn(outputs, inputs, device="cuda").to(dtype)
        total += count * device_seconds(lambda x=x, weight=weight: torch.mm(x, weight.t()))
    return total


def bytes_a_step(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of the weights that a decode step of one sequence reads: its experts' and the head's, no embedding."""
    h = config.hidden_size
    weights = sum(count * inputs * outputs for count, _, inputs, outputs in products(config, 1))
    mixtures = [(kind, count) for kind, count in kinds(config).items() if isinstance(kind, Mixture)]
    idle = sum(count * (kind.experts - kind.per_token) * 3 * h * kind.expert.columns for kind, count in mixtures)
    return int((weights - idle + config.vocab_size * h) * dtype.itemsize)


class Prompts:
    """Random ones, fresh for every call."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def draw(self, count: int, length: int) -> list[list[int]]:
        return [[random.randrange(self._vocab_size) for _ in range(length)] for _ in range(count)]


def prefill(engines: Mapping[str, Engine], prompts: Prompts, count: int, length: int) -> dict[str, float]:
    """Tokens a second of each engine."""

    def run(engine: Engine) -> float:
        return serve(engine, prompts.draw(count, length), 1)

    runs = {name: partial(run, engine) for name, engine in engines.items()}
    return {name: count * length / seconds for name, seconds in in_turns(runs).items()}


def decode(engines: Mapping[str, Engine], prompts: Prompts, running: int) -> dict[str, float]:
    """Seconds of a step of each engine: what more new tokens take."""
    short = prompts.draw(running, 16)
    long = in_turns({name: partial(serve, engine, short, 1 + NEW_TOKENS) for name, engine in engines.items()})
    first = in_turns({name: partial(serve, engine, short, 1) for name, engine in engines.items()})
    return {name: (long[name] - first[name]) / NEW_TOKENS for name in engines}


def open_timed(folder: Path, **options: Any) -> tuple[Engine, float]:
    """An engine, and the seconds until it was there."""
    begin = time.perf_counter()
    options = {"draft": (), "max_batch_tokens": MAX_BATCH_TOKENS, "max_running": max(DECODE), **options}
    engine = Engine(folder, device="cuda", **options)
    return engine, time.perf_counter() - begin


def close_all(engines: dict[str, Engine]) -> None:
    """Close the engines, and return their memory to the device."""
    for engine in engines.values():
        engine.close()
    engines.clear()
    gc.collect()
    torch.cuda.empty_cache()


def figures(folder: Path, dtype: str) -> Iterator[dict[str, Any]]:
    """One after the other: name, unit, and a value of each kind of products."""
    engines, took = {}, {}
    for name, exact in KINDS.items():
        engines[name], took[name] = open_timed(folder, dtype=dtype, policy="none", exact=exact)
    yield {"name": "loading", "unit": "s", **took}
    prompts, config, kind = Prompts(engines["exact"].vocab_size), load_model_config(folder), getattr(torch, dtype)
    for count, length in PREFILL:
        rates = prefill(engines, prompts, count, length)
        products = count * length / products_seconds(config, count * length, kind)
        yield {"name": f"prefill {count} x {length}", "unit": "tokens/s", **rates, "products": products}
    for running in DECODE:
        steps = decode(engines, prompts, running)
        yield {"name": f"decode {running}", "unit": "s", **steps, "bytes": bytes_a_step(config, kind)}
    close_all(engines)
    engines = {policy: open_timed(folder, dtype=dtype, policy=policy)[0] for policy in ("all", "none")}
    rates = prefill(engines, prompts, 1, 2048)
    yield {"name": "snapshots every 64 over none", "unit": "times", "exact": rates["none"] / rates["all"]}
    close_all(engines)
    yield snapshot_costs(folder, dtype)


def whole_run(folder: Path, options: argparse.Namespace, scratch: Path, flags: list[str]) -> dict[str, Any]:
    """One run of the command over the input: its summary, and the seconds of the whole command as `command_s`."""
    command = [sys.executable, "-m", "apcbatch", "run", str(options.input), "--limit", str(options.limit)]
    command += ["-o", str(scratch / f"{next(NUMBERS)}.jsonl"), "--model", str(folder), "--dtype", options.dtype]
    command += ["--device", "cuda", "--quiet", "--progress", "none", *RUN_FLAGS, *flags]
    begin = time.perf_counter()
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return {"command_s": time.perf_counter() - begin, **json.loads(done.stdout.splitlines()[-1])}


def running_s(run: dict[str, Any]) -> float:
    """Seconds of a run without loading."""
    seconds: float = run["seconds"]["total"] - run["seconds"]["load"]
    return seconds


def whole_runs(folder: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Of each kind of run the one with the median of its seconds without loading, and all of these as `rounds_s`."""
    taken: dict[str, list[dict[str, Any]]] = {name: [] for name in RUNS}
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as scratch:
            for name, (flags, store) in RUNS.items():
                stored = [] if store is None else ["--store", f"{scratch}/{store}"]
                taken[name].append(whole_run(folder, options, Path(scratch), [*flags, *stored]))
                print(f"{name}: {running_s(taken[name][-1]):.2f} s", file=sys.stderr, flush=True)
    for name, runs in taken.items():
        ordered = sorted(runs, key=running_s)
        yield {"name": name, "rounds_s": [running_s(run) for run in runs], **ordered[(len(runs) - 1) // 2]}


def main() -> None:
    """Measure the models and print the document."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL", help="folders of models")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--input", type=Path, help="conversations for whole runs")
    parser.add_argument("--limit", type=int, default=40, help="conversations of them; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="of whole runs; default: %(default)s")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    begin = time.perf_counter()
    document: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "version": __version__,
        "repeats": REPEATS,
        "bandwidth_bytes_s": bandwidth(),
        "bus_bytes_s": bus(),
        "models": [{"model": folder.name, "dtype": options.dtype, "figures": []} for folder in options.models],
        "runs": [],
    }
    keep = growing(document, options.out, begin)
    if options.input:  # first, as this process keeps the device's memory
        for run in whole_runs(options.models[0], options):
            keep(run, document["runs"])
    for folder, model in zip(options.models, document["models"], strict=True):
        for figure in figures(folder, options.dtype):
            keep(figure, model["figures"])
    print(json.dumps(document))


if __name__ == "__main__":
    main()
