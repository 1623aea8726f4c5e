"""Answers of a given form through whole runs: they parse and are valid, and are the same bits however they are run."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from apcbatch.cli.program import main
from tests.chats import read_records, write_lines
from tests.effort import tries
from tests.job.conftest import ROOT
from tests.openai_types import parsed
from tests.schemas import random_schema

DEMO = ROOT / "apcbatch" / "demo"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
USER = {"role": "user", "content": "Where is order A-7, and when will it come?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"order": {"type": "string", "pattern": "^[A-Z]-[0-9]{1,3}$"}, "days": {"enum": [1, 2, 7]}},
            "required": ["order", "days"],
            "additionalProperties": False,
        },
    },
}
OTHER = {"type": "function", "function": {"name": "end", "parameters": {"type": "object", "maxProperties": 0}}}


def chat(custom_id: str, **body: Any) -> dict[str, Any]:
    body = {"messages": [USER], "max_tokens": 300, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def json_form(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "form", "strict": True, "schema": schema}}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """run(lines, *options) -> (exit code, records by name)."""
    monkeypatch.chdir(tmp_path)

    def do(lines: list[Any], *options: object) -> tuple[int, dict[str, dict[str, Any]]]:
        write_lines(tmp_path / "in.jsonl", lines)
        out = ("-o", "out.jsonl", "-q", "--progress", "none")
        code = main(["run", "in.jsonl", *out, *(() if "--resume" in options else ("--overwrite",)), *map(str, options)])
        return code, {
            record["custom_id"] or f"line-{record['line']}": record for record in read_records(Path("out.jsonl"))
        }

    return do


def content(record: dict[str, Any]) -> tuple[str, str]:
    """(the answer's text, why it ended)."""
    assert record["error"] is None, record["error"]
    choice = record["response"]["body"]["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"], choice["finish_reason"]


def drawn(number: int) -> dict[str, Any]:
    """Settings of every kind, for every other request."""
    ways: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 1.3, "seed": 5, "top_p": 0.95},
        {"logit_bias": {"20": 4, "300": -100}, "frequency_penalty": 0.6},
        {"temperature": 0.8, "top_k": 40, "repetition_penalty": 1.2, "logprobs": True},
    )
    return ways[number % len(ways)]


