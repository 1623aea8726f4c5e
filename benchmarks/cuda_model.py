"""A whole model on a CUDA device: prefill against its matrix products, decode against the bytes of its weights.

    python benchmarks/cuda_model.py MODEL [--dtype bfloat16]

MODEL is a folder (benchmarks/make_shapes.py writes some). Everything goes through the public Engine; the figures are
medians; the last line is one JSON document, and one before it what is measured by then. Must not know: how the engine
does it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from apcbatch import Engine, Request
from apcbatch.model.families import load_model_config
from apcbatch.model.hf_config import ModelConfig

REPEATS = 5
PREFILL = ((1, 2048), (1, 8192), (1, 32768), (16, 512), (64, 128))
DECODE = (1, 8, 32, 128)
NEW_TOKENS = 128
MAX_BATCH_TOKENS = 8192
NUMBERS = itertools.count()


def serve(engine: Engine, prompts: Sequence[list[int]], new_tokens: int) -> float:
    """Seconds until all prompts are answered."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    requests = [Request(str(next(NUMBERS)), p, max_tokens=new_tokens, ignore_eos=True) for p in prompts]
    for result in engine.run(requests):
        if result.error is not None:
            raise result.error
    return time.perf_counter() - begin


def median(run: Callable[[], float]) -> float:
    """Of REPEATS runs after one that warms up."""
    run()
    return statistics.median(run() for _ in range(REPEATS))


def device_seconds(run: Callable[[], object], count: int = 20) -> float:
    """Of one call, by events around many."""
    run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / count


def bandwidth() -> float:
    """Bytes a second of a large copy, read and written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / device_seconds(lambda: target.copy_(source))


def products(config: ModelConfig, tokens: int) -> Iterator[tuple[int, int, int, int]]:
    """(how many, rows, inputs, outputs) of the products of all layers; experts share their tokens evenly."""
    h, d, n, r = config.hidden_size, config.d_inner, config.d_state, config.dt_rank
    for inputs, outputs in ((h, 2 * d), (d, r + 2 * n), (r, d), (d, h)):
        yield config.num_mamba_layers, tokens, inputs, outputs
    heads, kv = (count * config.head_dim for count in (config.num_attention_heads, config.num_key_value_heads))
    for inputs, outputs in ((h, heads), (h, kv), (h, kv), (heads, h)):
        yield config.num_attention_layers, tokens, inputs, outputs
    experts = max(1, config.num_experts)
    shared = -(-tokens * config.num_experts_per_tok // experts)
    for name, count, rows in (("mlp", 1, tokens), ("moe", experts, shared)):
        for inputs, outputs in ((h, 2 * config.intermediate_size), (config.intermediate_size, h)):
            yield count * config.feed_forwards.count(name), rows, inputs, outputs


def products_seconds(config: ModelConfig, tokens: int, dtype: torch.dtype) -> float:
    """The products of all layers for so many tokens, alone."""
    total = 0.0
    for count, rows, inputs, outputs in products(config, tokens):
        if count:
            x = torch.randn(rows, inputs, device="cuda").to(dtype)
            weight = torch.randn(outputs, inputs, device="cuda").to(dtype)
            total += count * device_seconds(lambda x=x, weight=weight: torch.mm(x, weight.t()))
    return total


def bytes_a_step(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of the weights that a decode step of one sequence reads: its experts' and the head's, no embedding."""
    experts = config.num_experts_per_tok / max(1, config.num_experts)
    h, f = config.hidden_size, config.intermediate_size
    weights = sum(count * inputs * outputs for count, _, inputs, outputs in products(config, 1))
    idle = config.feed_forwards.count("moe") * config.num_experts * 3 * h * f * (1 - experts)
    return int((weights - idle + config.vocab_size * h) * dtype.itemsize)


def measure(folder: Path, dtype: str) -> dict[str, Any]:
    """All figures."""
    options = {
        "dtype": dtype,
        "device": "cuda",
        "max_batch_tokens": MAX_BATCH_TOKENS,
        "max_running": max(DECODE),
    }
    document: dict[str, Any] = {"model": folder.name, "dtype": dtype, "device": torch.cuda.get_device_name()}
    document["bandwidth_bytes_s"] = bandwidth()
    config = load_model_config(folder)
    document["bytes_a_step"] = bytes_a_step(config, getattr(torch, dtype))
    engine = Engine(folder, policy="none", **options)
    vocab = engine.vocab_size

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[random.randrange(vocab) for _ in range(length)] for _ in range(count)]

    for count, length in PREFILL:
        seconds = median(lambda count=count, length=length: serve(engine, prompts(count, length), 1))
        alone = products_seconds(config, count * length, getattr(torch, dtype))
        document[f"prefill {count} x {length}"] = {
            "tokens_s": count * length / seconds,
            "products_share": alone / seconds,
        }
    for running in DECODE:
        short = prompts(running, 16)
        step = (
            median(lambda short=short: serve(engine, short, 1 + NEW_TOKENS))
            - median(lambda short=short: serve(engine, short, 1))
        ) / NEW_TOKENS
        document[f"decode {running}"] = {
            "step_ms": 1e3 * step,
            "tokens_s": running / step,
            "of_bandwidth": document["bytes_a_step"] / step / document["bandwidth_bytes_s"],
        }
    engine.close()
    print(json.dumps(document), flush=True)
    keeping = Engine(folder, policy="all", block_size=64, **options)
    plain = Engine(folder, policy="none", **options)
    pairs = [(serve(keeping, p, 1), serve(plain, p, 1)) for p in (prompts(1, 2048) for _ in range(REPEATS + 1))]
    document["snapshots every 64 over none"] = statistics.median(a / b for a, b in pairs[1:])
    for engine in (keeping, plain):
        engine.close()
    exact = Engine(folder, policy="none", exact=True, **options)
    document["exact prefill 1 x 2048 tokens_s"] = 2048 / median(lambda: serve(exact, prompts(1, 2048), 1))
    short = prompts(1, 16)
    document["exact decode 1 step_ms"] = (
        1e3
        * (median(lambda: serve(exact, short, 1 + NEW_TOKENS)) - median(lambda: serve(exact, short, 1)))
        / NEW_TOKENS
    )
    exact.close()
    return document


def main() -> None:
    """Measure one model and print the document."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.model, arguments.dtype)))


if __name__ == "__main__":
    main()
