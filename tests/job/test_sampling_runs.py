"""The settings of sampling through whole runs of the demo model: bodies and options in, OpenAI's bodies out."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from apcbatch import resolution
from apcbatch.cli.program import main
from apcbatch.config import Config
from apcbatch.data.generation_config import with_model_defaults
from apcbatch.data.tokenization.tokenizer import load_tokenizer
from apcbatch.job.request import FIRST, LATER, settings_of
from apcbatch.types import Request
from tests.chats import conversation, read_records, write_lines
from tests.effort import tries
from tests.engine.test_sampling import processors
from tests.job import fakes
from tests.job.conftest import ROOT, answers, batch_line
from tests.job.fakes import FakeEngine
from tests.openai_types import parsed
from tests.tiny import load_oracle

DEMO = ROOT / "apcbatch" / "demo"
TOKENIZER = load_tokenizer(DEMO)
WORDS = ["the", "order", "of", "flight", "is", "not", "what", "was", "in", "file", "that", "you", "read", "to", "me"]


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("APCBATCH_MAX_TOKENS")
    return tmp_path


def run(capsys, *arguments: object) -> tuple[int, str]:
    """(exit code, what the run says on stderr) of `apcbatch run in.jsonl ...` in the oracle's float32."""
    capsys.readouterr()
    code = main(["run", "in.jsonl", "-q", "--progress", "none", "--dtype", "float32", *map(str, arguments)])
    return code, capsys.readouterr().err


def by_id(path: Path) -> dict[str, dict[str, Any]]:
    return {record["custom_id"]: record for record in read_records(path)}


def some() -> dict[str, Any]:
    """A random half of the settings of a body."""
    every: dict[str, Any] = {
        "logit_bias": {str(token): random.uniform(-3, 3) for token in random.sample(range(3, 4096), 200)},
        "repetition_penalty": random.choice([0.8, 1.2, 1.7]),
        "presence_penalty": random.uniform(-1, 2),
        "frequency_penalty": random.uniform(-1, 2),
        "min_tokens": random.randrange(1, 9),
        "allowed_token_ids": random.sample(range(3, 4096), 2000),
        "stop": [random.choice([" ", "e", "er", "\n", ".", "s "]) for _ in range(2)],
        "stop_token_ids": random.sample(range(3, 4096), 400),
        "include_stop_str_in_output": True,
        "logprobs": random.randrange(4),
        "ignore_eos": True,
    }
    return {name: value for name, value in every.items() if random.random() < 0.5}


def expected(oracle: Any, prompt: list[int], body: dict[str, Any]) -> tuple[list[int], str, str, int | str | None]:
    """(tokens, text, finish_reason, stop_reason) by `generate` of transformers and by looking for each stop text in the
    text of ever more tokens."""
    settings = {name: body[name] for name in ("repetition_penalty", "presence_penalty", "frequency_penalty",
                                              "min_tokens", "allowed_token_ids") if name in body}  # fmt: skip
    settings["logit_bias"] = {int(token): value for token, value in body.get("logit_bias", {}).items()}
    stop_ids, keeps = body.get("stop_token_ids", []), body.get("include_stop_str_in_output", False)
    ends = [*([] if body.get("ignore_eos") else TOKENIZER.eos_token_ids), *stop_ids]
    ids = torch.tensor([prompt])
    with torch.no_grad():
        tokens = oracle.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=body["max_tokens"],
            pad_token_id=0, eos_token_id=ends or [4095 + 1], logits_processor=processors(settings, len(prompt), ends),
        )[0, len(prompt) :].tolist()  # fmt: skip
    for count in range(body.get("min_tokens", 0) + 1, len(tokens) + 1):
        if tokens[count - 1] in ends:
            break
        text = TOKENIZER.decode(tokens[:count]).rstrip("\ufffd")
        known = len(TOKENIZER.decode(tokens[: count - 1]).rstrip("\ufffd"))
        found = [(at + len(stop), -len(stop), at, stop) for stop in body.get("stop", [])
                 if (at := text.find(stop, max(0, known - len(stop) + 1))) >= 0]  # fmt: skip
        if found:
            end, _, begin, stop = min(found)
            return tokens[:count], text[: end if keeps else begin], "stop", stop
    if tokens[-1] in stop_ids and tokens[-1] not in (TOKENIZER.eos_token_ids if not body.get("ignore_eos") else ()):
        return tokens, TOKENIZER.decode(tokens if keeps else tokens[:-1]), "stop", tokens[-1]
    return tokens, TOKENIZER.decode(tokens), "stop" if tokens[-1] in ends else "length", None


