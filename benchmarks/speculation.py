"""What exact speculation brings, measured on recorded conversations.

    python benchmarks/speculation.py acceptance tau_bench.jsonl toolbench_dfs.jsonl --distinct
    python benchmarks/make_shapes.py shapes --shape mamba-130m
    python benchmarks/speculation.py speed shapes/mamba-130m --input tau_bench.jsonl --running 1 --running 8

`acceptance`: tokens per pass, by a simulation of decode passes over all recorded turns of a file, one after the other:
the index begins empty and holds earlier turns only. No model runs.

`speed`: decode seconds without drafts over those with. A model of random weights agrees with no text, so its draws are
replaced by the recorded answer: all compute is real, acceptance is that of the data. The index begins with the
requests before the sample, as in a run that has done these. Only the last PROMPT tokens of a prompt are prefilled:
decoding costs the same, and the drafts know all of it. With --own the drafts come from the answers themselves
(--draft-from its own OUT); with --random all tokens are random. Both sides run in turns; the ratio is the median over
the pairs.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from bench.datasets import requests_in

from apcbatch import Engine, Request
from apcbatch.drafts.drafter import Drafter, Drafts
from apcbatch.engine.step import Pass
from apcbatch.prefix import TokenArray, common_length
from apcbatch.resolution import load
from apcbatch.types import DraftSource

PROMPT = 24  # tokens that are prefilled
MEMORY_BYTES = 256 << 20
MOST_IN_PASS = 16  # drafted tokens that a simulated pass verifies
LEAST_REACH = 0.3  # minimum reach of a drafted token that is verified
SOURCE_SETS: tuple[tuple[DraftSource, ...], ...] = (("lookup",), ("history", "lookup"))
Answered = list[tuple[TokenArray, TokenArray]]  # prompt, recorded answer


def recorded_answers(path: Path, conversations: int | None, distinct: bool) -> Answered:
    """Return the recorded turns of a file, rendered and tokenised as `run` does it. distinct: leave out recurring
    prompts, whose answers would be known."""
    found: dict[bytes, tuple[TokenArray, TokenArray]] = {}
    for number, request in enumerate(requests_in(load({"score": True, "limit": conversations}, None), str(path))):
        tokens = np.asarray(request.token_ids, np.int32)
        prompt, answer = np.split(tokens, [request.score_from or len(tokens)])
        if len(answer):
            found.setdefault(prompt.tobytes() if distinct else bytes(number), (prompt, answer))
    return list(found.values())


@click.group(help=__doc__)
def cli() -> None:
    pass


@cli.command()
@click.argument("files", type=click.Path(exists=True, dir_okay=False, path_type=Path), nargs=-1, required=True)
@click.option("--distinct", is_flag=True, help="Leave out requests whose prompt came before, as branches repeat them.")
def acceptance(files: Sequence[Path], distinct: bool) -> None:
    """Simulate tokens per pass on recorded answers."""
    for path in files:
        sample = recorded_answers(path, None, distinct)
        click.echo(f"{path.name}: {len(sample)} answers")
        for sources in SOURCE_SETS:
            begin = time.perf_counter()
            found = simulate(sample, sources)
            us_a_pass = 1e6 * (time.perf_counter() - begin) / found.passes
            click.echo(
                f"  {', '.join(sources):16} {found.tokens / found.passes:5.2f} tokens per pass, "
                f"{found.drafted / found.passes:5.2f} drafted, {found.accepted / max(found.drafted, 1):6.1%} accepted; "
                f"{us_a_pass:.0f} us a pass with all that is indexed"
            )


@dataclass(slots=True)
class Estimate:
    """Sums of a simulation. tokens, passes: without each answer's first token, which the prefill gives."""

    tokens: int = 0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0


def simulate(sample: Answered, sources: tuple[DraftSource, ...]) -> Estimate:
    """Simulate decoding recorded answers with drafts from these sources."""
    drafts, estimate = Drafts(sources, MEMORY_BYTES), Estimate()
    before = np.zeros(0, dtype=np.int32)
    for prompt, answer in sample:
        decode(drafts.begin(prompt, {}), answer.tolist(), estimate)
        tokens = np.concatenate([prompt, answer])
        drafts.add(tokens, len(prompt), common_length(before, tokens))
        before = tokens
    return estimate


def decode(drafter: Drafter, answer: Sequence[int], estimate: Estimate) -> None:
    """Simulate decoding one answer with drafts, alone in its passes."""
    at, new = 1, answer[:1]
    while at < len(answer):
        drafter.append(new)
        draft = drafter.propose(MOST_IN_PASS)
        drafted = accepted = 0
        if draft is not None:
            drafted = sum(reach >= LEAST_REACH for reach in draft.reach)
            wanted = answer[at : at + drafted]
            while accepted < len(wanted) and draft.tokens[accepted] == wanted[accepted]:
                accepted += 1
        new = answer[at : at + accepted + 1]
        at += len(new)
        estimate.tokens += len(new)
        estimate.passes += 1
        estimate.drafted += drafted
        estimate.accepted += accepted


