"""Writes docs/performance.md, its picture, and docs/performance-cuda-models.md from the documents of the benchmarks; it
measures nothing.

    python tools/make_performance_docs.py [--results benchmarks/results] [--docs docs]

Reads engine.json (benchmarks/measure.py) and, where they are there, threads.json (benchmarks/threads.py), peers.json
(benchmarks/peers.py) and end_to_end.json (benchmarks/end_to_end.py); for the other page cuda_models.json
(benchmarks/cuda_model.py) and cuda_vllm.json, which has the figures of another engine and the bars, and, where it is
there, cuda_gpus.json (benchmarks/cuda_gpus.py). The picture needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from performance import cuda, engine, gpus, others, picture, threads

ROOT = Path(__file__).resolve().parent.parent
HEAD = Path(__file__).with_name("performance_head.md")
CUDA_HEAD = Path(__file__).with_name("performance_cuda_head.md")
PICTURE = Path("images") / "performance.svg"


def read(path: Path) -> dict[str, Any] | None:
    """A document of a benchmark, or None where it was not run."""
    return json.loads(path.read_text()) if path.exists() else None


def page(results: Path) -> str:
    """The whole page."""
    measured = read(results / "engine.json")
    if measured is None:
        raise SystemExit(f"{results / 'engine.json'} is not there; run benchmarks/measure.py first")
    parts = [HEAD.read_text(encoding="utf-8").rstrip(), *engine.sections(measured)]
    cores = read(results / "threads.json")
    if cores is not None:
        parts += threads.sections(cores)
    peers, end_to_end = read(results / "peers.json"), read(results / "end_to_end.json")
    if peers is not None:
        parts += others.peers(peers)
    if end_to_end is not None:
        parts += others.end_to_end(end_to_end)
    return "\n\n".join(parts) + "\n"


def cuda_page(results: Path) -> str | None:
    """The whole page about models on a CUDA device; None where none was measured."""
    measured, other = read(results / "cuda_models.json"), read(results / "cuda_vllm.json")
    if measured is None or other is None:
        return None
    parts = [CUDA_HEAD.read_text(encoding="utf-8").rstrip(), *cuda.sections(measured, other)]
    several = read(results / "cuda_gpus.json")
    if several is not None:
        parts += gpus.sections(several)
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Write the pages and the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    options = parser.parse_args()
    text = page(options.results)
    (options.docs / PICTURE).parent.mkdir(parents=True, exist_ok=True)
    picture.draw(read(options.results / "engine.json") or {}, options.docs / PICTURE)
    (options.docs / "performance.md").write_text(text, encoding="utf-8")
    on_cuda = cuda_page(options.results)
    if on_cuda is not None:
        (options.docs / "performance-cuda-models.md").write_text(on_cuda, encoding="utf-8")


if __name__ == "__main__":
    main()
