"""Writes the pages docs/performance*.md that are made from the documents of the benchmarks, and the picture of the
first; it measures nothing. What is above the machine or the device is written by hand.

    python tools/make_performance_docs.py [--results benchmarks/results] [--docs docs]

performance.md: engine.json (benchmarks/measure.py) and, where they are there, threads.json (benchmarks/threads.py),
peers.json and families.json (benchmarks/peers.py) and end_to_end.json (benchmarks/end_to_end.py).
performance-cuda-models.md: cuda_models.json (benchmarks/cuda_model.py), cuda_vllm.json (benchmarks/cuda_vllm.py),
cuda_bars.json, which has what was aimed for, and, where it is there, cuda_gpus.json (benchmarks/cuda_gpus.py). The
picture needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from performance import cuda, engine, gpus, others, picture, threads

ROOT = Path(__file__).resolve().parent.parent
PAGE, CUDA_PAGE = Path("reference") / "performance.md", Path("reference") / "performance-cuda-models.md"
PICTURE = Path("images") / "performance.svg"


def read(path: Path) -> dict[str, Any] | None:
    """A document of a benchmark, or None where it was not run."""
    return json.loads(path.read_text()) if path.exists() else None


def head(page: Path, first: str) -> str:
    """Return the hand-written text of a page: all above the paragraph that begins with `first`."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return text[: text.index(f"\n\n{first}")]


def page(results: Path) -> str:
    """The whole page."""
    measured = read(results / "engine.json")
    if measured is None:
        raise SystemExit(f"{results / 'engine.json'} is not there; run benchmarks/measure.py first")
    parts = [head(PAGE, "Machine: "), *engine.sections(measured)]
    cores = read(results / "threads.json")
    if cores is not None:
        parts += threads.sections(cores)
    end_to_end = read(results / "end_to_end.json")
    for name, what in (("peers", "Beside other engines"), ("families", "Qwen3.5 and Granite 4.0-H beside llama.cpp")):
        found = read(results / f"{name}.json")
        if found is not None:
            parts += others.peers(found, what)
    if end_to_end is not None:
        parts += others.end_to_end(end_to_end)
    return "\n\n".join(parts) + "\n"


def cuda_page(results: Path) -> str | None:
    """The whole page about models on a CUDA device; None where none was measured."""
    measured, other, bars = (read(results / f"cuda_{name}.json") for name in ("models", "vllm", "bars"))
    if measured is None or other is None or bars is None:
        return None
    parts = [head(CUDA_PAGE, "Device: "), *cuda.sections(measured, other, bars)]
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
    for folder in (PAGE.parent, PICTURE.parent):
        (options.docs / folder).mkdir(parents=True, exist_ok=True)
    picture.draw(read(options.results / "engine.json") or {}, options.docs / PICTURE)
    (options.docs / PAGE).write_text(text, encoding="utf-8")
    models = cuda_page(options.results)
    if models is not None:
        (options.docs / CUDA_PAGE).write_text(models, encoding="utf-8")


if __name__ == "__main__":
    main()
