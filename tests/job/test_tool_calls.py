"""Tool calls and switches through the command line: answers become calls, and records say what is odd."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from apcbatch.data.tokenization.tokenizer import load_tokenizer
from tests.chats import read_records, write_lines
from tests.data.conftest import build_tokenizer, save_model
from tests.data.families import TEMPLATES
from tests.job.conftest import batch_line
from tests.job.fakes import EOS, FakeEngine
from tests.openai_types import parsed

TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]
ASK = {"role": "user", "content": "Where is A-7?"}
CALLS = '[\n    {"name": "look_up", "arguments": {"order": "A-7"}},\n    {"name": "look_up", "arguments": {}}\n]'
JAMBA = f"I will look.<tool_calls>{CALLS}</tool_calls>"


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., Path]:
    """make(template, *special): a model folder whose tokenizer has these special tokens."""

    def make(template: str, *special: str, **config: object) -> Path:
        tokenizer = build_tokenizer("chatml")
        tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
        folder = tmp_path / "model"
        folder.mkdir()
        return save_model(folder, tokenizer, template, eos_token="<|im_end|>", **config)

    return make


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """says(folder, answers): the fake engine says, token by token, the answer whose name begins the request's."""

    def script(folder: Path, answers: dict[str, str]) -> None:
        tokenizer = load_tokenizer(folder)

        def token(self: FakeEngine, request: Any, prompt: list[int], number: int) -> int:
            custom_id = request.tag.ticket.custom_id
            text = answers.get(custom_id, answers.get(re.split("[#:]", custom_id)[0], ""))
            return [*tokenizer.encode(text).ids, EOS][number]

        monkeypatch.setattr(FakeEngine, "_token", token)

    return script


def line(custom_id: str, **body: Any) -> dict[str, Any]:
    """A chat with tools."""
    return batch_line(custom_id, **{"messages": [ASK], "tools": TOOLS, "max_tokens": 400} | body)


@pytest.mark.parametrize("special", [(), ("<tool_calls>", "</tool_calls>")])
def test_a_jamba_template_gives_calls(apcbatch, model, says, tmp_path, special):
    """Fault: Jamba's own calls are left in the text, or their markers are dropped as special tokens."""
    folder = model(TEMPLATES["jamba"], *special)
    says(folder, {"calls": JAMBA, "cut": JAMBA, "only": f"<tool_calls>{CALLS}</tool_calls>", "plain": "Sent."})
    lines = [line("calls"), line("cut", max_tokens=30), line("only", parallel_tool_calls=False), line("plain")]
    lines += [line("calls:hidden", tool_choice="none"), line("calls:toolless", tools=None)]
    write_lines(tmp_path / "in.jsonl", lines)
    assert apcbatch("run", "in.jsonl", "-o", "out.jsonl", "--model", folder).code == 0
    found = {
        record["custom_id"]: (parsed(record).choices[0], record) for record in read_records(tmp_path / "out.jsonl")
    }
    [choice, record] = found["calls"]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I will look.")
    assert [(call.id, json.loads(call.function.arguments)) for call in choice.message.tool_calls] == [
        ("call_1_1", {"order": "A-7"}),
        ("call_1_2", {}),
    ]
    assert record["apcbatch"]["warnings"] == [] and record["apcbatch"]["finish_reason"] == "stop"
    [choice, record] = found["only"]
    assert choice.message.content is None and len(choice.message.tool_calls) == 1
    assert "of the 2 tool calls in the answer the first one is given" in record["apcbatch"]["warnings"][0]
    [choice, record] = found["cut"]
    assert choice.finish_reason == "length" and choice.message.tool_calls == []
    assert JAMBA.startswith(choice.message.content) and "<tool_calls>" in choice.message.content
    assert "cannot be read as jamba writes calls" in record["apcbatch"]["warnings"][0]
    for name in ("calls:hidden", "calls:toolless", "plain"):
        [choice, record] = found[name]
        assert (choice.finish_reason, choice.message.tool_calls) == ("stop", [])
        assert choice.message.content == ("Sent." if name == "plain" else JAMBA)
        assert record["apcbatch"]["warnings"] == []


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("options", "config", "calls"),
    [
        ((), {}, 2),
        (("--tool-parser", "none"), {}, 0),
        (("--tool-parser", "hermes"), {}, 0),
        ((), {"response_schema": {"x-regex-iterator": r"\s*<tool_call>(.*?)</tool_call>"}}, 0),
        ((), {"response_template": {"fields": {"tool_calls": {"open": "<tool_calls>"}}}}, 2),
        (("--tool-parser", "jamba"), {"response_template": {"fields": {"tool_calls": {"open": "[TOOL_CALLS]"}}}}, 2),
    ],
)
def test_the_parser_is_an_option(apcbatch, model, says, tmp_path, options, config, calls):
    """Fault: --tool-parser does nothing; or what the checkpoint says of its answers is not looked at."""
    folder = model(TEMPLATES["jamba"], **config)
    says(folder, {"a": JAMBA})
    write_lines(tmp_path / "in.jsonl", [line("a")])
    assert apcbatch("run", "in.jsonl", "-o", "out.jsonl", "--model", folder, *options).code == 0
    [record] = read_records(tmp_path / "out.jsonl")
    assert len(parsed(record).choices[0].message.tool_calls) == calls