@pytest.mark.slow
def test_random_bodies_are_answered_as_transformers_answers_them(here, capsys):
    """Fault: a field that is dropped, read in another way than it is written, or lost with others beside it. A random
    half of the fields in each body."""
    bodies = {
        f"r-{number}": {"prompt": " ".join(random.choices(WORDS, k=8)), "max_tokens": 24} | some()
        for number in range(tries(60))
    }
    write_lines(here / "in.jsonl", [batch_line(name, **body) for name, body in bodies.items()])
    assert run(capsys, "-o", "out.jsonl")[0] == 0
    oracle = load_oracle(DEMO)
    for name, record in by_id(here / "out.jsonl").items():
        body, told = bodies[name], f"{name}: {bodies[name]}"
        tokens, text, finish_reason, stop_reason = expected(oracle, TOKENIZER.encode_prompt(body["prompt"]), body)
        assert record["apcbatch"]["completion_token_ids"] == tokens, told
        choice = parsed(record).choices[0]
        assert (choice.text, choice.finish_reason) == (text, finish_reason), told
        assert record["apcbatch"]["stop_reason"] == stop_reason, told
        assert (choice.logprobs is None) == ("logprobs" not in body), told
        if choice.logprobs is not None:
            assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) <= len(tokens), told
            wanted = body["logprobs"]
            counts = [len(one) for one in choice.logprobs.top_logprobs or []]
            assert counts == [] if not wanted else set(counts) <= {wanted, wanted + 1}, told


def test_the_likeliest_tokens_of_a_chat_have_openais_shape(here, capsys):
    """Fault: entries beyond the text, none for the chosen token, counts that nobody asked for."""
    line = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions"}
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6, "logprobs": True, "top_logprobs": 3}
    write_lines(here / "in.jsonl", [
        {**line, "body": body}, {**line, "custom_id": "cut", "body": body | {"stop": [" "], "min_tokens": 3}},
        {**line, "custom_id": "alone", "body": {**body, "logprobs": None}},
    ])  # fmt: skip
    assert run(capsys, "-o", "out.jsonl")[0] == 3
    records = by_id(here / "out.jsonl")
    assert "top_logprobs is 3 without logprobs" in records["alone"]["error"]["message"]
    for name in ("c", "cut"):
        choice = parsed(records[name]).choices[0]
        entries = choice.logprobs.content
        assert all([one.logprob for one in entry.top_logprobs][0] == entry.logprob for entry in entries)  # greedy
        assert all(len(entry.top_logprobs) == 3 and entry.top_logprobs[0].token == entry.token for entry in entries)
        shown = "".join(entry.token for entry in entries)
        assert shown.startswith(choice.message.content) and len(entries[-1].token) > len(shown) - len(
            choice.message.content
        )
    assert records["cut"]["apcbatch"]["stop_reason"] == " " and records["cut"]["apcbatch"]["finish_reason"] == "stop"


@pytest.mark.drawn(1)
@pytest.mark.slow
@pytest.mark.parametrize("turns", ["each", "rollout"])
def test_a_resumed_run_with_settings_gives_the_same_lines(here, capsys, turns):
    """Fault: after a kill a rollout continues from another text than the one that was cut, draws go another way, or a
    run continues with other settings."""
    lines = [conversation(number, turns=3) for number in range(3)]
    lines[1] |= {"stop": ["an", "in"], "presence_penalty": 1.0, "include_stop_str_in_output": True}
    lines[2] |= {"logit_bias": {"9": -1.5}, "top_k": 5, "min_tokens": 4}
    write_lines(here / "in.jsonl", lines)
    options = ("--turns", turns, "--max-tokens", 20, "--temperature", 1.1, "--top-k", 50, "--min-p", 0.01,
               "--stop", "e", "--stop", "o r", "--top-logprobs", 2, "--repetition-penalty", 1.1)  # fmt: skip
    assert run(capsys, "-o", "whole.jsonl", *options)[0] == 0
    whole = read_records(here / "whole.jsonl")
    assert len(whole) == 9 and {one["apcbatch"]["stop_reason"] for one in whole} & {"e", "an", "in", "o r"}
    assert all(parsed(one).choices[0].logprobs is not None for one in whole)
    assert run(capsys, "-o", "out.jsonl", *options)[0] == 0
    for kept in random.sample((1, 4, 7), tries(3)):
        data = (here / "out.jsonl").read_bytes().splitlines(keepends=True)
        (here / "out.jsonl").write_bytes(b"".join(data[:kept]))
        assert run(capsys, "-o", "out.jsonl", *options, "--resume")[0] == 0
        assert answers(read_records(here / "out.jsonl")) == answers(whole)
    code, told = run(capsys, "-o", "out.jsonl", *options, "--stop", "x", "--resume")
    assert code == 2 and "stop" in told and "different run" in told


