"""apcbatch beside transformers and llama.cpp: prefill and decode of the same checkpoints, in turns.

    python benchmarks/make_shapes.py shapes
    python benchmarks/peers.py shapes --llama-python llama/bin/python --gguf gguf --out benchmarks/results/peers.json

Each engine is a process of its own with the same number of threads; a round asks each for one repeat, so that a drift
of the machine is shared. --llama-python is an interpreter that has llama_cpp; --gguf a folder of the files that
to_gguf.py makes, <shape>-<f32|bf16|q8_0>.gguf. An engine that would take longer than --patience for one repeat is left
out of that figure, which then says so. Before anything is timed, greedy tokens of llama.cpp are compared with ours: the
document says on how many of them they agree. The last line is the document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from bench.machine import describe
from growing import write
from peer_engines.process import Engine
from peer_engines.protocol import tokens_of

GGUF_NAMES = {"float32": "f32", "bfloat16": "bf16"}
PREFILL, DECODE = (512, 2048), (1, 16, 32)
DECODE_PROMPT, NEW_TOKENS = 16, 16
GREEDY_PROMPTS, GREEDY_TOKENS = 4, 12
WARM_UP = 128


def open_engines(options: argparse.Namespace, shape: str, dtype: str) -> dict[str, Engine]:
    """The engines that are there for a shape and dtype, ours first."""
    folder, threads = str((options.shapes / shape).resolve()), str(options.threads)
    commands = {"apcbatch": [sys.executable, "ours.py", folder, dtype, threads]}
    if options.llama_python:
        for name in [GGUF_NAMES[dtype], *options.also]:
            path = options.gguf / f"{shape}-{name}.gguf"
            commands[f"llama.cpp {name}"] = [options.llama_python, "llama_cpp_engine.py", str(path.resolve()), threads]
    if not options.no_transformers:
        commands["transformers"] = [sys.executable, "hugging_face.py", folder, dtype, threads]
    return {name: Engine(*command) for name, command in commands.items()}


def agreement(engines: dict[str, Engine], vocabulary: int) -> dict[str, str]:
    """For each peer: greedy tokens that agree with ours up to the first difference of each prompt, of how many."""
    counts = dict.fromkeys(engines, 0)
    for number in range(GREEDY_PROMPTS):
        prompt = tokens_of(number, 24, vocabulary)
        made = {name: engine.call("greedy", prompt, GREEDY_TOKENS) for name, engine in engines.items()}
        for name, tokens in made.items():
            same = [a == b for a, b in zip(tokens, made["apcbatch"], strict=True)]
            counts[name] += (same + [False]).index(False)
    total = GREEDY_PROMPTS * GREEDY_TOKENS
    return {name: f"{count} of {total}" for name, count in counts.items() if name != "apcbatch"}


def measured(
    engines: dict[str, Engine], options: argparse.Namespace, name: str, tokens: int, call: tuple[Any, ...]
) -> dict[str, Any]:
    """Tokens/s of each engine, medians of alternating rounds; our ratio over each, the median of the rounds' ratios."""
    patient = {peer: engine for peer, engine in engines.items() if engine.token_s * tokens <= options.patience}
    seconds: dict[str, list[float]] = {peer: [] for peer in patient}
    for _ in range(options.repeats):
        for peer, engine in patient.items():
            seconds[peer].append(engine.call(*call))
    figure: dict[str, Any] = {"name": name, "tokens": tokens, "repeats": options.repeats}
    figure["tokens_per_s"] = {peer: tokens / statistics.median(times) for peer, times in seconds.items()}
    figure["ratio"] = {
        peer: statistics.median(theirs / ours for theirs, ours in zip(times, seconds["apcbatch"], strict=True))
        for peer, times in seconds.items()
        if peer != "apcbatch"
    }
    figure["left_out"] = {
        peer: f"about {engine.token_s * tokens:.0f} s a repeat"
        for peer, engine in engines.items()
        if peer not in patient
    }
    print(f"{name}: {json.dumps(figure['tokens_per_s'])}", flush=True)
    return figure


def compare(options: argparse.Namespace, shape: str, dtype: str) -> dict[str, Any]:
    """All figures of one shape and dtype."""
    config = json.loads((options.shapes / shape / "config.json").read_text())
    vocabulary = config["vocab_size"]
    print(f"{shape}, {dtype}", flush=True)
    engines = open_engines(options, shape, dtype)
    try:
        for engine in engines.values():
            engine.call("decode", 1, DECODE_PROMPT, 2)
            engine.token_s = engine.call("prefill", tokens_of(0, WARM_UP, vocabulary)) / WARM_UP
        same = agreement(engines, vocabulary)
        figures = []
        for tokens in options.prefill:
            call = ("prefill", tokens_of(1, tokens, vocabulary))
            figures.append(measured(engines, options, f"prefill of {tokens}", tokens, call))
        for running in options.decode:
            call = ("decode", running, DECODE_PROMPT, NEW_TOKENS)
            figures.append(measured(engines, options, f"decode, {running} running", running * NEW_TOKENS, call))
    finally:
        for engine in engines.values():
            engine.close()
    return {"model": shape, "dtype": dtype, "greedy_tokens_that_agree": same, "figures": figures}


def numbers(text: str) -> list[int]:
    """Integers with commas between."""
    return [int(part) for part in text.split(",") if part]


def main() -> None:
    """Compare what was asked for and write the document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shape", action="append", help="default: mamba-130m and jamba-small")
    parser.add_argument("--dtype", action="append", choices=GGUF_NAMES, help="default: both")
    parser.add_argument("--llama-python", metavar="PATH")
    parser.add_argument("--gguf", type=Path, default=Path("gguf"))
    parser.add_argument("--also", action="append", default=[], help="a further type of GGUF file, such as q8_0")
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--patience", type=float, default=60.0, help="seconds a repeat; default: %(default)s")
    parser.add_argument("--prefill", type=numbers, default=PREFILL)
    parser.add_argument("--decode", type=numbers, default=DECODE)
    options = parser.parse_args()
    document = {"machine": {**describe(), "threads": options.threads}, "comparisons": []}
    for shape in options.shape or ["mamba-130m", "jamba-small"]:
        for dtype in options.dtype or list(GGUF_NAMES):
            document["comparisons"].append(compare(options, shape, dtype))
            write(document, options.out)
    print(json.dumps(document))


if __name__ == "__main__":
    main()
