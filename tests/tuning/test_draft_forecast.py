"""What `plan` says of drafts, from recorded answers and without a model."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apcbatch.cli.program import main
from apcbatch.data.chat.render import Renderer
from apcbatch.data.input.inputs import find_inputs
from apcbatch.model.locate import locate_model
from apcbatch.resolution import load
from apcbatch.tuning import drafts
from apcbatch.tuning.drafts import AnsweredSample, forecast_drafts, simulate
from apcbatch.tuning.prediction import of_policies
from apcbatch.tuning.survey import survey
from apcbatch.types import Request
from tests.chats import conversation, write_lines

MEMORY = 1 << 20


def sample_of(*answered: tuple[list[int], list[int]]) -> AnsweredSample:
    """A sample of (prompt, answer)."""
    sample = AnsweredSample()
    for prompt, answer in answered:
        sample.add(Request("r", prompt, max_tokens=1000, references={"recorded": [np.array(answer, np.int32)]}))
    return sample


def words(draw: random.Random, count: int, vocabulary: int = 1 << 30) -> list[int]:
    return [draw.randrange(vocabulary) for _ in range(count)]


def test_every_token_is_drafted_or_drawn() -> None:
    """Fault: a pass or a token is counted twice or not at all, and the tokens a pass are too many."""
    draw = random.Random(random.randrange(1 << 30))
    sample = sample_of(*((words(draw, 40, 5), words(draw, draw.randint(1, 60), 5)) for _ in range(20)))
    for sources in (("lookup",), ("history", "lookup")):
        found = simulate(sample, sources, MEMORY)
        assert found.tokens == sum(len(answer) - 1 for _, answer in sample.answers)
        # a draft that is accepted up to the answer's last token leaves none to draw
        assert 0 <= found.passes + found.accepted - found.tokens <= len(sample.answers)
        assert found.drafted >= found.accepted > 0
        assert found.tokens_per_pass == found.tokens / found.passes


def test_a_copy_is_found_and_noise_is_not() -> None:
    """Fault: text of the prompt is not drafted from, or text that nobody has seen is."""
    draw = random.Random(random.randrange(1 << 30))
    text = words(draw, 100)
    assert simulate(sample_of((text, text)), ("lookup",), MEMORY).tokens_per_pass > 4
    noise = simulate(sample_of((words(draw, 50), words(draw, 50)), (text, words(draw, 50))), ("history",), MEMORY)
    assert (noise.tokens_per_pass, noise.accepted) == (1.0, 0)
    assert simulate(sample_of((text, [1])), ("lookup",), MEMORY).tokens_per_pass == 1.0, "no pass is left"


def test_history_holds_earlier_requests_alone() -> None:
    """Fault: an answer is drafted from itself, or from a later request, and the estimate is a dream."""
    draw = random.Random(random.randrange(1 << 30))
    text = words(draw, 80)
    once = simulate(sample_of((words(draw, 20), text)), ("history", "lookup"), MEMORY)
    assert once.accepted == 0
    twice = simulate(sample_of((words(draw, 20), text), (words(draw, 20), text)), ("history", "lookup"), MEMORY)
    assert twice.accepted > 50
    assert simulate(sample_of((words(draw, 20), text), (words(draw, 20), text)), ("lookup",), MEMORY).accepted == 0


def test_an_answer_ends_where_the_run_ends_it() -> None:
    """Fault: --max-tokens is forgotten, or a request without a recorded answer is one of no tokens."""
    sample = AnsweredSample()
    sample.add(Request("r", [1, 2], max_tokens=3, references={"recorded": [np.arange(9, dtype=np.int32)]}))
    sample.add(Request("r", [1, 2]))
    [(prompt, answer)] = sample.answers
    assert (prompt.tolist(), answer.tolist()) == ([1, 2], [0, 1, 2])
    assert (sample.num_prompt_tokens, sample.num_answer_tokens) == (2, 3)


@pytest.mark.parametrize(
    ("name", "most", "count"), [("MOST_REQUESTS", 2, 2), ("MOST_ANSWER_TOKENS", 1, 1), ("MOST_PROMPT_TOKENS", 1, 1)]
)
def test_the_sample_is_bounded(
    name: str, most: int, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: all answers of a large file are rendered and walked, so that `plan` takes as long as a run."""
    monkeypatch.setattr(drafts, name, most)
    rendered: list[Any] = []
    texts = drafts.KnownAnswers.recorded
    monkeypatch.setattr(
        drafts.KnownAnswers, "recorded", lambda known, prompts: rendered.append(prompts) or texts(known, prompts)
    )
    path = write_lines(tmp_path / "in.jsonl", [conversation(number, turns=1) for number in range(9)])
    sample = AnsweredSample()
    config = load({}, None, {})
    made = survey(config, find_inputs([str(path)]), of_policies(config, [64]), pytest.fail, sample=sample)
    assert made.num_lines == 9
    assert len(sample.answers) == len(rendered) == count


def test_the_answers_are_the_recorded_ones(tmp_path: Path) -> None:
    """Fault: an answer has its prompt's tokens, or another turn's."""
    path = write_lines(tmp_path / "in.jsonl", [conversation(number, turns=3) for number in range(2)])
    sample = AnsweredSample()
    config = load({"max_tokens": "500"}, None, {})
    survey(config, find_inputs([str(path)]), of_policies(config, [64]), pytest.fail, sample=sample)
    decode = Renderer.load(locate_model("demo")).decode
    said = [
        message["content"]
        for number in range(2)
        for message in conversation(number, turns=3)["messages"]
        if message["role"] == "assistant"
    ]
    assert len(said) == len(sample.answers)
    assert all(text in decode(answer.tolist()) for text, (_, answer) in zip(said, sample.answers, strict=True))


def test_the_estimates_are_of_the_sources_of_the_run() -> None:
    """Fault: a source that is switched off is estimated, or `recorded` gets a number that nobody can know."""
    sample = sample_of(([1, 2, 3] * 9, [1, 2, 3] * 9))

    def told(**flags: str) -> Any:
        found = forecast_drafts(load(flags, None, {}), sample)
        return found and ([list(one.sources) for one in found.estimates], found.has_recorded)

    assert told() == ([["lookup"], ["history", "lookup"]], True)
    assert told(draft="lookup") == ([["lookup"]], False)
    assert told(draft="history,recorded") == ([["history"]], True)
    assert told(draft="recorded") == ([], True)
    assert told(draft="none") is None
    assert forecast_drafts(load({}, None, {}), AnsweredSample()) is None


def test_plan_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Fault: the estimate is in the text and not in the document, or stays there with --draft none."""
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "in.jsonl", [conversation(number, turns=3) for number in range(4)])
    run: Callable[..., int] = lambda *flags: main(["plan", "in.jsonl", "--block-sizes", "16", *flags])  # noqa: E731
    assert run("--json", "plan.json") == 0
    printed = capsys.readouterr().out.splitlines()
    found = json.loads((tmp_path / "plan.json").read_text())["drafts"]
    at = printed.index(f"Drafts, if the model answered as {found['requests']} recorded answers of the first requests:")
    for line, one in zip(printed[at + 1 :], found["estimates"], strict=False):
        assert line.startswith(f"  {', '.join(one['sources'])}: {one['tokens_per_pass']:.2f} tokens a pass")
    assert len(found["estimates"]) == 2 and printed[-1].startswith("  recorded: not known without the model")
    assert run("--json", "-", "--draft", "none") == 0
    assert json.loads(capsys.readouterr().out)["drafts"] is None
    assert run("--draft", "none") == 0
    assert "Drafts" not in capsys.readouterr().out