def lines_of(count: int) -> tuple[list[Any], dict[str, dict[str, Any]]]:
    """Requests with random schemas in every shape of a line; the schema of each."""
    lines: list[Any] = []
    schemas, source = {}, random.Random(random.random())
    for number in range(count):
        schema, name = random_schema(source), f"r{number}"
        schemas[name] = schema
        if number % 3 == 0:
            lines.append(chat(name, response_format=json_form(schema), **drawn(number // 3)))
        elif number % 3 == 1:
            body = {"prompt": "The order: ", "max_tokens": 300, "structured_outputs": {"json": schema}}
            body |= drawn(number // 3) | ({"logprobs": 1} if "logprobs" in drawn(number // 3) else {})
            lines.append({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body})
        else:
            answer = {"role": "assistant", "content": "x"}
            given = {"guided_json": json.dumps(schema), "max_tokens": 300}
            lines.append({"id": name, "messages": [USER, answer], **given, **drawn(number // 3)})
            schemas[f"{name}#1"] = schemas.pop(name)
    return lines, schemas


def tokens(records: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {name: record["apcbatch"]["completion_token_ids"] for name, record in records.items()}


@pytest.mark.slow
def test_every_finished_answer_is_valid_and_the_same_however_it_is_run(run, tmp_path):
    """Fault: an answer that does not parse or is not what its schema says; one that depends on its company, on what was
    restored, or on what was compiled before."""
    count = tries(120)
    lines, schemas = lines_of(count)
    code, cold = run(lines, "--policy", "none", "--max-running", 1)
    assert code == 0
    ended = 0
    for name, schema in schemas.items():
        parsed(cold[name])
        text, reason = content(cold[name])
        assert cold[name]["apcbatch"]["finish_reason"] == reason
        if reason == "stop":
            ended += 1
            jsonschema.validate(json.loads(text), schema)
        else:
            assert reason == "length" and cold[name]["response"]["body"]["usage"]["completion_tokens"] == 300
    assert ended > count / 2
    for options in (("--max-running", 16, "--store", tmp_path / "s", "--block-size", 16), ("--store", tmp_path / "s")):
        code, again = run(lines, *options)
        assert code == 0 and tokens(again) == tokens(cold), options


@pytest.mark.slow
def test_patterns_choices_grammars_and_any_object(run):
    """Fault: one of the older names does something else than its newer form, or nothing."""
    forms = {
        "regex": ("[A-Z]{2}-[0-9]{3}(, [a-z]{1,9}){2}", {}),
        "choice": (["it is late", "it is lost", "it is"], {}),
        "grammar": ('root ::= "on " ("monday" | "friday") ("!" root)?', {}),
    }
    lines = []
    for number, (kind, (value, _)) in enumerate(forms.items()):
        lines.append(chat(f"{kind}-old", **{f"guided_{kind}": value}, **drawn(number)))
        lines.append(chat(f"{kind}-new", structured_outputs={kind: value}, **drawn(number)))
    lines.append(chat("object", response_format={"type": "json_object"}, max_tokens=600))
    code, records = run(lines)
    assert code == 0
    found = {name: content(record) for name, record in records.items()}
    for form in ("old", "new"):
        assert re.fullmatch(str(forms["regex"][0]), found[f"regex-{form}"][0])
        assert found[f"choice-{form}"][0] in forms["choice"][0] and found[f"choice-{form}"][1] == "stop"
        assert re.fullmatch("on (monday|friday)(!on (monday|friday))*", found[f"grammar-{form}"][0])
    text, reason = found["object"]
    assert text.startswith("{") and (reason == "length" or isinstance(json.loads(text), dict))


def test_forced_calls_are_calls(run):
    """Fault: `required` gives a text; a name that is no tool's; arguments that the tool's parameters forbid."""
    tools = [TOOL, OTHER]
    named = {"type": "function", "function": {"name": "look_up"}}
    lines = [
        chat(f"{way}-{number}", tools=tools, tool_choice=choice, seed=number, **more)
        for way, choice in (("required", "required"), ("named", named))
        for number, more in enumerate(({}, {"temperature": 1.2}, {"temperature": 0.7}, {"parallel_tool_calls": False}))
    ]
    message = {"id": "m", "messages": [USER, {"role": "assistant", "content": "x"}], "tools": tools}
    lines.append(message | {"tool_choice": named, "max_tokens": 300})
    code, records = run(lines)
    assert code == 0
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    called = 0
    for name, record in records.items():
        parsed(record)
        choice = record["response"]["body"]["choices"][0]
        if choice["finish_reason"] != "tool_calls":
            assert choice["finish_reason"] == "length", name
            continue
        called += 1
        for call in choice["message"]["tool_calls"]:
            jsonschema.validate(json.loads(call["function"]["arguments"]), schemas[call["function"]["name"]])
        if name.startswith(("named", "m")):
            assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["look_up"]
        if name.endswith("-3"):
            assert len(choice["message"]["tool_calls"]) == 1
    assert called >= 5


@pytest.mark.slow
@pytest.mark.data
def test_the_tools_of_real_conversations_can_be_forced(run, shared_data):
    """Fault: a keyword that real tools use makes their requests errors, or a call that is not valid."""
    lines, schemas = [], {}
    for number, text in enumerate((shared_data / "tau_bench.jsonl").read_text().splitlines()[::120]):
        record = json.loads(text)
        body = {"tools": record["tools"], "tool_choice": "required", "parallel_tool_calls": False}
        lines += [chat(f"t{number}-{seed}", **body, temperature=1.5, seed=seed) for seed in range(4)]
        for tool in record["tools"]:
            schemas[tool["function"]["name"]] = tool["function"]["parameters"]
    code, records = run(lines)
    assert code == 0
    for record in records.values():
        choice = record["response"]["body"]["choices"][0]
        for call in choice["message"]["tool_calls"] or ():
            jsonschema.validate(json.loads(call["function"]["arguments"]), schemas[call["function"]["name"]])
    assert any(record["response"]["body"]["choices"][0]["finish_reason"] == "tool_calls" for record in records.values())


def test_an_answer_that_is_cut_says_so(run):
    """Fault: half of an object is given as a whole one."""
    _, records = run([chat("cut", guided_json={"type": "object"}, max_tokens=2), chat("one", guided_choice=["yes"])])
    assert content(records["cut"])[1] == "length"
    assert content(records["one"]) == ("yes", "stop")


def test_what_cannot_be_done_is_an_error_record(run, capsys):
    """Fault: one schema ends the job, is ignored, or costs its prompt before it is refused."""
    lines = [
        chat("good", guided_choice=["yes"]),
        chat("unique", response_format=json_form({"type": "array", "uniqueItems": True})),
        chat("look", guided_regex="a(?=b)"),
        chat("two", guided_regex="a", guided_choice=["a"]),
        chat("kind", response_format={"type": "xml"}),
        chat("name", tools=[TOOL], tool_choice={"type": "function", "function": {"name": "fly"}}),
        {"id": "m", "messages": [USER, {"role": "assistant", "content": "x"}], "guided_grammar": "start: nope"},
    ]
    code, records = run(lines)
    assert code == 3 and content(records.pop("good"))[0] == "yes"
    messages = {name: record["error"]["message"] for name, record in records.items()}
    assert all(record["error"]["code"] == "invalid_request" for record in records.values())
    assert messages["unique"] == 'the JSON schema cannot be used: Unimplemented keys: ["uniqueItems"]'
    assert messages["kind"].endswith('.type is "xml"; expected text, json_object or json_schema')
    assert "look-around" in messages["look"] and "unknown name" in messages["m#1"]
    assert "ask for different forms" in messages["two"] and '"fly"' in messages["name"]


def test_a_rollout_keeps_the_whole_of_an_answer_that_ends_without_a_stop_token(run):
    """Fault: the last token of a complete answer is taken for a stop token, and is not in the next prompt."""
    turn = [USER, {"role": "assistant", "content": "x"}]
    line = {"id": "m", "messages": turn * 3, "guided_regex": "[ab]{6}", "temperature": 1}
    code, records = run([line], "--turns", "rollout", "--block-size", 1)
    assert code == 0
    for number in (2, 3):
        before, record = records[f"m#{number - 1}"], records[f"m#{number}"]
        usage = before["response"]["body"]["usage"]
        assert len(content(before)[0]) == 6
        # The state behind the last token but one is the latest that decoding reached.
        assert record["apcbatch"]["cached_tokens"] >= usage["prompt_tokens"] + usage["completion_tokens"] - 1
    _, failed = run([line | {"guided_regex": "("}], "--turns", "rollout")
    assert [record["error"]["code"] for record in failed.values()] == ["invalid_request"] * 3
    assert "there is no history: turn 1" in failed["m#3"]["error"]["message"]


def test_resume_compares_the_form(run):
    """Fault: an answer to one schema is taken for the answer to another; a digest without a form that changed."""
    lines = [chat("a", guided_choice=["yes"]), chat("b")]
    _, first = run(lines)
    assert run(lines, "--resume")[0] == 0
    _, other = run([chat("a", guided_choice=["no"]), chat("b")])
    digests = [{name: one["apcbatch"]["request_digest"] for name, one in each.items()} for each in (first, other)]
    assert digests[0]["a"] != digests[1]["a"] and digests[0]["b"] == digests[1]["b"]
