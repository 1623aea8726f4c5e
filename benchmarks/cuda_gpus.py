"""A model over several GPUs of a host against one: what docs/reference/performance-cuda-models.md says of `--gpus`.

    python benchmarks/make_shapes.py shapes --shape mamba-2.8b
    python benchmarks/cuda_gpus.py shapes/mamba-2.8b --input chats.jsonl --input more.jsonl \\
        --whole --out benchmarks/results/cuda_gpus.json
    python tools/make_performance_docs.py

Each workload goes through engines on one GPU and on several in turns, in one process; figures are medians, without the
round in which kernels are chosen for new sizes of passes. Then, with --whole, Jamba-mini's full shape: its 52 billion
weights are drawn on the devices, in place, as a name gives them, so that they are the same on one GPU and on several.
The last line is the document; OUT grows as figures come.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import itertools
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import make_shapes
import numpy as np
import torch
from growing import growing

from apcbatch import Engine, Request, Result, __version__
from apcbatch.config import Config
from apcbatch.data.chat.render import Renderer
from apcbatch.data.input.source import open_source
from apcbatch.data.template_options import ChatOptions
from apcbatch.job.feed import Feeder
from apcbatch.job.planning import work_source
from apcbatch.job.previous_answers import PreviousAnswers
from apcbatch.job.work import requests_of
from apcbatch.model import weights

NUMBERS = itertools.count()
NEW_TOKENS = (16, 128)
MAX_RUNNING, MAX_BATCH_TOKENS, POOL_BYTES = 128, 8192, 16 << 30
JAMBA_MINI = {**make_shapes.SHAPES["jamba-mini-block"], "num_hidden_layers": 32}
JAMBA_POOL_BYTES = 4 << 30


@dataclass(frozen=True)
class Drawn:
    """A tensor to be drawn: uniform around 0."""

    shape: tuple[int, ...]
    std: float


class Draws(make_shapes.Draws):
    """What large tensors are to be, instead of their numbers."""

    def uniform(self, shape: tuple[int, ...], std: float) -> Any:
        return Drawn(shape, std)

    def matrix(self, out_features: int, in_features: int, gain: float = 1.0) -> Any:
        return Drawn((out_features, in_features), gain / math.sqrt(in_features))


class DrawnCheckpoint:
    """Stands in for apcbatch.model.weights.Checkpoint: tensors that are drawn where they go, by their names."""

    def __init__(self, model_dir: Path, device: torch.device, device_of: Any = None, *_: object) -> None:
        self.model_dir, self._device_of = model_dir, device_of or (lambda name: device)
        config = json.loads((model_dir / "config.json").read_text())
        self._found: dict[str, Any] = dict(make_shapes.jamba_tensors(config, Draws(make_shapes.SEED)))

    def __enter__(self) -> DrawnCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._found.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def check_dtypes(self) -> None:
        """Accept every tensor: all are drawn as bfloat16."""

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        assert tuple(self._found[name].shape) == shape, name

    def sizes(self) -> dict[str, int]:
        return {name: 2 * math.prod(found.shape) for name, found in self._found.items()}

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        self.require(name, shape)
        found, device = self._found[name], self._device_of(name)
        if isinstance(found, np.ndarray):
            return torch.from_numpy(found).to(device, torch.bfloat16)
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "little")
        generator = torch.Generator(device).manual_seed(seed)
        most = found.std * math.sqrt(3.0)
        return torch.empty(shape, dtype=torch.bfloat16, device=device).uniform_(-most, most, generator=generator)

    def finish(self) -> bytes:
        return hashlib.sha256(str(make_shapes.SEED).encode()).digest()[:16]


def serve(engine: Engine, requests: Sequence[Request]) -> tuple[float, list[Result]]:
    """Seconds until all are answered, and the answers."""
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)
    fresh = [replace(request, id=str(next(NUMBERS))) for request in requests]
    begin = time.perf_counter()
    results = list(engine.run(fresh))
    seconds = time.perf_counter() - begin
    for result in results:
        if result.error is not None:
            raise result.error
    return seconds, sorted(results, key=lambda result: int(result.id))


def drawn(vocab_size: int, count: int, length: int, new_tokens: int) -> list[Request]:
    """Random prompts that have nothing in common."""
    prompts = [[random.randrange(vocab_size) for _ in range(length)] for _ in range(count)]
    return [Request(str(n), prompt, max_tokens=new_tokens, ignore_eos=True) for n, prompt in enumerate(prompts)]


@dataclass(frozen=True)
class Workload:
    """is_new: whether its prompts make passes of other sizes than those before did, for which kernels are chosen."""

    name: str
    requests: list[Request]
    is_new: bool = True


def conversations(engine: Engine, folder: Path, path: Path, limit: int | None, new_tokens: int) -> Workload:
    """The planned requests of a file's first conversations, as `apcbatch run` has them."""
    config = Config(
        model=str(folder), limit=limit, max_tokens=new_tokens, ignore_eos=True, pool_size=POOL_BYTES,
        origins={},
    )  # fmt: skip
    renderer = Renderer.load(folder, options=ChatOptions.of(config))
    feeder = Feeder(config, open_source(str(path), config.format), renderer, PreviousAnswers())
    requests = list(requests_of(work_source(config, feeder, engine)))
    return Workload(f"{path.stem}, {new_tokens} new tokens", requests, new_tokens == NEW_TOKENS[0])


