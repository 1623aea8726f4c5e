"""The rewritten history: exactly the older tool messages become stubs, and nothing else changes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.elide_history import STUB, elide, turn_ends

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "elide_history.py"
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {}}}]


def call(number: int) -> list[dict]:
    """A tool call of the assistant and what came of it."""
    function = {"name": "look", "arguments": json.dumps({"at": number})}
    calls = [{"id": f"call-{number}", "type": "function", "function": function}]
    return [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": f"call-{number}", "name": "look", "content": f"Größe {number}"},
    ]


def chat(calls: int) -> list[dict]:
    """A question, so many calls, an answer and another question."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Look."}]
    for number in range(calls):
        messages += call(number)
    return [*messages, {"role": "assistant", "content": "Done."}, {"role": "user", "content": "Thanks."}]


def transform(tmp_path: Path, conversations: list[dict], *options: str) -> list[dict]:
    """The requests that the script makes of the conversations."""
    source, made = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(one) + "\n" for one in conversations))
    subprocess.run([sys.executable, str(SCRIPT), str(source), "-o", str(made), *options], check=True)
    return [json.loads(line) for line in made.read_text().splitlines()]


def test_all_tool_messages_but_the_last_five_become_stubs_and_nothing_else_changes(tmp_path):
    """Fault: one message too many or too few is elided, or another field or message is touched."""
    messages = chat(calls=7)
    requests = transform(tmp_path, [{"id": "c", "messages": messages, "tools": TOOLS}])
    assert [one["custom_id"] for one in requests] == [f"c#{turn}" for turn in range(1, 10)]
    ends = [2, 4, 6, 8, 10, 12, 14, 16, 18]
    for request, end in zip(requests, ends, strict=True):
        assert (request["method"], request["url"]) == ("POST", "/v1/chat/completions")
        assert request["body"].keys() == {"messages", "tools"}
        assert request["body"]["tools"] == TOOLS
        num_tools = sum(message["role"] == "tool" for message in messages[:end])
        expected = json.loads(json.dumps(messages[:end]))
        for number in range(num_tools - 5):
            assert expected[3 + 2 * number]["role"] == "tool"
            expected[3 + 2 * number]["content"] = STUB
        assert request["body"]["messages"] == expected
    stubs = [sum(one["content"] == STUB for one in request["body"]["messages"]) for request in requests]
    assert stubs == [0, 0, 0, 0, 0, 0, 1, 2, 2]


def test_the_options_say_how_many_stay_and_what_the_stub_is(tmp_path):
    """Fault: --keep, --stub or --limit is not heard; a conversation without tools or id gets some."""
    conversations = [
        {"messages": chat(calls=1)},
        {"id": 7, "messages": chat(calls=2)},
        {"id": 8, "messages": chat(1)},
    ]
    requests = transform(tmp_path, conversations, "--keep", "0", "--stub", "gone", "--limit", "2")
    assert [one["custom_id"] for one in requests] == [f"line-1#{turn}" for turn in (1, 2, 3)] + [
        f"7#{turn}" for turn in (1, 2, 3, 4)
    ]
    assert all("tools" not in one["body"] for one in requests)
    kept = [[m["content"] for m in one["body"]["messages"] if m["role"] == "tool"] for one in requests]
    assert kept == [[], ["gone"], ["gone"], [], ["gone"], ["gone", "gone"], ["gone", "gone"]]


def test_the_input_of_elide_stays_as_it_is():
    """Fault: a later turn sees the stubs of an earlier one where it should see the text."""
    messages = chat(calls=3)
    before = json.loads(json.dumps(messages))
    elide(messages, keep=1)
    assert messages == before


def test_each_assistant_turn_and_the_missing_answer_are_requests():
    """Fault: a turn after another assistant message, or the answer that is missing at the end, is lost."""
    user, answer = {"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}
    assert turn_ends([user, answer, answer]) == [1, 2]
    assert turn_ends([user, answer, user]) == [1, 3]
    assert turn_ends([]) == []


def test_a_line_that_is_no_conversation_is_named(tmp_path):
    """Fault: a broken input line is skipped silently, or ends in a traceback."""
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"messages": chat(1)}) + "\n\n" + '{"messages": 3}\n')
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(source), "-o", str(tmp_path / "out.jsonl")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "line 3 is no conversation" in done.stderr and "Traceback" not in done.stderr
