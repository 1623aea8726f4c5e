"""Everything that docs/reference/performance.md says of apcbatch alone: benchmarks.bench on both shapes and dtypes.

    python benchmarks/make_shapes.py shapes
    python benchmarks/measure.py shapes --input chats.jsonl --out benchmarks/results/engine.json
    python tools/make_performance_docs.py

Takes about a quarter of an hour on two idle cores. Whole runs (--input) are measured with bfloat16 alone. The last line
is the document: seconds, and measured, a list of what `benchmarks.bench` gives. OUT grows as figures come.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from growing import write

SHAPES = ("mamba-130m", "jamba-small")
DTYPES = ("float32", "bfloat16")


def bench(options: argparse.Namespace, shape: str, dtype: str) -> dict[str, Any]:
    """One run of `benchmarks.bench`; its lines go by as they come."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.bench",
        "--model",
        str(options.shapes / shape),
        "--dtype",
        dtype,
    ]
    for group in options.only:
        command += ["--only", group]
    if options.input and dtype == "bfloat16":
        command += ["--input", str(options.input), "--limit", str(options.limit), "--max-tokens", "16"]
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                last = line
            else:
                print(line, end="", flush=True)
    if process.returncode:
        raise SystemExit(f"benchmarks.bench ended with status {process.returncode}; its message is above")
    return {**json.loads(last), "model": shape}


def main() -> None:
    """Measure and write the document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", type=Path)
    parser.add_argument("--shape", action="append", choices=SHAPES, help="default: both")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="default: both")
    parser.add_argument("--only", action="append", default=[], help="a group of `benchmarks.bench`; default: all")
    parser.add_argument("--input", type=Path, help="conversations for whole runs")
    parser.add_argument("--limit", type=int, default=2, help="conversations of them; default: %(default)s")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    begin = time.perf_counter()
    document: dict[str, Any] = {"seconds": 0.0, "measured": []}
    for shape in options.shape or SHAPES:
        for dtype in options.dtype or DTYPES:
            print(f"{shape}, {dtype}", flush=True)
            document["measured"].append(bench(options, shape, dtype))
            document["seconds"] = time.perf_counter() - begin
            write(document, options.out)
    print(json.dumps(document))


if __name__ == "__main__":
    main()
