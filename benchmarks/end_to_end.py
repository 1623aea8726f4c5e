r"""A dataset answered from end to end: planned, without a cache, and by llama.cpp's server with its prompt cache on.

    python benchmarks/end_to_end.py chats.jsonl --model shapes/mamba-130m --limit 60 --part none=2 \
        --llama-server bin/llama-server --gguf gguf/mamba-130m-bf16.gguf --part llama-1=4 --part llama-8=4 \
        --out benchmarks/results/end_to_end.json

All get the same prompts in the file's order and make the same number of new tokens for each. The contenders are
planned, none, llama-1 and llama-8 (slots). --part NAME=N measures a contender over the first N conversations only; the
planned run is then measured over these N too, and the ratio is between runs over the same conversations. Seconds are
wall time without loading the model. The last line is the document.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.datasets import requests_in
from bench.machine import describe
from growing import write
from peer_engines.llama_server import serving

from apcbatch.config import Config

SLOTS = {"llama-1": 1, "llama-8": 8}
CONTENDERS = ("planned", "none", *SLOTS)


def ours(options: argparse.Namespace, policy: str, limit: int) -> dict[str, Any]:
    """One `apcbatch run` in a process of its own, with a fresh store where it keeps anything."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "apcbatch", "run", str(options.input), "--limit", str(limit)]
        command += [
            "-o",
            str(Path(folder) / "out.jsonl"),
            "--model",
            str(options.model),
            "--dtype",
            options.dtype,
        ]
        command += ["--policy", policy, "--max-tokens", str(options.max_tokens), "--ignore-eos"]
        command += ["--quiet", "--progress", "none", *options.option]
        if policy != "none":
            command += ["--store", str(Path(folder) / "store")]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    summary = json.loads(done.stdout.splitlines()[-1])
    spent = summary["seconds"]
    seconds = spent["total"] - spent["load"]
    return {
        "seconds": seconds,
        "computed_tokens": summary["computed_tokens"],
        "completion_tokens": summary["completion_tokens"],
        "in_steps": (spent["prefill"] + spent["decode"]) / seconds,
    }


def llama(options: argparse.Namespace, name: str, limit: int) -> dict[str, Any]:
    """The same prompts, in the same order, sent to the server."""
    prompts = rendered(options, limit)
    room = 64 * (-(-(max(map(len, prompts)) + options.max_tokens) // 64) + 1)
    with serving(options.llama_server, options.gguf, options.threads, SLOTS[name], room) as server:
        server.answer([prompts[0][:64]], 1)
        return server.answer(prompts, options.max_tokens)


def rendered(options: argparse.Namespace, limit: int) -> list[list[int]]:
    """The prompts of the first conversations as token ids."""
    config = replace(Config(model=str(options.model), dtype=options.dtype), limit=limit)
    return [list(request.token_ids) for request in requests_in(config, str(options.input))]


def measured(options: argparse.Namespace, name: str, limit: int) -> dict[str, Any]:
    """One contender over the first conversations."""
    prompts = rendered(options, limit)
    found = llama(options, name, limit) if name in SLOTS else ours(options, name, limit)
    found = {
        "contender": name,
        "conversations": limit,
        "requests": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        **found,
    }
    found["prompt_tokens_per_s"] = found["prompt_tokens"] / found["seconds"]
    print(json.dumps(found), flush=True)
    return found


def parts(texts: list[str]) -> dict[str, int]:
    """NAME=N of each --part."""
    found = {}
    for text in texts:
        name, equals, count = text.partition("=")
        if name not in CONTENDERS or not equals or not count.isdigit() or int(count) < 1:
            raise SystemExit(f"--part is {text!r}; expected NAME=N with NAME one of {', '.join(CONTENDERS)}")
        found[name] = int(count)
    return found


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every contender, and before it the planned run over the same conversations."""
    limits = parts(options.part)
    names = [name for name in options.contender or CONTENDERS if name not in SLOTS or options.llama_server]
    planned: dict[int, dict[str, Any]] = {}
    runs = []
    for name in names:
        limit = min(limits.get(name, options.limit), options.limit)
        if limit not in planned:
            planned[limit] = measured(options, "planned", limit)
            runs.append({**planned[limit], "times_planned": 1.0})
        if name != "planned":
            run = measured(options, name, limit)
            runs.append({**run, "times_planned": run["seconds"] / planned[limit]["seconds"]})
    return runs


def main() -> None:
    """Measure what was asked for and write the document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("input", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--limit", type=int, default=60, help="conversations; default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--contender", action="append", choices=CONTENDERS, help="default: all that are there")
    parser.add_argument("--part", action="append", default=[], metavar="NAME=N")
    parser.add_argument("--llama-server", type=Path, metavar="PATH")
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--threads", type=int, default=2, help="of llama.cpp; default: %(default)s")
    parser.add_argument("--option", action="append", default=[], help="one more word for `apcbatch run`")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    document = {
        "machine": describe(),
        "input": options.input.name,
        "model": options.model.name,
        "dtype": options.dtype,
        "max_tokens": options.max_tokens,
        "runs": compare(options),
    }
    write(document, options.out)
    print(json.dumps(document))


if __name__ == "__main__":
    main()
