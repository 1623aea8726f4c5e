"""What structured output costs: a decode step whose rows all follow a grammar, against the same rows without one.

    python benchmarks/structured.py MODEL TEXT [TEXT ...] [--running 32] [--steps 60] [--rounds 5]

MODEL is a folder that benchmarks/make_shapes.py wrote; its bundled tokenizer is smaller than its vocabulary. So a
byte-level BPE of the vocabulary's size is trained on TEXT (any text files, the more the better) and kept beside the
model. Both kinds of steps are measured in turns, and medians are given.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from apcbatch.data.end_tokens import EndTokens
from apcbatch.data.grammar.constraint import GrammarCompiler
from apcbatch.data.grammar.structured_output import StructuredOutput
from apcbatch.data.tokenization.tokenizer import Tokenizer
from apcbatch.engine.engine import Engine
from apcbatch.types import Request

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "people": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "member": {"type": "boolean"}},
                "required": ["name", "age", "member"],
            },
            "minItems": 20,
        },
    },
    "required": ["title", "tags", "people"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path, nargs="+")
    parser.add_argument("--running", type=int, default=32)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    vocab_size = json.loads((options.model / "config.json").read_text())["vocab_size"]
    backend = trained(options.model / f"bpe-{vocab_size}.json", options.text, vocab_size)
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), vocab_size, EndTokens({0: ()}))
    begin = time.perf_counter()
    constraints = GrammarCompiler(tokenizer)
    structure = StructuredOutput("json", json.dumps(SCHEMA))
    constraints.constraint(structure)
    first = time.perf_counter() - begin
    engine = Engine(options.model, max_running=options.running, policy="none")
    times: dict[str, list[float]] = {"plain": [], "drawn": [], "structured": [], "structured, drawn": []}
    for _ in range(options.rounds):
        for kind in times:
            times[kind] += steps(engine, options, kind, constraints, structure)
    masks = mask_times(constraints, structure, vocab_size, options)
    found = {kind: round(1e3 * statistics.median(each), 3) for kind, each in times.items()}
    print(
        json.dumps(
            {
                "vocab_size": backend.get_vocab_size(),
                "running": options.running,
                "threads": torch.get_num_threads(),
                "first_constraint_s": round(first, 3),
                "step_ms": found,
                "over_plain": round(found["structured"] / found["plain"] - 1, 4),
                "over_drawn": round(found["structured, drawn"] / found["drawn"] - 1, 4),
                "mask_us_of_a_row": {"median": round(statistics.median(masks), 1), "mean": round(np.mean(masks), 1)},
            },
            indent=2,
        )
    )


def trained(path: Path, texts: list[Path], vocab_size: int) -> Backend:
    """A byte-level BPE of this size, made once."""
    if not path.exists():
        backend = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=["<eos>"], initial_alphabet=alphabet, min_frequency=1
        )
        backend.train_from_iterator(lines(texts), trainer)
        backend.save(str(path))
    return Backend.from_file(str(path))


def lines(texts: list[Path]) -> Iterator[str]:
    """The lines of all texts."""
    for path in texts:
        with path.open(errors="replace") as file:
            yield from file


def steps(
    engine: Engine, options: argparse.Namespace, kind: str, constraints: GrammarCompiler, structure: StructuredOutput
) -> list[float]:
    """Seconds of each decode step of one batch."""
    for number in range(options.running):
        engine.submit(
            Request(
                str(number),
                [number + 1, 7, 9, 11],
                max_tokens=options.steps + 2,
                temperature=1.0 if "drawn" in kind else 0.0,
                ignore_eos=True,
                constraint=(lambda: constraints.constraint(structure)) if "structured" in kind else None,
            )
        )
    engine.step()
    found = []
    while engine.num_unfinished:
        begin = time.perf_counter()
        ended = engine.step()
        if ended:
            assert all(result.error is None for result in ended), ended[0].error
        if engine.num_unfinished == options.running:
            found.append(time.perf_counter() - begin)
    return found


def mask_times(
    constraints: GrammarCompiler, structure: StructuredOutput, vocab_size: int, options: argparse.Namespace
) -> list[float]:
    """Microseconds that filling a mask and taking a token take along random answers."""
    found = []
    random = np.random.default_rng(0)
    mask = np.zeros(-(-vocab_size // 32), np.int32)
    for _ in range(options.running):
        constraint = constraints.constraint(structure)
        for _ in range(options.steps):
            begin = time.perf_counter()
            constraint.fill(mask)
            filled = time.perf_counter()
            ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), count=vocab_size, bitorder="little"))
            token = int(random.choice(ids))
            middle = time.perf_counter()
            constraint.accept(token)
            found.append(1e6 * (time.perf_counter() - middle + filled - begin))
    return found


if __name__ == "__main__":
    main()