@pytest.mark.parametrize("form_is_complete", [False, True])
def test_only_a_stop_token_is_left_out_of_the_next_prompt(apcbatch, here, monkeypatch, form_is_complete):
    """Fault: an answer that ended because its form was complete loses its last token in the next prompt; one that ended
    with a stop token keeps it."""
    word, other = TOKENIZER.encode(" so").ids[-1], TOKENIZER.encode("}").ids[-1]
    last = other if form_is_complete else fakes.EOS
    prompts: dict[str, list[int]] = {}
    submit = FakeEngine.submit

    def watched(self: FakeEngine, request: Request) -> None:
        prompts[request.tag.ticket.custom_id] = [int(token) for token in request.token_ids]
        submit(self, request)

    monkeypatch.setattr(FakeEngine, "submit", watched)
    monkeypatch.setattr(FakeEngine, "_token", lambda self, request, prompt, number: [word, last][number])
    monkeypatch.setattr(fakes, "EOS", last)
    write_lines(here / "in.jsonl", [conversation(1, turns=2)])
    assert apcbatch("run", "in.jsonl", "-o", "out.jsonl", "--turns", "rollout").code == 0
    [record, _] = read_records(here / "out.jsonl")
    assert (record["apcbatch"]["completion_token_ids"], record["apcbatch"]["finish_reason"]) == ([word, last], "stop")
    begin = prompts["c-1#1"] + ([word, other] if form_is_complete else [word])
    end = list(TOKENIZER.eos_token_ids)  # the template writes one behind the answer
    assert prompts["c-1#2"][: len(begin) + 1] == begin + end and prompts["c-1#2"][len(begin) + 1] not in end


def test_a_default_leaves_the_digest_as_it_was():
    """Fault: an OUT of an earlier version, which knew fewer settings, cannot be resumed; or a setting that changes the
    answer is not in the digest."""
    assert list(settings_of(Config(), {})) == FIRST
    given = settings_of(Config(), {**LATER, "stop": ("x",), "top_k": 0})
    assert given == {**settings_of(Config(), {}), "stop": ("x",)}
    for name, default in LATER.items():
        other = {"logit_bias": {1: 1.0}, "allowed_token_ids": (1,), "stop": ("x",), "stop_token_ids": (1,)}
        value = other.get(name, not default if isinstance(default, bool) else 2)
        assert settings_of(Config(), {name: value, "logprobs": True})[name] == value
    assert settings_of(Config(top_logprobs=3), {})["logprobs"] is True
    assert "top_logprobs" not in settings_of(Config(top_logprobs=3), {"logprobs": False})
    assert settings_of(Config(stop=("a",), stop_token_id=(5,)), {"stop": ()}).keys() - set(FIRST) == {"stop_token_ids"}


