r"""vLLM on a CUDA device, by the passes and the whole run of cuda_model.py: the column beside ours.

    python benchmarks/make_shapes.py shapes --shape mamba-2.8b --shape jamba-mini-block
    python benchmarks/cuda_vllm.py shapes/mamba-2.8b shapes/jamba-mini-block --vllm-python vllm/bin/python \
        --input chats.jsonl --out benchmarks/results/cuda_vllm.json
    python tools/make_performance_docs.py

--vllm-python is an interpreter that has vllm. Measure both on one device, one after the other: vLLM takes most of its
memory. Passes are measured without its prefix cache; the whole run (--input, with the first model) with it, in each of
its settings, and the best one counts. Figures are medians. The last line is the document; OUT grows as figures come.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.datasets import requests_in
from cuda_model import DECODE, NEW_TOKENS, PREFILL, REPEATS, Prompts
from growing import write
from peer_engines.process import Engine

from apcbatch.config import Config
from apcbatch.model.families import load_model_config

RUN_TOKENS = 16  # new ones of each request of the whole run
CACHES = [
    {"enable_prefix_caching": True, "mamba_cache_mode": mode, "max_num_batched_tokens": tokens}
    for mode in ("all", "align")
    for tokens in (2048, 8192, 16384)
]
DECODE_PROMPT = 16


def open_vllm(options: argparse.Namespace, folder: Path, most_tokens: int, settings: dict[str, Any]) -> Engine:
    """One model in a process of its own."""
    arguments = str(folder.resolve()), options.dtype, str(most_tokens), json.dumps(settings)
    return Engine(options.vllm_python, "vllm_engine.py", *arguments)


def seconds(engine: Engine, prompts: Prompts, count: int, length: int, new: int) -> float:
    """The median of REPEATS calls with fresh prompts, after one that warms up."""
    times = [engine.call("serve", prompts.draw(count, length), new)["seconds"] for _ in range(1 + REPEATS)]
    return statistics.median(times[1:])


def figures(engine: Engine, vocab_size: int) -> Iterator[tuple[str, float]]:
    """One after the other: tokens a second of a prefill, seconds of a step (what more new tokens take)."""
    prompts = Prompts(vocab_size)
    for count, length in PREFILL:
        yield f"prefill {count} x {length}", count * length / seconds(engine, prompts, count, length, 1)
    for running in DECODE:
        long = seconds(engine, prompts, running, DECODE_PROMPT, 1 + NEW_TOKENS)
        yield f"decode {running}", (long - seconds(engine, prompts, running, DECODE_PROMPT, 1)) / NEW_TOKENS


def whole_runs(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The conversations' requests in their order, once in each setting of the prefix cache."""
    config = replace(Config(model=str(options.models[0]), dtype=options.dtype), limit=options.limit)
    prompts = [list(map(int, request.token_ids)) for request in requests_in(config, str(options.input))]
    for settings in CACHES:
        engine = open_vllm(options, options.models[0], max(map(len, prompts)) + RUN_TOKENS, settings)
        try:
            engine.call("serve", [prompts[0][:DECODE_PROMPT]], 1)
            yield {"settings": settings, "requests": len(prompts), **engine.call("serve", prompts, RUN_TOKENS)}
        finally:
            engine.close()


def main() -> None:
    """Measure the models and print the document."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL", help="folders of models")
    parser.add_argument("--vllm-python", required=True, metavar="PATH")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--input", type=Path, help="conversations for whole runs")
    parser.add_argument("--limit", type=int, default=40, help="conversations of them; default: %(default)s")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    document: dict[str, Any] = {"models": {}, "runs": []}
    most_tokens = max(length for _, length in PREFILL) + 1 + NEW_TOKENS
    for folder in options.models:
        engine = open_vllm(options, folder, most_tokens, {})
        try:
            facts = engine.call("facts")
            document["engine"] = f"vLLM {facts['version']}"
            document["how"] = (
                f"measured on one {facts['device']} with torch {facts['torch']}, {options.dtype}, its default "
                "compilation and graphs; prefix caching off but for the conversations, where it is the best of "
                f"{len(CACHES)} settings"
            )
            found = document["models"].setdefault(folder.name, {"loading": facts["loading"]})
            for name, value in figures(engine, load_model_config(folder).vocab_size):
                found[name] = value
                print(f"{folder.name}, {name}: {value:g}", flush=True)
                write(document, options.out)
        finally:
            engine.close()
    if options.input:
        for run in whole_runs(options):
            print(json.dumps(run), flush=True)
            document["runs"].append(run)
            document["run"] = min(run["seconds"] for run in document["runs"])
            write(document, options.out)
    print(json.dumps(document))


if __name__ == "__main__":
    main()
