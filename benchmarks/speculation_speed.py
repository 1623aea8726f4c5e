"""Decode seconds with drafts and without, where the recorded answers stand in for the model's draws.

    python benchmarks/make_shapes.py shapes --shape mamba-130m
    python benchmarks/speculation_speed.py shapes/mamba-130m --input tau_bench.jsonl --running 1 --running 8

A model of random weights agrees with nobody, so its draws are replaced by the recorded answer: all compute is real,
acceptance is that of the data. The index begins with the conversations before the sample, as in a run that has done
these. Only the last PROMPT tokens of a prompt are prefilled: decoding costs the same, and the drafts know all of it.
With --own the drafts come from the answers themselves (--draft-from its own OUT); with --random all tokens are random.
Both sides run in turns; the ratio is the median over the pairs.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from apcbatch import Engine, Request
from apcbatch.bench.datasets import requests_in
from apcbatch.drafts.drafter import Drafter
from apcbatch.drafts.drafts import Drafts
from apcbatch.engine.step import Pass
from apcbatch.prefix import TokenArray
from apcbatch.resolution import load

PROMPT = 24  # tokens that are prefilled
Sample = list[tuple[TokenArray, TokenArray]]  # whole prompt, recorded answer


class KnownPrompts:
    """Drafts that are made with the whole prompt, of which an engine's request has the end."""

    def __init__(self, drafts: Drafts, whole: Mapping[bytes, TokenArray]) -> None:
        self._drafts, self._whole = drafts, whole

    @property
    def held_bytes(self) -> int:
        return self._drafts.held_bytes

    def begin(self, prompt: TokenArray, references: Any) -> Drafter:
        return self._drafts.begin(self._whole[prompt.tobytes()], references)

    def add(self, tokens: TokenArray, num_prompt: int, begin: int) -> None:
        whole = self._whole[tokens[:num_prompt].tobytes()]
        joined = np.concatenate([whole, tokens[num_prompt:]])
        self._drafts.add(joined, len(whole), max(0, len(whole) - 256))


def replace_draws(answers: Mapping[str, TokenArray]) -> None:
    """Replace the draws of all passes by the recorded answers, by request id."""
    read = Pass.read

    def recorded(self: Pass) -> Any:
        due = []
        for chunk, rows in read(self):
            sequence = chunk.sequence
            answer = answers.get(sequence.request.id)
            if answer is None:  # the pass that warms up
                due.append((chunk, rows))
                continue
            first = sequence.num_tokens - sequence.num_prompt
            tokens = answer[first : first + len(rows)].tolist()
            due.append((chunk, [row._replace(likeliest=token) for row, token in zip(rows, tokens, strict=False)]))
        return due

    Pass.read = recorded  # type: ignore[method-assign]


def sample_of(path: Path, conversations: int, requests: int) -> tuple[Sample, Sample]:
    """Return (prompt, answer) of the requests before the sample, and of the sample: whole conversations."""
    config = load({"score": True, "limit": conversations}, None)
    every, seen = [], set()
    for one in requests_in(config, str(path)):
        tokens = np.asarray(one.token_ids, np.int32)
        begin = one.score_from or len(tokens)
        if len(tokens) - begin > 1 and tokens[:begin].tobytes() not in seen:  # a prompt that recurs would be known
            seen.add(tokens[:begin].tobytes())
            every.append((tokens[:begin], tokens[begin:]))
    return every[:-requests], every[-requests:]


