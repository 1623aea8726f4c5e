"""Runs with several answers, with scored prompts, and with --score, through the command line and real weights."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apcbatch.cli.program import main
from apcbatch.data.chat.recorded_answers import render_answers
from apcbatch.data.chat.render import Renderer
from apcbatch.data.input.records import parse_record
from apcbatch.job.logprobs import PromptFields, completion_logprobs
from apcbatch.types import Result, Scores
from tests.chats import conversation, read_records, write_lines
from tests.job.conftest import ROOT, batch_line
from tests.openai_types import parsed

DEMO = ROOT / "apcbatch" / "demo"
MESSAGES = [{"role": "user", "content": "Where is my order A-7?"}]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """run(lines, *options) -> (exit code, records by custom_id, summary); OUT is out.jsonl in tmp_path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("APCBATCH_POLICY", raising=False)

    def made(lines: list[Any], *options: str) -> tuple[int, dict[str, Any], dict[str, Any]]:
        write_lines(tmp_path / "in.jsonl", lines)
        capsys.readouterr()
        code = main(["run", "in.jsonl", "-o", "out.jsonl", "-q", *options])
        records = {record["custom_id"]: record for record in read_records(tmp_path / "out.jsonl")}
        return code, records, json.loads(capsys.readouterr().out.splitlines()[-1])

    return made


def checked(record: dict[str, Any]) -> Any:
    """The body through the package's types. They have no null for the first token of an echoed prompt, though OpenAI
    gives one; it is looked at and taken off first."""
    record = copy.deepcopy(record)
    for choice in record["response"]["body"]["choices"]:
        logprobs = choice.get("logprobs") or {}
        for key in ("token_logprobs", "top_logprobs"):
            if logprobs.get(key) and logprobs[key][0] is None:
                del logprobs[key][0]
    return parsed(record)


def test_n_choices_of_one_prefill(run: Callable[..., Any]) -> None:
    """Catches choices that are not those of the answers, counts that are those of the first one, and an answer that
    changes when others come with it."""
    settings = {"max_tokens": 7, "temperature": 1.9, "seed": 8, "logprobs": True, "top_logprobs": 2, "ignore_eos": True}
    lines = [batch_line("four", n=4, **settings), batch_line("greedy", n=2, best_of=2, max_tokens=5, ignore_eos=True)]
    lines += [batch_line("text", prompt="Once", n=3, max_tokens=4, temperature=1, ignore_eos=True)]
    code, records, summary = run(lines, "--max-running", "3")
    assert code == 0
    bodies = {name: checked(record) for name, record in records.items()}
    four = bodies["four"]
    assert [choice.index for choice in four.choices] == [0, 1, 2, 3]
    assert len({choice.message.content for choice in four.choices}) == 4
    assert four.usage.completion_tokens == 28 and four.usage.total_tokens == four.usage.prompt_tokens + 28
    own = records["four"]["apcbatch"]
    ids = [choice["completion_token_ids"] for choice in own["choices"]]
    assert own["completion_token_ids"] == ids[0] and [len(one) for one in ids] == [7] * 4
    assert own["cached_tokens"] + own["computed_tokens"] == four.usage.prompt_tokens
    for choice, token_ids in zip(four.choices, ids, strict=True):
        assert len(choice.logprobs.content) == len(token_ids)
        assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    assert bodies["greedy"].choices[0].message == bodies["greedy"].choices[1].message
    assert len(bodies["text"].choices) == 3
    assert summary["completion_tokens"] == 28 + 10 + 12
    single = [batch_line("four", **settings), *lines[1:]]
    _, alone, _ = run(single, "--overwrite")
    assert alone["four"]["response"]["body"]["choices"][0] == records["four"]["response"]["body"]["choices"][0]
    assert "choices" not in alone["four"]["apcbatch"]