def test_an_unknown_parser_is_refused(apcbatch, tmp_path):
    """Fault: a name that is misspelt reads nothing."""
    write_lines(tmp_path / "in.jsonl", [line("a")])
    outcome = apcbatch("run", "in.jsonl", "-o", "out.jsonl", "--tool-parser", "jmba")
    assert outcome.code == 2 and "did you mean jamba?" in outcome.stderr


THINKING = TEMPLATES["hermes"] + "{%- if add_generation_prompt and enable_thinking %}{{- '<think>\\n' }}{%- endif %}"


def test_reasoning_stands_beside_the_content(apcbatch, model, says, tmp_path):
    """Fault: reasoning in the content; a thought that the prompt began; a cut one that passes for an answer."""
    folder = model(THINKING)
    thought = "I must look.\n</think>\n\n"
    call = '<tool_call>{"name": "look_up"}</tool_call>'
    says(folder, {"open": thought + call, "own": f"<think>{thought}Sent.", "cut": "<think>I must", "plain": "Sent."})
    lines = [line("open", enable_thinking=True), line("own"), line("cut"), line("plain"), line("cut:none")]
    write_lines(tmp_path / "in.jsonl", lines)
    assert apcbatch("run", "in.jsonl", "-o", "out.jsonl", "--model", folder).code == 0
    found = {record["custom_id"]: record for record in read_records(tmp_path / "out.jsonl")}
    said = {
        name: parsed(record) and record["response"]["body"]["choices"][0]["message"] for name, record in found.items()
    }
    assert said["open"]["reasoning_content"] == said["own"]["reasoning_content"] == "I must look."
    assert said["open"]["content"] is None and len(said["open"]["tool_calls"]) == 1
    assert said["own"]["content"] == said["plain"]["content"] == "Sent." and "reasoning_content" not in said["plain"]
    assert (said["cut"]["content"], said["cut"]["reasoning_content"]) == ("", "I must")
    assert found["cut"]["apcbatch"]["warnings"] == ["the answer ends before its reasoning does, so it has no content"]
    assert apcbatch("run", "in.jsonl", "-o", "raw.jsonl", "--model", folder, "--reasoning-parser", "none").code == 0
    raw = {record["custom_id"]: parsed(record).choices[0].message for record in read_records(tmp_path / "raw.jsonl")}
    assert raw["own"].content == f"<think>{thought}Sent." and raw["open"].tool_calls[0].function.name == "look_up"


def conversation() -> dict[str, Any]:
    """Three turns, the first two of which call a tool."""
    messages: list[dict[str, Any]] = [ASK]
    for number in (1, 2):
        call = {"id": f"r{number}", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"r{number}", "content": f"result {number}"})
    return {"id": "c", "messages": [*messages, {"role": "assistant", "content": "Sent."}], "tools": TOOLS}


SHOWS_IDS = TEMPLATES["hermes"].replace(
    "{{- message.content }}", "{{- (message.tool_call_id or '') + message.content }}", 1
)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_rollout_has_each_id_once_also_when_resumed(apcbatch, model, says, tmp_path, kept):
    """Fault: ids that restart at each turn; tools that answer recorded calls; a resumed run with other ids."""
    folder = model(SHOWS_IDS)
    call = '<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call>'
    says(folder, {"c#1": call, "c#2": call + call, "c#3": call})
    write_lines(tmp_path / "in.jsonl", [conversation()])
    command = ("run", "in.jsonl", "--turns", "rollout", "--max-tokens", 400, "--model", folder)
    assert apcbatch(*command, "-o", "whole.jsonl").code == 0
    whole = read_records(tmp_path / "whole.jsonl")
    ids = [[call.id for call in parsed(record).choices[0].message.tool_calls] for record in whole]
    assert ids == [["call_1_1"], ["call_2_1", "call_2_2"], ["call_3_1"]]
    assert [record["apcbatch"]["warnings"] for record in whole] == [
        [], [], ["turn 2 generated 2 tool calls, and 1 recorded message of a tool follows"],
    ]  # fmt: skip
    (tmp_path / "out.jsonl").write_bytes(b"".join((tmp_path / "whole.jsonl").read_bytes().splitlines(True)[:kept]))
    (tmp_path / "out.jsonl.run.json").write_bytes((tmp_path / "whole.jsonl.run.json").read_bytes())
    assert apcbatch(*command, "-o", "out.jsonl", "--resume").code == 0
    again = read_records(tmp_path / "out.jsonl")
    for one, other in zip(whole, again, strict=True):
        assert one["response"]["body"]["choices"] == other["response"]["body"]["choices"]
        assert one["apcbatch"]["request_digest"] == other["apcbatch"]["request_digest"]
        assert one["apcbatch"]["warnings"] == other["apcbatch"]["warnings"]


