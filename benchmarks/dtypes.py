"""How fast bfloat16 is beside float32 on each instruction set of this processor, for --dtype.

    python benchmarks/make_shapes.py shapes --shape mamba-130m
    python benchmarks/dtypes.py shapes/mamba-130m

Prints, for each instruction set and pass, the median of the ratios of one bfloat16 to one float32 rate, measured in
turns: above 1, bfloat16 is faster. The last line is the document: machine, and ratios with each pair of rates.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median

from bench.machine import describe
from bench.server import Server

from apcbatch.engine.engine import Engine
from apcbatch.kernels.processor import available_isas, set_isa

PROMPT = 2048  # tokens of a prefill
NEW_TOKENS = 12  # of each running sequence


def rate(server: Server, running: int) -> float:
    """Tokens/s of one pass: a prefill where `running` is 0, else decoding."""
    prompts = server.prompts(running or 1, 16 if running else PROMPT)
    seconds = server.serve(prompts, 1 + NEW_TOKENS if running else 1)
    return running * NEW_TOKENS / seconds["decode"] if running else PROMPT / seconds["wall"]


def main() -> None:
    """Measure and print the document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--isa", nargs="+", default=available_isas()[1:], help="default: all but plain")
    parser.add_argument("--running", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    document = {"machine": describe(), "ratios": []}
    for isa in options.isa:
        set_isa(isa)  # before the engines pack their weights for it
        common = {"policy": "none", "max_running": max(options.running), "max_batch_tokens": PROMPT, "draft": ()}
        servers = [Server(Engine(options.model, dtype=dtype, **common)) for dtype in ("float32", "bfloat16")]
        for running in (0, *options.running):
            pairs = [[rate(server, running) for server in servers] for _ in range(1 + options.repeats)][1:]
            name = f"decode, {running} running" if running else f"prefill of {PROMPT}"
            ratio = median(bfloat16 / float32 for float32, bfloat16 in pairs)
            document["ratios"].append({"isa": isa, "pass": name, "ratio": ratio, "tokens_per_s": pairs})
            print(f"{isa}, {name}: {ratio:.2f}", flush=True)
    print(json.dumps(document))


if __name__ == "__main__":
    main()