def test_echo_gives_the_prompt_and_what_is_known_of_it(run: Callable[..., Any]) -> None:
    """Catches a prompt that is echoed without its tokens, tokens that are off by one, and a body that evaluation
    harnesses cannot read: one with echo, logprobs and max_tokens 0."""
    ids = Renderer.load(DEMO).tokenizer.encode_prompt("The order is late")
    echo = {"echo": True, "max_tokens": 0}
    code, records, summary = run([
        batch_line("text", prompt="The order is late", logprobs=2, **echo),
        batch_line("ids", prompt=ids, logprobs=2, echo=True, max_tokens=3, n=2, temperature=1, ignore_eos=True),
        batch_line("bare", prompt="The order is late", **echo),
        batch_line("one", prompt=ids[:1], logprobs=0, **echo),
        batch_line("behind", prompt="The order", echo=True, max_tokens=2, ignore_eos=True),
    ])  # fmt: skip
    assert code == 0 and summary["completion_tokens"] == 6 + 2
    bodies = {name: checked(record) for name, record in records.items()}
    [text] = records["text"]["response"]["body"]["choices"]
    assert (text["text"], text["finish_reason"]) == ("The order is late", "length")
    found = text["logprobs"]
    assert "".join(found["tokens"]) == "The order is late" and len(found["tokens"]) == len(ids)
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    for token, logprob, top in zip(
        found["tokens"][1:], found["token_logprobs"][1:], found["top_logprobs"][1:], strict=True
    ):
        assert top[token] == logprob <= max(top.values()) and len(top) in (2, 3)
    assert found["text_offset"] == [found["tokens"].index(one) and text["text"].index(one) for one in found["tokens"]]
    assert bodies["text"].usage.completion_tokens == 0
    both = records["ids"]["response"]["body"]["choices"]
    for choice, own in zip(both, records["ids"]["apcbatch"]["choices"], strict=True):
        assert choice["text"].startswith("The order is late") and choice["text"] > "The order is late"
        assert choice["logprobs"]["token_logprobs"][: len(ids)] == found["token_logprobs"]
        assert len(choice["logprobs"]["tokens"]) == len(ids) + len(own["completion_token_ids"])
        assert len(choice["logprobs"]["top_logprobs"]) == len(choice["logprobs"]["tokens"])
    assert bodies["bare"].choices[0].text == "The order is late" and bodies["bare"].choices[0].logprobs is None
    assert records["one"]["response"]["body"]["choices"][0]["logprobs"]["token_logprobs"] == [None]
    assert bodies["behind"].choices[0].text.startswith("The order")


def test_a_completion_lists_its_prompt_only_if_it_is_echoed_and_scored() -> None:
    """Fault: the tokens of a prompt that is not echoed are listed, more likely ones than were asked for, or an offset
    of a token that is not there."""
    for is_echoed, is_scored, num_tokens, logprobs, tops in [
        (False, False, 2, [-3.0, -4.0], [3, 3]),
        (False, True, 2, [-3.0, -4.0], [3, 3]),  # scored for prompt_logprobs alone
        (True, False, 2, [-3.0, -4.0], [3, 3]),
        (True, True, 2, [None, -5.0, -6.0, -3.0, -4.0], [None, 2, 2, 3, 3]),  # for the prompt, one beside the token
        (True, True, 0, [None, -5.0, -6.0], [None, 2, 2]),
        (False, False, 0, [], []),
    ]:
        likely = [[(100, -0.5), (101, -1.0), (102, -2.0)]] * 2
        result = Result("r", 3, [103, 104], [-3.0, -4.0], top_logprobs=[one[:2] for one in likely])
        if is_scored:
            result.scores = Scores(1, [-5.0, -6.0], [9, 9], likely)
        echoed = PromptFields(np.array([105, 106, 107], np.int32), "abc", True, num_top=1) if is_echoed else None
        found = completion_logprobs(result, num_tokens, Renderer.load(DEMO), echoed)
        assert found is not None and found["token_logprobs"] == logprobs
        assert [top and len(top) for top in found["top_logprobs"]] == tops
        assert len(found["tokens"]) == len(found["text_offset"]) == len(tops)


def test_prompt_logprobs_have_the_shape_of_vllm(run: Callable[..., Any]) -> None:
    """Catches a token without its own entry, a rank that counts from 0, and a key that the package's types lack."""
    code, records, _ = run([batch_line(name, prompt_logprobs=n, max_tokens=n) for name, n in (("a", 3), ("b", 0))])
    assert code == 0
    for name, count in (("a", 3), ("b", 0)):
        body, told = checked(records[name]), records[name]["apcbatch"]["prompt_logprobs"]
        assert len(told) == body.usage.prompt_tokens and told[0] is None
        for entries in told[1:]:
            own, *others = entries.values()
            assert own["logprob"] <= 0 and own["rank"] >= 1 and isinstance(own["decoded_token"], str)
            ranks = sorted({entry["rank"] for entry in entries.values()})
            assert ranks[:count] == list(range(1, count + 1)) and len(entries) in (max(count, 1), count + 1)
    own = [[next(iter(one.values())) for one in records[name]["apcbatch"]["prompt_logprobs"][1:]] for name in "ab"]
    assert own[0] == own[1]


