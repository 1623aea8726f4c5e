"""The body of every answer is what the `openai` package says it is: its types read each line of a run."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletionMessageFunctionToolCall

from apcbatch.data.tokenization.tokenizer import load_tokenizer
from apcbatch.job.out_file import find_out
from apcbatch.report.panels import read_run
from tests.chats import conversation, read_records, write_lines
from tests.job.conftest import ROOT, batch_line
from tests.job.fakes import EOS, FakeEngine
from tests.openai_types import parsed

TOKENIZER = load_tokenizer(ROOT / "apcbatch" / "demo")
CALL = '<tool_call>{"name": "look_up", "arguments": {"order": "A-7"}}</tool_call>'
ANSWERS = {
    "plain": "It has been sent.",
    "call": f"I will look. {CALL}",
    "calls": CALL + CALL,
    "no-call": "<tool_call>{look up A-7}</tool_call>",
    "empty": "",
    "foreign": "\u00e9t\u00e9 \u65e5\u672c \U0001f600",
}


@pytest.fixture
def scripted(monkeypatch):
    """The fake engine says what ANSWERS has for the first part of a request's name, and then stops."""

    def token(self, request, prompt, number):
        text = ANSWERS[re.split("[#:]", request.tag.ticket.custom_id)[0]]
        return [*TOKENIZER.encode(text).ids, EOS][number]

    monkeypatch.setattr(FakeEngine, "_token", token)


TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]


def asked(custom_id, **body):
    """A line of a batch file, with tools unless it has a prompt or messages."""
    if not body.keys() & {"messages", "prompt"}:
        body |= {"messages": [{"role": "user", "content": "Where is A-7?"}], "tools": TOOLS}
    return batch_line(custom_id, **body)


def varied_lines() -> list[Any]:
    """Every format, with and without log-probabilities, ended by a stop token and by the limit; and two bad lines."""
    lines: list[Any] = ["{not json", asked("bad:messages", messages=[])]
    for name in ANSWERS:
        lines.append(conversation(len(lines)) | {"id": name, "tools": TOOLS})
        lines.append(asked(f"{name}:toolless", messages=[{"role": "user", "content": "Where is A-7?"}]))
        lines.append(asked(f"{name}:chat", max_tokens=400))
        lines.append(asked(f"{name}:cut", max_tokens=3))
        lines.append(asked(f"{name}:logprobs", logprobs=True))
        for kind, prompt in (("text", "Once upon"), ("ids", [5, 6, 7])):
            lines.append(asked(f"{name}:{kind}", prompt=prompt, logprobs=1))
        lines.append(asked(f"{name}:bare", prompt="Once upon", max_tokens=2))
    lines.append(asked("call:limit", max_tokens=len(TOKENIZER.encode(ANSWERS["call"]).ids)))
    lines.append({"id": "plain#s", "conversations": [{"from": "human", "value": "Where is A-7?"}]})
    return lines


def test_every_line_of_a_varied_run_is_read_by_the_package(apcbatch, scripted, tmp_path):
    """Fault: a client that reads answers through the `openai` types fails at a key that is missing, or of no type; an
    agent's loop, which goes by finish_reason, never sees a call, one that the limit follows too, or sees one in what is
    none."""
    lines = varied_lines()
    write_lines(tmp_path / "in.jsonl", lines)
    begin = int(time.time())
    assert apcbatch("run", "in.jsonl", "-o", "out.jsonl", "--max-tokens", 400).code == 3
    records = read_records(tmp_path / "out.jsonl")
    found = {record["custom_id"]: parsed(record) for record in records if record["error"] is None}
    assert len(found) == len(records) - 2 == len(lines) - 2 + len(ANSWERS), "each conversation has two turns"
    assert sum(isinstance(one, Completion) for one in found.values()) == 3 * len(ANSWERS)
    assert len({one.id for one in found.values()}) == len(found)
    assert all(begin <= one.created <= time.time() for one in found.values())
    for record in records:
        if record["error"] is not None:
            continue
        custom_id = record["custom_id"]
        [choice] = found[custom_id].choices
        name, *_, kind = re.split("[#:]", custom_id)
        ended = "length" if kind in ("cut", "bare", "limit") and name != "empty" else "stop"
        calls = {"call": 1, "calls": 2}.get(name, 0) if kind in ("1", "2", "chat", "logprobs", "limit") else 0
        assert choice.finish_reason == ("tool_calls" if calls else ended), custom_id
        assert record["apcbatch"]["finish_reason"] == ended, custom_id
        if record["response"]["body"]["object"] == "chat.completion":
            made = choice.message.tool_calls
            assert len(made) == calls and len({call.id for call in made}) == calls
            assert all(isinstance(call, ChatCompletionMessageFunctionToolCall) for call in made)
            assert all(json.loads(call.function.arguments) == {"order": "A-7"} for call in made)


