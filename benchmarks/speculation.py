"""What exact speculation brings, measured on recorded conversations.

    python benchmarks/speculation.py acceptance ../shared/data/*.jsonl --json acceptance.json

`acceptance`: tokens a pass, with the recorded answers in the place of the model's. Every recorded turn is a request, in
the file's order, one after the other. A pass verifies the due token and the draft. The index begins empty for each file
and holds the earlier requests' prompts and answers alone. No model runs: drafts, their verification and what is learnt
are those of a run with one running sequence whose model answers as recorded.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np

from apcbatch.config import Config
from apcbatch.data.chat.recorded_answers import render_answers
from apcbatch.data.chat.render import Renderer
from apcbatch.data.chat.template_options import ChatOptions
from apcbatch.data.input.layouts import LineOptions
from apcbatch.data.input.records import Conversation
from apcbatch.data.input.source import open_source
from apcbatch.drafts.drafter import Drafter
from apcbatch.drafts.drafts import Drafts
from apcbatch.errors import RequestError
from apcbatch.model.locate import locate_model
from apcbatch.prefix import TokenArray, common_length
from apcbatch.types import DraftSource

SOURCE_SETS: tuple[tuple[DraftSource, ...], ...] = (
    ("lookup",),
    ("history", "lookup"),
    ("siblings", "history", "lookup"),
)


@dataclass(frozen=True, slots=True)
class Turn:
    """A recorded turn. tokens: (tokens,) int32, prompt and answer. num_prompt: tokens of the prompt."""

    tokens: TokenArray
    num_prompt: int


@dataclass(slots=True)
class Tally:
    """Sums over the answers of a file. tokens, passes: without each answer's first token. seconds: of each method of
    the drafts."""

    answers: int = 0
    tokens: int = 0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    prompt_tokens: int = 0
    indexed_tokens: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("begin", "add", "propose", "append"), 0.0))

    def add_pass(self, drafted: int, accepted: int, tokens: int) -> None:
        self.passes += 1
        self.drafted += drafted
        self.accepted += accepted
        self.tokens += tokens

    def figures(self) -> dict[str, Any]:
        """The figures of the document. Microseconds include the calls from Python and those of the clock."""
        passes, seconds = max(self.passes, 1), self.seconds
        return {
            "answers": self.answers,
            "tokens": self.tokens,
            "passes": self.passes,
            "tokens_per_pass": self.tokens / passes,
            "drafted_per_pass": self.drafted / passes,
            "acceptance": self.accepted / max(self.drafted, 1),
            "propose_us": 1e6 * seconds["propose"] / passes,
            "append_us": 1e6 * seconds["append"] / (passes + self.answers),
            "begin_us_per_1000_tokens": 1e9 * seconds["begin"] / max(self.prompt_tokens, 1),
            "add_us_per_1000_tokens": 1e9 * seconds["add"] / max(self.indexed_tokens, 1),
        }


@click.group()
def cli() -> None:
    """Measure exact speculation."""


@cli.command()
@click.argument("files", type=click.Path(exists=True, dir_okay=False, path_type=Path), nargs=-1, required=True)
@click.option("--model", default="demo", show_default=True, help="Its tokenizer and chat template are used.")
@click.option("--half", type=click.Choice(["even", "odd"]), help="Only conversations of these numbers, from 0.")
@click.option("--distinct", is_flag=True, help="Leave out requests whose prompt came before, as branches repeat them.")
@click.option("--most", default=16, show_default=True, help="Drafted tokens of a pass at most.")
@click.option("--threshold", default=0.3, show_default=True, help="Least reach of a drafted token that is verified.")
@click.option("--draft-memory", default=256, show_default=True, help="MiB for history and siblings.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write a document here.")
def acceptance(
    files: Sequence[Path],
    model: str,
    half: str | None,
    distinct: bool,
    most: int,
    threshold: float,
    draft_memory: int,
    json_path: Path | None,
) -> None:
    """Simulate tokens a pass on recorded answers."""
    given = {"model": model, "half": half, "distinct": distinct, "most": most, "threshold": threshold}
    document: dict[str, Any] = {**given, "files": {}}
    for path in files:
        turns = recorded_turns(path, model, half)
        once = without_recurring(turns)
        recurring = len(turns) - len(once)
        click.echo(f"{path.name}: {len(turns)} answers, {recurring} to a prompt that came before")
        if distinct:
            turns, recurring = once, 0
        rows = document["files"][path.name] = []
        for sources in SOURCE_SETS:
            if "siblings" in sources and not recurring:
                continue
            tally = simulate(turns, Drafts(sources, draft_memory << 20), most, threshold)
            rows.append({"sources": sources, **tally.figures()})
            click.echo(line_of(rows[-1]))
    if json_path is not None:
        json_path.write_text(json.dumps(document, indent=1) + "\n")


def recorded_turns(path: Path, model: str, half: str | None) -> list[Turn]:
    """Render and tokenise every recorded turn of a file, as `run --turns each` does."""
    config = Config(model=model, turns="each")
    renderer = Renderer.load(locate_model(model), options=ChatOptions.of(config))
    turns: list[Turn] = []
    for number, record in enumerate(open_source(str(path), LineOptions.of(config))):
        if half is not None and number % 2 != ("even", "odd").index(half):
            continue
        try:
            if not isinstance(record, Conversation):
                raise record.error
            prompts = render_answers(renderer, record, "each").prompts
        except RequestError as error:
            click.echo(f"{path.name}: left out: {error}", err=True)
            continue
        turns += [Turn(prompt.token_ids, prompt.answer_begin) for prompt in prompts if prompt.answer_begin is not None]
    return turns


def without_recurring(turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns whose prompt did not come before."""
    first: dict[bytes, Turn] = {}
    for turn in turns:
        first.setdefault(turn.tokens[: turn.num_prompt].tobytes(), turn)
    return list(first.values())