def recorded() -> list[dict[str, Any]]:
    return [conversation(number, turns=1 + number % 3) for number in range(5)]


def scores(records: dict[str, Any]) -> dict[str, Any]:
    return {name: record["apcbatch"]["score"] for name, record in records.items() if record["error"] is None}


def test_each_recorded_answer_is_scored(run: Callable[..., Any]) -> None:
    """Catches an answer that is not scored or twice, tokens that are not the recorded ones, and totals that are not of
    all records."""
    lines = recorded()
    code, records, summary = run(lines, "--score")
    assert code == 0
    renderer = Renderer.load(DEMO)
    expected = {}
    for number, one in enumerate(lines, start=1):
        parsed_line: Any = parse_record(one, number)
        for prompt in render_answers(renderer, parsed_line, "each").prompts:
            expected[prompt.custom_id] = prompt.token_ids[prompt.answer_begin :].tolist()
    found = scores(records)
    assert {name: score["token_ids"] for name, score in found.items()} == expected
    for name, score in found.items():
        body = checked(records[name])
        [choice] = body.choices
        assert [entry.logprob for entry in choice.logprobs.content] == score["token_logprobs"]
        assert score["tokens"] == len(score["token_ids"]) == len(score["token_ranks"])
        own = records[name]["apcbatch"]
        assert own["completion_token_ids"] == [] and body.usage.completion_tokens == 0
        assert own["cached_tokens"] + own["computed_tokens"] == body.usage.prompt_tokens
        assert own["finish_reason"] == "stop", "the template writes the end of turn"
    total = summary["score"]
    every = [logprob for score in found.values() for logprob in score["token_logprobs"]]
    assert (total["answers"], total["tokens"]) == (len(found), len(every))
    assert summary["completion_tokens"] == 0 and summary["seconds"]["decode"] == 0


@pytest.mark.slow
def test_a_scored_run_goes_on(run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches answers that are scored again, or taken for generated ones, when a run is resumed, and a run that
    continues by generating."""
    lines = recorded()
    _, whole, _ = run(lines, "--score")
    kept = (tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)[:4]
    (tmp_path / "out.jsonl").write_bytes(b"".join(kept))
    code, records, summary = run(lines, "--resume")
    assert code == 0 and scores(records) == scores(whole)
    assert (summary["already_done"], summary["score"]["answers"]) == (4, len(whole) - 4)
    monkeypatch.setenv("APCBATCH_SCORE", "false")
    assert main(["run", "in.jsonl", "-o", "out.jsonl", "-q", "--resume"]) == 2


def test_what_cannot_be_scored_is_said(run: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a line without an answer that ends the run, or is answered by a generated one; and rollouts, which have
    no recorded answers."""
    lines = [{"id": "q", "messages": MESSAGES}, conversation(1), batch_line("c", prompt="x"), batch_line("b")]
    code, records, _ = run(lines, "--score")
    assert code == 3
    messages = {name: record["error"]["message"] for name, record in records.items() if record["error"]}
    assert "no message is from the assistant" in messages["q#1"]
    assert "a completion has no recorded answer" in messages["c"]
    assert "the last message is not from the assistant" in messages["b"]
    assert scores(records)
    assert main(["run", "in.jsonl", "-o", "other.jsonl", "--score", "--turns", "rollout"]) == 2
    assert "--score" in (said := capsys.readouterr().err) and "rollout" in said and "give --turns each or last" in said


def test_settings_of_a_line_are_not_passed_over_in_silence(
    run: Callable[..., Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Catches a temperature that does nothing without a word."""
    write_lines(tmp_path / "w.jsonl", [conversation(1) | {"temperature": 0.5, "n": 2}])
    assert main(["run", "w.jsonl", "-o", "w.out.jsonl", "--score"]) == 0
    assert "line 1 sets n, temperature" in capsys.readouterr().err