def test_answers_are_counted_by_how_they_ended(apcbatch, scripted, monkeypatch, tmp_path):
    """Fault: answers that are all cut within their thought, and empty, are `13 ok, 0 errors`, and no warning of theirs
    is summed up anywhere; or advice to allow more tokens comes after a run that had all it asked for."""
    monkeypatch.setitem(ANSWERS, "cut", "<think>Hm, hm, hm, hm.")
    monkeypatch.setitem(ANSWERS, "odd", ANSWERS["no-call"])
    plain = [asked(f"plain:{number}") for number in range(16)]
    lines = [asked("cut:1", max_tokens=6), asked("cut:2"), asked("odd"), *plain, asked("call"), "{"]
    lines += [asked("empty"), asked("plain:none", prompt="a", echo=True, max_tokens=0)]
    write_lines(tmp_path / "in.jsonl", lines)
    counts = {
        "finish_reasons": {"length": 2, "stop": 19, "tool_calls": 1}, "empty_answers": 3, "unread_calls": 1,
        "answer_warnings": {"cut_reasoning": 2, "unread_call": 1},
    }  # fmt: skip
    command = ("run", "in.jsonl", "-o", "out.jsonl", "--reasoning-parser", "think", "--max-tokens", 400)
    outcome = apcbatch(*command)
    assert (outcome.code, {name: outcome.summary[name] for name in counts}) == (3, counts), outcome.stderr
    assert "22 ok, 1 error; 2 cut, 19 stop, 1 tool_calls, 3 empty, 1 with an unread call; " in outcome.stderr
    assert "are cut" not in outcome.stderr, "2 of 22, one of them as it was asked for"
    run = read_run(find_out(str(tmp_path / "out.jsonl"))).as_document()
    assert {name: run["verdict"][name] for name in counts} == counts and run["verdict"]["doubts"] == ["empty"]
    again = apcbatch(*command, "--resume")
    assert again.summary["finish_reasons"] == {} and again.summary["already_done"] == 23, "counts are this process's"
    write_lines(tmp_path / "in.jsonl", plain)
    for options, is_told in (((), True), (("--ignore-eos",), False)):
        outcome = apcbatch("run", "in.jsonl", "-o", "out.jsonl", "--overwrite", "--max-tokens", 2, *options)
        assert outcome.code == 0 and ("answers are cut: they reached" in outcome.stderr) == is_told, options


@pytest.mark.parametrize("limit", ["at the stop token", "before it"])
def test_a_resumed_rollout_knows_how_a_call_ended(apcbatch, scripted, tmp_path, limit):
    """Fault: the word tool_calls hides whether the last token is a stop token, and the next prompt is another one."""
    max_tokens = len(TOKENIZER.encode(ANSWERS["call"]).ids) + (limit == "at the stop token")
    write_lines(tmp_path / "in.jsonl", [conversation(3, turns=4) | {"id": "call", "tools": TOOLS}])
    command = ("run", "in.jsonl", "--turns", "rollout", "--max-tokens", max_tokens)
    assert apcbatch(*command, "-o", "whole.jsonl").code == 0
    whole = (tmp_path / "whole.jsonl").read_bytes().splitlines(keepends=True)
    digests = [record["apcbatch"]["request_digest"] for record in read_records(tmp_path / "whole.jsonl")]
    assert len(digests) == 4
    (tmp_path / "out.jsonl.run.json").write_bytes((tmp_path / "whole.jsonl.run.json").read_bytes())
    for kept in (1, 2, 3):
        (tmp_path / "out.jsonl").write_bytes(b"".join(whole[:kept]))
        assert apcbatch(*command, "-o", "out.jsonl", "--resume").code == 0
        assert digests == [record["apcbatch"]["request_digest"] for record in read_records(tmp_path / "out.jsonl")]


def test_a_rollout_of_an_earlier_version_goes_on(apcbatch, scripted, tmp_path):
    """Fault: lines without an id, a time and the engine's own reason are refused, or taken to have ended otherwise."""
    write_lines(tmp_path / "in.jsonl", [conversation(3, turns=3) | {"id": "call", "tools": TOOLS}])
    command = ("run", "in.jsonl", "-o", "out.jsonl", "--turns", "rollout", "--max-tokens", 400)
    assert apcbatch(*command).code == 0
    whole = read_records(tmp_path / "out.jsonl")
    earlier = json.loads(json.dumps(whole[0]))
    body = earlier["response"]["body"]
    body["choices"][0]["finish_reason"] = earlier["apcbatch"].pop("finish_reason")
    del body["id"], body["created"]
    write_lines(tmp_path / "out.jsonl", [earlier])
    assert apcbatch(*command, "--resume").code == 0
    now = read_records(tmp_path / "out.jsonl")
    assert now[0] == earlier
    assert [one["apcbatch"]["request_digest"] for one in now] == [one["apcbatch"]["request_digest"] for one in whole]