def test_recorded_turns_have_ids_of_their_places(apcbatch, model, says, tmp_path):
    """Fault: two answers of one conversation have the same id; or one that the history of a batch line has."""
    folder = model(TEMPLATES["hermes"])
    says(folder, dict.fromkeys(("c", "b"), '<tool_call>{"name": "look_up"}</tool_call>'))
    messages = json.loads(json.dumps(conversation()["messages"][:-1]).replace('"r1"', '"call_3_1"'))
    write_lines(tmp_path / "in.jsonl", [conversation(), line("b", messages=messages)])
    assert apcbatch("run", "in.jsonl", "-o", "out.jsonl", "--model", folder, "--max-tokens", 400).code == 0
    made = {
        record["custom_id"]: [call.id for call in parsed(record).choices[0].message.tool_calls]
        for record in read_records(tmp_path / "out.jsonl")
    }
    assert made == {"c#1": ["call_1_1"], "c#2": ["call_2_1"], "c#3": ["call_3_1"], "b": ["call_3_1x"]}


def test_a_request_without_switches_keeps_its_digest(apcbatch, model, says, tmp_path):
    """Fault: a file that an earlier version wrote cannot be resumed; or a switch is taken for none."""
    folder = model("{% for message in messages %}{{ message.content }}{% endfor %}")
    says(folder, {})
    bare, silent = line("a"), line("a", parallel_tool_calls=True, chat_template_kwargs={})
    given = [line("a", parallel_tool_calls=False), line("a", enable_thinking=True), line("a", enable_thinking=False)]
    given.append(line("a", add_generation_prompt=False))
    digests = []
    for number, one in enumerate([bare, silent, *given]):
        write_lines(tmp_path / "in.jsonl", [one])
        assert apcbatch("run", "in.jsonl", "-o", f"{number}.jsonl", "--model", folder).code == 0
        [record] = read_records(tmp_path / f"{number}.jsonl")
        digests.append(record["apcbatch"]["request_digest"])
    assert digests[0] == digests[1] and len(set(digests)) == 5
    # the settings that 0.1.0 wrote for this request
    from apcbatch.job.record import Ticket, request_digests, settings_text
    from apcbatch.prefix import as_token_array

    settings = {
        "max_tokens": 400, "temperature": 0.0, "top_p": 1.0, "seed": 0, "ignore_eos": False, "logprobs": False,
    }  # fmt: skip
    ids = as_token_array(load_tokenizer(folder).encode(str(ASK["content"])).ids)
    ticket = Ticket(0, 1, 1, "a", None, settings=settings_text(settings))
    assert digests[0] == request_digests(ticket, ids, "apc-000000", "a")[0]


def test_a_run_with_other_parsers_is_not_continued(apcbatch, model, says, tmp_path):
    """Fault: OUT holds two kinds of answers."""
    folder = model(TEMPLATES["jamba"])
    says(folder, {"a": JAMBA})
    write_lines(tmp_path / "in.jsonl", [line("a"), line("b")])
    command = ("run", "in.jsonl", "-o", "out.jsonl", "--model", folder)
    assert apcbatch(*command).code == 0
    for options in (("--tool-parser", "none"), ("--reasoning-parser", "think"), ("--template-kwargs", '{"a": 1}')):
        outcome = apcbatch(*command, "--resume", *options)
        assert outcome.code == 2 and options[0][2:].replace("-", "_") in outcome.stderr


def test_what_is_not_read_is_in_each_record(apcbatch, model, says, tmp_path):
    """Fault: apcbatch.warnings is empty where a key or a switch did nothing."""
    folder = model(TEMPLATES["jamba"])
    says(folder, {})
    body = {"messages": [{**ASK, "colour": 1}], "chat_template_kwargs": {"mood": 1}}
    write_lines(tmp_path / "in.jsonl", [line("a", **body), {"id": "m", **body}, line("b"), batch_line("p", prompt="x")])
    assert apcbatch("run", "in.jsonl", "-o", "out.jsonl", "--model", folder).code == 0
    told = {record["custom_id"]: record["apcbatch"]["warnings"] for record in read_records(tmp_path / "out.jsonl")}
    switch = 'the chat template does not read "mood"'
    assert told["a"] == ['keys that are not read: "colour" (first in body.messages[0])', switch]
    assert told["m#1"] == ['keys that are not read: "colour" (first in messages[0])', switch]
    assert told["b"] == told["p"] == []