def workloads(engine: Engine, folder: Path, options: argparse.Namespace) -> Iterator[Workload]:
    """Prefill-heavy and decode-heavy ones."""
    for path in options.input:
        for new_tokens in NEW_TOKENS:
            yield conversations(engine, folder, path, options.limit, new_tokens)
    yield Workload("256 x 16, 128 new tokens", drawn(engine.vocab_size, 256, 16, 128))
    yield Workload("64 x 2048, 1 new token", drawn(engine.vocab_size, 64, 2048, 1))


def throughput(folder: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Seconds of each workload on one GPU, on one with as many sequences at once as several have, and on several."""
    kinds = {
        "one": {"max_running": MAX_RUNNING},
        "one, as many at once": {"max_running": options.gpus * MAX_RUNNING},
        "several": {"max_running": MAX_RUNNING, "gpus": options.gpus},
    }
    common = {
        "device": "cuda", "dtype": "bfloat16", "policy": "planned", "pool_size_bytes": POOL_BYTES, "draft": (),
    }  # fmt: skip
    engines = {
        name: Engine(folder, max_batch_tokens=MAX_BATCH_TOKENS, **common, **kind) for name, kind in kinds.items()
    }
    for workload in workloads(engines["one"], folder, options):
        rounds: list[dict[str, float]] = []
        answers = {}
        for _ in range(workload.is_new + options.repeats):
            found = {kind: serve(engine, workload.requests) for kind, engine in engines.items()}
            rounds.append({kind: seconds for kind, (seconds, _) in found.items()})
            answers = {kind: [result.token_ids for result in results] for kind, (_, results) in found.items()}
        results = found["several"][1]
        computed = sum(result.computed_tokens for result in results)
        new = sum(len(result.token_ids) for result in results)
        rounds = rounds[workload.is_new :]
        seconds = {kind: statistics.median(one[kind] for one in rounds) for kind in kinds}
        yield {
            "name": workload.name, "requests": len(workload.requests), "computed_tokens": computed, "new_tokens": new,
            "same_tokens": all(one == answers["one"] for one in answers.values()), "seconds": seconds,
            "rounds": rounds,
        }  # fmt: skip
    for engine in engines.values():
        engine.close()


def decoding(engine: Engine, running: int, repeats: int) -> float:
    """Tokens a second of `running` sequences side by side: what 63 more new tokens each take."""
    short = drawn(engine.vocab_size, running, 16, 64)
    first = [replace(one, max_tokens=1) for one in short]
    took = [serve(engine, short)[0] - serve(engine, first)[0] for _ in range(1 + repeats)]
    return running * 63 / statistics.median(took[1:])


def whole(gpus: int, options: argparse.Namespace) -> tuple[dict[str, Any], list[Any]]:
    """Jamba-mini's full shape: loading, prefill, decode, and a second time from snapshots. Also its answers."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "config.json").write_text(json.dumps({**JAMBA_MINI, **make_shapes.SPECIAL, "dtype": "bfloat16"}))
        weights.Checkpoint = DrawnCheckpoint  # type: ignore[misc, assignment]
        devices = range(gpus)
        for device in devices:
            torch.cuda.reset_peak_memory_stats(device)
        begin = time.perf_counter()
        engine = Engine(
            folder, device="cuda", gpus=gpus, dtype="bfloat16", policy="all", max_running=32 * options.gpus // gpus,
            max_batch_tokens=MAX_BATCH_TOKENS, pool_size_bytes=JAMBA_POOL_BYTES, draft=(),
        )  # fmt: skip
        loading = time.perf_counter() - begin
        random.seed(5)
        kept = [replace(one, logprobs=True) for one in drawn(engine.vocab_size, 6, 1500, 8)]
        long = [drawn(engine.vocab_size, 16, 2048, 1) for _ in range(1 + options.repeats)]
        sizes = {32, 32 * options.gpus} if gpus == 1 else {32 * gpus}
        prefill = [serve(engine, requests)[0] for requests in long]
        decode = [{"running": size, "tokens_s": decoding(engine, size, options.repeats)} for size in sorted(sizes)]
        cold, warm = serve(engine, kept), serve(engine, kept)
        told = [[(one.token_ids, one.logprobs) for one in results] for _, results in (cold, warm)]
        assert not any(one.cached_tokens for one in cold[1])
        document = {
            "gpus": gpus, "loading_s": loading,
            "weights_and_pool_bytes": [torch.cuda.memory_allocated(device) for device in devices],
            "peak_bytes": [torch.cuda.max_memory_allocated(device) for device in devices],
            "prefill_tokens_s": 16 * 2048 / statistics.median(prefill[1:]),
            "decode": decode,
            "restored_tokens": sum(one.cached_tokens for one in warm[1]),
            "cold_s": cold[0], "warm_s": warm[0], "cached_equals_cold": told[0] == told[1],
        }  # fmt: skip
        engine.close()
        return document, told[0]


def main() -> None:
    """Measure and print the document."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, nargs="?", help="folder of a model that fits one GPU")
    parser.add_argument("--gpus", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--input", type=Path, action="append", default=[], help="conversations")
    parser.add_argument("--limit", type=int, default=20, help="conversations of each; default: %(default)s")
    parser.add_argument("--repeats", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--whole", action="store_true", help="Jamba-mini's full shape, on these GPUs and on one")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    begin = time.perf_counter()
    document: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "gpus": options.gpus, "torch": torch.__version__,
        "version": __version__, "repeats": options.repeats, "max_running": MAX_RUNNING,
        "max_batch_tokens": MAX_BATCH_TOKENS, "model": None, "workloads": [], "whole": [],
    }  # fmt: skip
    keep = growing(document, options.out, begin)
    if options.model is not None:
        document["model"] = options.model.name
        for figure in throughput(options.model, options):
            keep(figure, document["workloads"])
    if options.whole:
        answers = []
        for gpus in (options.gpus, 1):
            gc.collect()
            torch.cuda.empty_cache()
            figure, told = whole(gpus, options)
            answers.append(told)
            keep({**figure, "same_as_first": told == answers[0]}, document["whole"])
    print(json.dumps(document))


if __name__ == "__main__":
    main()