def run(
    engine: Engine, sample: Sample, index: Sample, references: bool, tag: str, drafts: bool
) -> tuple[float, int, int]:
    """Run the sample once, with drafts or without. Return its decode seconds, the tokens after each first one, and the
    passes summed over sequences."""
    drafting = engine._drafting
    whole, requests, answers = {}, [], {}
    for number, (prompt, answer) in enumerate(sample):
        tail = prompt[-PROMPT:].copy()
        tail[0] = 3 + number  # so that no two are alike
        whole[tail.tobytes()] = prompt
        known = {"previous": [answer]} if references else {}
        request = Request(f"{tag}{number}", tail, len(answer), ignore_eos=True, references=known)
        requests.append(request)
        answers[request.id] = answer
    replace_draws.answers.clear()  # type: ignore[attr-defined]
    replace_draws.answers.update(answers)  # type: ignore[attr-defined]
    drafting._drafts = None
    if drafts:
        fresh = Drafts(("previous",) if references else ("history", "lookup"), 64 << 20)
        for prompt, answer in () if references else index:
            fresh.add(np.concatenate([prompt, answer]), len(prompt), max(0, len(prompt) - 256))
        drafting._drafts = KnownPrompts(fresh, whole)  # type: ignore[assignment]
    before = engine.counters.copy()
    for result in engine.run(requests):
        assert result.error is None, result.error
        assert result.token_ids == answers[result.id].tolist()
    after = engine.counters
    return (
        after.seconds["decode"] - before.seconds["decode"],
        after.decode_tokens - before.decode_tokens,
        after.decode_chunks - before.decode_chunks,
    )


@click.command(help=__doc__)
@click.argument("model", type=click.Path(exists=True))
@click.option("--input", "inputs", type=click.Path(exists=True, path_type=Path), multiple=True)
@click.option("--running", multiple=True, type=int, default=(1,))
@click.option("--dtype", default="float32")
@click.option("--device", default="cpu")
@click.option("--conversations", default=60)
@click.option("--requests", default=16, help="Per running sequence beyond the first, at least.")
@click.option("--pairs", default=5)
@click.option("--own", is_flag=True)
@click.option("--random", "is_random", is_flag=True)
@click.option("--out", type=click.Path(path_type=Path))
def main(
    model: str, inputs: Sequence[Path], running: Sequence[int], dtype: str, device: str, conversations: int,
    requests: int, pairs: int, own: bool, is_random: bool, out: Path | None,
) -> None:  # fmt: skip
    replace_draws.answers = {}  # type: ignore[attr-defined]
    replace_draws(replace_draws.answers)  # type: ignore[attr-defined]
    figures = []
    for path, count in itertools.product(inputs or [None], running):
        size = max(requests, 2 * count)
        if path is None or is_random:
            source = random.Random(1)
            sample: Sample = [
                tuple(np.array([source.randrange(3, 4000) for _ in range(n)], np.int32) for n in (500, 100))
                for _ in range(size)
            ]  # type: ignore[misc]
            index: Sample = []
        else:
            index, sample = sample_of(path, conversations, size)
        options = {"dtype": dtype, "device": device, "max_running": count, "policy": "none"}
        if device == "cuda":
            options["pool_size_bytes"] = 8 << 30
        ratios, rates = [], []
        drafted = Engine(model, draft=("previous",) if own else ("history", "lookup"), **options)
        for drafts in (False, True):
            run(drafted, sample[: max(2, count)], index, own, f"warm{drafts}", drafts)
        for pair in range(pairs):
            found = {}
            for name in ("plain", "drafts") if pair % 2 else ("drafts", "plain"):
                found[name] = run(drafted, sample, index, own, f"{name}{pair}#", name == "drafts")
            ratios.append(found["plain"][0] / found["drafts"][0])
            rates.append((found["plain"], found["drafts"]))
        counts = drafted.counters.drafts or {k: tuple(v) for k, v in drafted._drafting.counts.items()}
        (plain_s, tokens, _), (drafted_s, _, passes) = rates[-1]
        figure = {
            "model": Path(model).name, "dtype": dtype, "device": device, "input": path and path.stem, "running": count,
            "ratio": statistics.median(ratios), "ratios": ratios, "tokens_per_pass": tokens / passes,
            "plain_ms_a_token": 1e3 * plain_s / tokens, "drafts_ms_a_token": 1e3 * drafted_s / tokens,
            "drafts": {k: list(v) for k, v in counts.items()}, "tokens": tokens, "own": own, "random": is_random,
            "costs_ms": {r: round(1e3 * drafted._drafting._costs.of(r), 2) for r in (1, 2, 4, 8, 16, 32, 64, 96, 128)},
        }  # fmt: skip
        figures.append(figure)
        click.echo(json.dumps(figure))
        drafted.close()
    if out:
        out.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