def with_suggestions(folder: Path, **values: Any) -> Path:
    """The demo model with these values in its generation_config.json."""
    shutil.copytree(DEMO, folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


def test_what_the_model_suggests_is_used_or_not_and_said(here, capsys):
    """Fault: a model's temperature is used in silence, or left out in silence; it wins over an option or a line."""
    draws = with_suggestions(here / "draws", do_sample=True, temperature=0.8, top_k=20, top_p=0.9, max_new_tokens=9,
                             repetition_penalty=1.1, no_repeat_ngram_size=3)  # fmt: skip
    write_lines(here / "in.jsonl", [conversation(1, turns=2), conversation(2, turns=1) | {"temperature": 0}])
    base = ("--model", draws, "--max-tokens", 12)
    code, told = run(capsys, *base, "-o", "none.jsonl")
    suggestions = "temperature 0.8, top_p 0.9, top_k 20, repetition_penalty 1.1"
    assert code == 0 and told.count("generation_config.json of the model") == 1
    assert f"suggests {suggestions}, which is not used; --generation-config auto uses it" in told
    code, told = run(capsys, *base, "-o", "auto.jsonl", "--generation-config", "auto", "--top-k", 30)
    assert code == 0 and "generation_config.json of the model gives temperature 0.8, top_p 0.9, repetition" in told
    own = ("--temperature", 0.8, "--top-k", 30, "--top-p", 0.9, "--repetition-penalty", 1.1)
    assert run(capsys, *base, "-o", "own.jsonl", *own)[0] == 0
    assert answers(read_records(here / "auto.jsonl")) == answers(read_records(here / "own.jsonl"))
    assert answers(read_records(here / "auto.jsonl")) != answers(read_records(here / "none.jsonl"))
    assert main(["run", "--show-config", "--model", str(draws), "--generation-config", "auto"]) == 0
    shown = {line.partition(":")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert shown["temperature"].split() == ["temperature:", "0.8", "#", "generation_config.json"]
    assert shown["max_tokens"].split() == ["max_tokens:", "9", "#", "generation_config.json"]
    assert shown["seed"].endswith("# default")


def test_new_tokens_that_nobody_bounds_are_what_is_left(here, capsys):
    """Fault: a long prompt is an error for the default number of new tokens, or one that somebody asked for is cut."""
    suggests = with_suggestions(here / "suggests", max_new_tokens=4096)
    auto = ("--model", suggests, "--generation-config", "auto")
    write_lines(here / "in.jsonl", [batch_line("a", prompt=[5] * 30, ignore_eos=True)])
    for most, options, expected in [
        (2000, (), 1024), (40, (), 10), (31, (), 1), (40, ("--min-tokens", 10), 10), (60, auto, 30),
        (30, (), None), (40, ("--max-tokens", 1024), None), (40, ("--min-tokens", 11), None),
    ]:  # fmt: skip
        code, _ = run(capsys, "-o", "a.jsonl", "--overwrite", "--max-request-tokens", most, *options)
        body = by_id(here / "a.jsonl")["a"]
        if expected is None:
            assert code == 3 and body["error"]["code"] == "context_length_exceeded", (most, options)
        else:
            assert body["response"]["body"]["usage"]["completion_tokens"] == expected, (most, options)


def test_a_file_that_draws_without_a_temperature_draws_at_one(tmp_path):
    """Fault: `do_sample` alone leaves a run greedy, or draws at another temperature than in transformers and vLLM."""
    for values, temperature, origin in [
        ({"do_sample": True}, 1.0, "generation_config.json"),
        ({"do_sample": True, "temperature": 0.5}, 0.5, "generation_config.json"),
        ({"do_sample": 1}, 0.0, "default"),
        ({"temperature": 0.5}, 0.0, "default"),
    ]:
        (tmp_path / "generation_config.json").write_text(json.dumps(values))
        given = resolution.load({"generation_config": "auto"}, None, {})
        used = with_model_defaults(given, tmp_path)
        assert (used.temperature, used.origins["temperature"]) == (temperature, origin)


def test_a_suggestion_that_cannot_be_used(here, capsys):
    """Fault: a traceback, or a run that draws from a distribution that nobody described; greedy files that suggest a
    temperature are taken at their word."""
    write_lines(here / "in.jsonl", [conversation(1, turns=1)])
    broken = with_suggestions(here / "broken", do_sample=True, temperature="hot")
    code, told = run(capsys, "--model", broken, "-o", "a.jsonl", "--generation-config", "auto", "--max-tokens", 2)
    assert code == 2 and "temperature in " in told and "is 'hot'; expected a number" in told
    assert run(capsys, "--model", broken, "-o", "a.jsonl", "--max-tokens", 2)[0] == 0
    greedy = with_suggestions(here / "greedy", do_sample=False, temperature=0.7, top_k=5)
    for choice in ("auto", "none"):
        code, told = run(capsys, "--model", greedy, "-o", f"{choice}.jsonl", "--generation-config", choice,
                         "--max-tokens", 2)  # fmt: skip
        assert code == 0 and "generation_config.json of" not in told