class KnownPrompts:
    """Drafts that are made with the whole prompt, of which an engine's request has the end."""

    def __init__(self, drafts: Drafts, whole: Mapping[bytes, TokenArray]) -> None:
        self._drafts, self._whole = drafts, whole

    @property
    def held_bytes(self) -> int:
        return self._drafts.held_bytes

    def begin(self, prompt: TokenArray, references: Any, most_tokens: int) -> Drafter:
        return self._drafts.begin(self._whole[prompt.tobytes()], references, most_tokens)

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
            if answer is not None:  # a pass that warms up has none
                first = sequence.num_tokens - sequence.num_prompt
                tokens = answer[first : first + len(rows)].tolist()
                rows = [row._replace(likeliest=token) for row, token in zip(rows, tokens, strict=False)]
            due.append((chunk, rows))
        return due

    Pass.read = recorded  # type: ignore[method-assign]


class Bench:
    """One engine that decodes a sample with drafts and without. index: texts that the draft index begins with. own: the
    drafts come from the answers themselves. answers: those that replace_draws takes, by request id."""

    def __init__(
        self, engine: Engine, sample: Answered, index: Answered, own: bool, answers: dict[str, TokenArray]
    ) -> None:
        self._engine, self._sample, self._index, self._own = engine, sample, index, own
        self._answers = answers

    def run(self, drafts: bool, count: int | None = None) -> tuple[float, int, int]:
        """Run the sample, or its first requests, once. Return decode seconds, tokens after each first one, and passes
        summed over sequences."""
        whole, requests = {}, []
        for number, (prompt, answer) in enumerate(self._sample[:count]):
            tail = prompt[-PROMPT:].copy()
            tail[0] = 3 + number  # so that no two are alike
            whole[tail.tobytes()] = prompt
            known = {"previous": [answer]} if self._own else {}
            name = str(len(self._answers))
            requests.append(Request(name, tail, len(answer), ignore_eos=True, references=known))
            self._answers[name] = answer
        self._engine._drafting._drafts = self._drafts(whole) if drafts else None  # type: ignore[assignment]
        before = self._engine.counters.copy()
        for result in self._engine.run(requests):
            assert result.error is None, result.error
            assert result.token_ids == self._answers[result.id].tolist()
        after = self._engine.counters
        return (
            after.seconds["decode"] - before.seconds["decode"],
            after.decode_tokens - before.decode_tokens,
            after.decode_chunks - before.decode_chunks,
        )

    def _drafts(self, whole: Mapping[bytes, TokenArray]) -> KnownPrompts:
        fresh = Drafts(("previous",) if self._own else ("history", "lookup"), MEMORY_BYTES)
        for prompt, answer in () if self._own else self._index:
            fresh.add(np.concatenate([prompt, answer]), len(prompt), max(0, len(prompt) - 256))
        return KnownPrompts(fresh, whole)


def random_sample(size: int) -> Answered:
    """Return requests of random tokens."""
    draw = np.random.default_rng(random.Random(1).randrange(1 << 30))
    return [(draw.integers(3, 4000, 500, np.int32), draw.integers(3, 4000, 100, np.int32)) for _ in range(size)]


@cli.command()
@click.argument("model", type=click.Path(exists=True))
@click.option("--input", "inputs", type=click.Path(exists=True, path_type=Path), multiple=True)
@click.option("--running", multiple=True, type=int, default=(1,))
@click.option("--dtype", default="float32")
@click.option("--device", default="cpu")
@click.option("--conversations", default=60, show_default=True, help="Their last requests are the sample.")
@click.option("--requests", default=16, show_default=True, help="Of the sample; twice the running ones at least.")
@click.option("--pairs", default=5, show_default=True)
@click.option("--own", is_flag=True)
@click.option("--random", "is_random", is_flag=True)
@click.option("--out", type=click.Path(path_type=Path))
def speed(
    model: str, inputs: Sequence[Path], running: Sequence[int], dtype: str, device: str, conversations: int,
    requests: int, pairs: int, own: bool, is_random: bool, out: Path | None,
) -> None:  # fmt: skip
    """Measure decode seconds with drafts and without."""
    answers: dict[str, TokenArray] = {}
    replace_draws(answers)
    figures = []
    for path, count in itertools.product([None] if is_random else inputs, running):
        size = max(requests, 2 * count)
        every = random_sample(size) if path is None else recorded_answers(path, conversations, distinct=True)
        options: dict[str, Any] = {"dtype": dtype, "device": device, "max_running": count, "policy": "none"}
        if device == "cuda":
            options["pool_size_bytes"] = 8 << 30
        engine = Engine(model, draft=("previous",) if own else ("history", "lookup"), **options)
        bench = Bench(engine, every[-size:], every[:-size], own, answers)
        for drafts in (False, True):
            bench.run(drafts, max(2, count))
        ratios = []
        for pair in range(pairs):
            runs = {drafts: bench.run(drafts) for drafts in ((False, True) if pair % 2 else (True, False))}
            ratios.append(runs[False][0] / runs[True][0])
        (plain_s, tokens, _), (drafted_s, _, passes) = runs[False], runs[True]
        figures.append({
            "model": Path(model).name, "dtype": dtype, "device": device, "input": path and path.stem, "running": count,
            "ratio": statistics.median(ratios), "ratios": ratios, "tokens_per_pass": tokens / passes,
            "plain_ms_a_token": 1e3 * plain_s / tokens, "drafts_ms_a_token": 1e3 * drafted_s / tokens,
            "drafts": engine.counters.drafts, "tokens": tokens, "own": own, "random": is_random,
        })  # fmt: skip
        click.echo(json.dumps(figures[-1]))
        engine.close()
    if out:
        out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    cli()
