"""How prefill and decode gain from threads: tokens/s, where the time goes and what memory gives, for both shapes.

    python benchmarks/make_shapes.py shapes
    python benchmarks/threads.py shapes --out benchmarks/results/threads.json
    python tools/make_performance_docs.py

With --before FILE, the document of another build measured in turns with this one, each rate has that one's beside it.
Takes two minutes on 16 idle cores. The last line is the document: machine; rates, one for each shape, dtype, number of
threads and pass; read_bytes_per_s by number of threads.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from statistics import median_low
from typing import Any

import torch
from bench.machine import describe, limits
from bench.parts import recorded_parts
from bench.server import Server
from growing import write
from safetensors import safe_open

from apcbatch.engine.engine import Engine

SHAPES = ("mamba-130m", "jamba-small")
DTYPES = ("float32", "bfloat16")
PROMPT = 2048  # tokens of a prefill
NEW_TOKENS = 12  # of each running sequence


def timed_pass(server: Server, running: int) -> tuple[float, dict[str, float]]:
    """Tokens/s of one pass and the share of each part: a prefill where `running` is 0, else decoding."""
    prompts = server.prompts(running or 1, 16 if running else PROMPT)
    with recorded_parts() as parts:
        seconds = server.serve(prompts, 1 + NEW_TOKENS if running else 1)
    rate = running * NEW_TOKENS / seconds["decode"] if running else PROMPT / seconds["wall"]
    return rate, {part: spent / seconds["wall"] for part, spent in parts.items() if spent}


def measure(server: Server, running: int, repeats: int) -> dict[str, Any]:
    """The median pass of some."""
    passes = [timed_pass(server, running) for _ in range(repeats)]
    rate = median_low([rate for rate, _ in passes])
    name = f"decode, {running} running" if running else f"prefill of {PROMPT}"
    return {"pass": name, "tokens_per_s": rate, "parts": dict(passes)[rate]}


def step_bytes(model: Path, engine: Engine, dtype: torch.dtype, running: int) -> int:
    """What one step must read and write at least: each weight once (of a mixture those of all experts), and the state
    of each sequence, read and written. KV and activations are left out."""
    count = 0
    for file in model.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            names = set(tensors.keys())
            untied = any("lm_head" in name for name in names)
            shapes = [tensors.get_slice(name).get_shape() for name in names if not (untied and "embed" in name)]
            count += sum(math.prod(shape) for shape in shapes)
    return count * dtype.itemsize + 2 * running * engine.footprint.state_bytes


def with_before(document: dict[str, Any], before: dict[str, Any], change: str) -> dict[str, Any]:
    """The document with another one's rate beside each of the same model, dtype, threads and pass."""
    keys = ("model", "dtype", "threads", "pass")
    known = {tuple(one[key] for key in keys): one["tokens_per_s"] for one in before["rates"]}
    rates = []
    for one in document["rates"]:
        earlier = known.get(tuple(one[key] for key in keys))
        rates.append(one if earlier is None else {**one, "before": earlier})
    return {**document, "change": change, "rates": rates}


def main() -> None:
    """Measure and write the document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", type=Path)
    parser.add_argument("--threads", type=int, nargs="+", default=[16, 8, 4, 2, 1])
    parser.add_argument("--running", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--before", type=Path, help="the document of an earlier build on the same machine")
    parser.add_argument(
        "--change", default="the change, measured in turns", help="what lies between; default: %(default)s"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    servers = {}
    for shape in SHAPES:
        for dtype in DTYPES:
            engine = Engine(
                str(options.shapes / shape),
                dtype=dtype,
                policy="none",
                max_running=128,
                max_batch_tokens=PROMPT,
                draft=(),
            )
            servers[shape, dtype] = Server(engine)
    document: dict[str, Any] = {"machine": describe(), "rates": [], "read_bytes_per_s": {}}
    for threads in options.threads:
        torch.set_num_threads(threads)
        document["read_bytes_per_s"][str(threads)] = limits(torch.float32)["read_bytes_per_s"]
        for (shape, dtype), server in servers.items():
            timed_pass(server, 1)
            for running in (0, *options.running):
                one = {"model": shape, "dtype": dtype, "threads": threads, **measure(server, running, options.repeats)}
                needed = step_bytes(options.shapes / shape, server.engine, getattr(torch, dtype), running or 1)
                one["bytes_per_s"] = needed * one["tokens_per_s"] / (running or PROMPT)
                document["rates"].append(one)
                print(f"{shape} {dtype}, {threads} threads, {one['pass']}: {one['tokens_per_s']:.1f}", flush=True)
        if options.before:
            document = with_before(document, json.loads(options.before.read_text()), options.change)
        write(document, options.out)
    print(json.dumps(document))


if __name__ == "__main__":
    main()