def simulate(turns: Sequence[Turn], drafts: Drafts, most: int, threshold: float) -> Tally:
    """Answer the turns in order with their recorded answers."""
    tally, clock = Tally(), time.perf_counter
    before = np.zeros(0, dtype=np.int32)
    for turn in turns:
        begun = clock()
        drafter = drafts.begin(turn.tokens[: turn.num_prompt], {})
        tally.seconds["begin"] += clock() - begun
        answer(drafter, turn.tokens[turn.num_prompt :].tolist(), most, threshold, tally)
        begin = common_length(before, turn.tokens)
        begun = clock()
        drafts.add(turn.tokens, turn.num_prompt, begin)
        tally.seconds["add"] += clock() - begun
        before = turn.tokens
        tally.answers += 1
        tally.prompt_tokens += turn.num_prompt
        tally.indexed_tokens += len(turn.tokens) - begin
    return tally


def answer(drafter: Drafter, tokens: list[int], most: int, threshold: float, tally: Tally) -> None:
    """Decode one answer; the prefill gives its first token."""
    clock, seconds = time.perf_counter, tally.seconds
    at, new = 0, tokens[:1]
    while True:
        begun = clock()
        drafter.append(new)
        proposed = clock()
        seconds["append"] += proposed - begun
        at += len(new)
        if at == len(tokens):
            return
        draft = drafter.propose(most)
        seconds["propose"] += clock() - proposed
        drafted = accepted = 0
        if draft is not None:
            drafted = sum(reach >= threshold for reach in draft.reach)  # reach never rises
            wanted = tokens[at : at + drafted]
            while accepted < len(wanted) and draft.tokens[accepted] == wanted[accepted]:
                accepted += 1
        new = tokens[at : at + accepted + 1]
        tally.add_pass(drafted, accepted, len(new))


def line_of(row: dict[str, Any]) -> str:
    """One line of the table."""
    return (
        f"  {', '.join(row['sources']):26}  {row['tokens_per_pass']:5.2f} tokens a pass, "
        f"{row['drafted_per_pass']:5.2f} drafted, {row['acceptance']:6.1%} accepted; "
        f"propose {row['propose_us']:.1f} us, append {row['append_us']:.1f} us, "
        f"begin {row['begin_us_per_1000_tokens']:.0f} and add {row['add_us_per_1000_tokens']:.0f} us "
        "for 1,000 tokens"
    )


if __name__ == "__main__":
    cli()
