"""Lines of other tools, tables with a header and columns by name: each becomes the conversation that it holds."""

from __future__ import annotations

import csv
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from apcbatch.data.conversation import BadLine, Conversation
from apcbatch.data.input.delimited import header_of
from apcbatch.data.input.layouts import ANY_LINE, LineOptions
from apcbatch.data.input.records import parse_line
from apcbatch.data.input.source import open_source
from apcbatch.errors import UsageError
from tests.effort import table

USER, BOT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
CHAT = [USER, BOT]
SPOKEN = [{"from": "human", "value": "hi"}, {"from": "chatgpt", "value": "ho"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "42"}


def read(record: object, options: LineOptions = ANY_LINE) -> Conversation:
    found = parse_line(json.dumps(record).encode(), 1, options)
    assert isinstance(found, Conversation), found
    return found


LAYOUTS: list[tuple[dict[str, Any], list[dict[str, Any]], str | None]] = [
    ({"messages": CHAT, "conversation": [USER], "prompt": "no"}, CHAT, None),
    ({"messages": json.dumps(CHAT)}, CHAT, None),
    ({"messages": None, "conversation": CHAT}, CHAT, 'messages from "conversation"'),
    ({"conversation": CHAT, "prompt": "no"}, CHAT, 'messages from "conversation"'),
    ({"conversation": SPOKEN}, CHAT, 'messages from "conversation"'),
    ({"conversation": json.dumps(CHAT)}, CHAT, 'messages from "conversation"'),
    ({"conversations": CHAT}, CHAT, 'messages from "conversations"'),
    ({"conversations": json.dumps(CHAT)}, CHAT, 'messages from "conversations"'),
    ({"conversations": SPOKEN}, CHAT, None),
    ({"traj": CHAT, "reward": 1.0, "task_id": 3}, CHAT, 'messages from "traj"'),
    ({"prompt": [USER], "chosen": [BOT]}, CHAT, 'messages from "prompt", the recorded answer from "chosen"'),
    ({"prompt": "hi", "chosen": "ho"}, CHAT, 'one user message from "prompt", the recorded answer from "chosen"'),
    ({"prompt": "hi", "chosen": CHAT}, CHAT, 'one user message from "prompt", the recorded answer from "chosen"'),
    ({"prompt": [USER], "completion": [BOT]}, CHAT, 'messages from "prompt", the recorded answer from "completion"'),
    ({"prompt": [USER]}, [USER], 'messages from "prompt"'),
    ({"prompt": "hi", "chosen": [{"role": "user", "content": "other"}]}, [USER], 'one user message from "prompt"'),
    ({"input": "hi", "target": "ho"}, [USER], 'one user message from "input"'),
    ({"input": [USER], "target": ["ho"], "id": 7}, [USER], 'messages from "input"'),
]


@table("record, messages, reading", LAYOUTS)
def test_each_layout_is_found(record: dict[str, Any], messages: object, reading: str | None) -> None:
    """Fault: a data set as it is published is an error record for each line; or a guess is silent."""
    found = read(record)
    assert (found.messages, found.reading) == (messages, reading)
    assert not {"chosen", "completion"} & {*found.columns} or "answer" not in str(reading), "what is read is no column"
    assert found.id == str(record.get("id", "line-1"))


def test_tools_are_read_as_text() -> None:
    """Fault: a line that holds its tools as JSON text is refused where a parquet row with them is read."""
    assert read({"messages": CHAT, "tools": json.dumps([TOOL])}).tools == [TOOL]
    assert read({"prompt": "hi", "tools": json.dumps([TOOL])}).text is None, "a text with tools is a chat"
    assert all(read({"messages": CHAT, "tools": none}).tools is None for none in ("", None, []))


COLUMNS: list[tuple[LineOptions, dict[str, Any], list[dict[str, Any]]]] = [
    (LineOptions("messages", messages="dialog"), {"dialog": CHAT, "messages": "no"}, CHAT),
    (LineOptions("messages", messages="dialog"), {"dialog": json.dumps(SPOKEN)}, CHAT),
    (LineOptions("messages", prompt="q"), {"q": "hi", "messages": CHAT}, [USER]),
    (LineOptions("messages", prompt="q"), {"q": CHAT}, CHAT),
    (LineOptions("messages", tools="functions"), {"messages": CHAT, "functions": [TOOL]}, CHAT),
    (LineOptions("messages", id="n", tools="functions"), {"prompt": "hi", "n": 5, "functions": None}, [USER]),
]


@table("options, record, messages", COLUMNS)
def test_columns_are_named(options: LineOptions, record: dict[str, Any], messages: object) -> None:
    """Fault: what an option names is not what is read."""
    found = read(record, options)
    assert found.messages == messages and found.reading
    assert found.tools == ([TOOL] if record.get("functions") else None)
    assert found.id == ("5" if options.id else "line-1")


@table("options, record, sentence", [
    (LineOptions("messages", messages="d"), {"e": CHAT}, 'the column "d" is missing from the line; its keys are "e"'),
    (LineOptions("messages", prompt="d"), {"d": None}, 'the column "d" is null in the line'),
    (LineOptions("messages", prompt="d"), {"d": 5}, "d is 5; expected a text or a list of messages"),
    (LineOptions("messages", id="d"), {"messages": CHAT}, 'the column "d" is missing from the line'),
    (LineOptions("messages", messages="d", id="d"), {"d": CHAT}, "id is a list; expected a string"),
    (LineOptions("messages", tools="d"), {"messages": CHAT}, 'the column "d" is missing from the line'),
    (ANY_LINE, {"dialog": CHAT}, 'rename "dialog" to "messages", or give --messages-column dialog'),
    (ANY_LINE, {"my talk": SPOKEN}, "--messages-column 'my talk'"),
    (ANY_LINE, {"n": 1, "question": "how?"}, 'if "question" is what the user says, give --prompt-column question'),
    (ANY_LINE, {"data": [{"messages": CHAT}, 7]}, "write them one a line, as jq -c '.data[]' does"),
    (ANY_LINE, {"q": "a"}, "if one of them is all that the user says, give --prompt-column with its name"),
    (ANY_LINE, {"my request": {"messages": CHAT}}, "as jq -c '.[\"my request\"]' does"),
])  # fmt: skip
def test_a_refusal_ends_with_the_fix(options: LineOptions, record: object, sentence: str) -> None:
    """Fault: the error says what is wrong, and not what to type."""
    found = parse_line(json.dumps(record).encode(), 1, options)
    assert isinstance(found, BadLine) and sentence in found.error.message


PLAIN = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT]
FLAT = {"id": "1", "name": "f", "arguments": {"a": 1}}
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
BODY = {"model": "m", "messages": [USER], "max_tokens": 5}
READ_AS_THEY_ARE: list[tuple[str, dict[str, Any], list[dict[str, Any]]]] = [
    ("Together, Mistral, Fireworks", {"custom_id": "1", "body": BODY}, [USER]),
    ("Azure", {"custom_id": "1", "method": "POST", "url": "/chat/completions", "body": BODY}, [USER]),
    ("Anthropic", {"custom_id": "1", "params": BODY}, [USER]),
    ("Anthropic's system",
     {"custom_id": "1", "params": BODY | {"system": [{"type": "text", "text": "s"}], "stop_sequences": ["x"]}},
     [{"role": "system", "content": "s"}, USER]),
    ("flat calls", {"messages": [USER, {"role": "assistant", "tool_calls": [FLAT]}, RESULT]}, PLAIN),
    ("function_call",
     {"messages": [USER,
          {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}},
          {"role": "function", "name": "f", "content": "42"}], "functions": [FUNCTION]},
     [USER, {"role": "assistant", "content": "", "tool_calls": [{key: CALL[key] for key in ("type", "function")}]},
      {"role": "tool", "content": "42", "name": "f"}]),
    ("parts with value", {"messages": [{"role": "user", "content": [{"type": "text", "value": "hi"}]}]}, [USER]),
    ("text for content", {"messages": [{"role": "user", "text": "hi"}]}, [USER]),
    ("xLAM", {"id": 1, "query": "hi", "tools": json.dumps([FUNCTION]), "answers": "[]"}, [USER]),
    ("ShareGPT", {"id": "1", "conversations": SPOKEN}, CHAT),
    ("preference pairs of TRL", {"prompt": "hi", "chosen": "ho", "rejected": "no"}, CHAT),
]  # fmt: skip


@table("name, record, messages", READ_AS_THEY_ARE)
def test_public_layouts_are_read_as_they_are(name: str, record: dict[str, Any], messages: object) -> None:
    """Fault: a file that another service or tool takes needs a script first."""
    found = read(record)
    assert found.messages == messages and found.warnings == ()
    assert found.tools == ([{"type": "function", "function": FUNCTION}] if "functions" in record else found.tools)
    assert found.custom_id == record.get("custom_id")
    settings = record.get("params", {})
    assert found.params.get("stop") == (("x",) if "stop_sequences" in settings else None)


@table(
    "choice, expected",
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any", "disable_parallel_tool_use": True}, "required"),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
        ({"type": "none"}, "none"),
    ],
)
def test_the_tool_choice_of_anthropic_is_that_of_openai(choice: dict[str, Any], expected: object) -> None:
    """Fault: a request that must call a tool is answered with a text."""
    settings = {"tools": [{"name": "f", "input_schema": {"type": "object"}}], "max_tokens": 5}
    theirs = read({"custom_id": "1", "params": {**settings, "messages": [USER], "tool_choice": choice}})
    settings["parallel_tool_calls"] = None if choice["type"] != "any" else False
    ours = read({"custom_id": "1", "body": {**settings, "messages": [USER], "tool_choice": expected}})
    assert (theirs.tools, theirs.params, theirs.one_call) == (ours.tools, ours.params, ours.one_call)


LONG = "a text that is longer than any other one here"
EVENT = {"uuid": LONG, "sessionId": "s", "type": "user", "message": {"role": "user", "content": "hi"}}
NAMED: list[tuple[str, dict[str, Any], str]] = [
    ("ATIF",
     {"schema_version": "ATIF-v1.4", "session_id": LONG, "steps": [{"step_id": 1, "source": "user", "message": "hi"}]},
     'write its "steps"'),
    ("Gemini", {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}, "jq -c '{messages:"),
    ("Gemini", {"key": LONG, "request": {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}}, "jq -c"),
    ("Bedrock", {"recordId": LONG, "modelInput": {"anthropic_version": "b", **BODY}}, "jq -c '{custom_id: .recordId"),
    ("Bedrock", {"recordId": LONG, "modelInput": {"inputText": "hi"}}, 'write its "messages"'),
    ("Responses", {"custom_id": LONG, "method": "POST", "url": "/v1/responses", "body": {"model": "m", "input": "hi"}},
     'write its "input" as "messages"'),
    ("Responses", {"model": LONG, "input": "hi", "instructions": "s"}, 'write its "input"'),
    ("Responses", {"instructions": "s", "input": [USER]}, 'write its "input"'),
    ("coding agent", EVENT, "jq -cs '{messages:"),
    ("coding agent", {"type": "summary", "summary": LONG, "leafUuid": "u"}, "as one line"),
    ("coding agent", {"timestamp": LONG, "type": "response_item", "payload": {"role": "user"}}, "as one line"),
    ("answer of a batch", {"id": LONG, "custom_id": "1", "response": {"body": {}}, "error": None}, "its requests"),
    ("answer of a batch", {"id": LONG, "custom_id": "1", "response": None, "error": {"code": "c"}}, "its requests"),
    ("answer of a batch", {"custom_id": LONG, "result": {"type": "succeeded"}}, "its requests"),
    ("answer of a batch", {"id": LONG, "object": "chat.completion", "choices": [{"message": BOT}]}, "its requests"),
    ("oasst", {"message_tree_id": LONG, "prompt": {"text": "hi", "role": "prompter", "replies": []}}, "each path"),
    ("oasst", {"message_tree_id": LONG, "parent_id": None, "text": "hi", "role": "prompter"}, "each path"),
    ("one message", USER, "jq -cs '{messages: .}'"),
    ("one message", SPOKEN[0], "jq -cs '{conversations: .}'"),
    ("preference pair", {"chosen": f"\n\nHuman: hi\n\nAssistant: {LONG}", "rejected": "no"}, 'prompt as "prompt"'),
    ("preference pair", {"chosen": CHAT, "rejected": CHAT, "source": LONG}, "--messages-column chosen"),
    ("Alpaca", {"instruction": "Translate.", "input": "hi", "output": LONG}, "jq -c '. + {prompt:"),
    ("Dolly", {"instruction": "Translate.", "context": LONG, "response": "ho"}, "jq -c '. + {prompt:"),
]  # fmt: skip


@table("name, record, way", NAMED)
def test_known_formats_are_named_with_the_way(name: str, record: dict[str, Any], way: str) -> None:
    """Fault: the longest text of a line, such as its id, is proposed as the prompt, and the run answers nonsense."""
    found = parse_line(json.dumps(record).encode(), 1)
    assert isinstance(found, BadLine)
    message = found.error.message
    assert name in message and way in message and "--prompt-column" not in message


SAMPLE = {
    "system": "s",
    "contents": [{"role": "user", "parts": [{"text": "hi"}]}, {"role": "model", "parts": [{"text": "ho"}]}],
}


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not here")
@table("record, messages", [
    (SAMPLE, CHAT), ({"request": SAMPLE}, CHAT),
    ({"recordId": "1", "modelInput": {"anthropic_version": "b", **BODY}}, [USER]),
    (EVENT, [USER]), (USER, [USER]), (SPOKEN[0], [USER]),
    ({"instruction": "h", "input": "i", "output": "o"}, [{"role": "user", "content": "h\n\ni"}]),
    ({"instruction": "hi", "input": "", "output": "o"}, [USER]),
    ({"instruction": "h", "context": "i", "response": "o"}, [{"role": "user", "content": "h\n\ni"}]),
    ({"data": [{"messages": CHAT}]}, CHAT), ({"my request": {"messages": CHAT}}, CHAT),
])  # fmt: skip
def test_the_proposed_command_gives_the_text_of_the_user(record: dict[str, Any], messages: object) -> None:
    """Fault: advice that is followed fails, or answers another text than the user's with exit status 0."""
    found = parse_line(json.dumps(record).encode(), 1)
    assert isinstance(found, BadLine)
    [command] = re.findall(r"jq (-\w+) (.*) does", found.error.message)
    done = subprocess.run(
        ["jq", command[0], *shlex.split(command[1])], input=json.dumps(record).encode(), capture_output=True
    )
    converted = parse_line(done.stdout, 1)
    assert isinstance(converted, Conversation), (done.stderr, converted)
    assert converted.messages == messages


@table("record", [
    {"custom_id": LONG, "n": 1}, {"instance_id": LONG, "answer": "no"}, {"context": LONG, "question": "why?"},
    {"system_prompt": "s", "question": LONG},
    {"question": "which?", "choices": ["a", "b"]},
    {"text": f"### Human: hi\n### Assistant: {LONG}"},
    {"text": "<|im_start|>user\nhi<|im_end|>"}, {"question": "a", "query": "b"}, {"question": ["a"], "category": LONG},
])  # fmt: skip
def test_no_column_is_proposed_that_may_be_another_text(record: dict[str, Any]) -> None:
    """Fault: an id, or a part of the prompt, is proposed as the prompt."""
    found = parse_line(json.dumps(record).encode(), 1)
    assert isinstance(found, BadLine) and not re.search("--prompt-column (?!with)", found.error.message)


@table("name", ["chosen", "rejected", "completion", "id", "prompt"])
@table("text", ["hi", [USER]])
def test_any_column_may_be_the_prompt(name: str, text: object) -> None:
    """Fault: a column that holds an answer elsewhere ends the run with an internal error."""
    found = read({name: text, "other": 1}, LineOptions("messages", prompt=name))
    assert found.messages == [USER]


BLOCKS: list[tuple[list[Any], list[Any]]] = [
    (
        [
            USER,
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "so"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "42"}]},
                {"type": "text", "text": "hi"},
            ]},
        ],
        [USER, {"role": "assistant", "content": "so", "tool_calls": [CALL], "reasoning_content": "hm"}, RESULT, USER],
    ),
    (
        [USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}]}],
        [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}],
    ),
    (
        [{"role": "user", "name": "n", "content": [
            {"type": "text", "text": "hi"},
            {"type": "tool_result", "tool_use_id": "1", "content": "42"},
        ]}],
        [{**USER, "name": "n"}, RESULT],
    ),
    (
        [USER, {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1"}, {"type": "tool_result", "tool_use_id": "1", "content": "42"},
        ]}],
        [USER, RESULT | {"content": ""}, RESULT],
    ),
    (
        [USER, {"role": "assistant", "content": [{"type": "reasoning", "reasoning": "hm"}], "source": "generate",
                "tool_calls": [{"id": "1", "type": "function", "function": "f", "arguments": {"a": 1}}]}],
        [USER, {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "hm"}],
    ),
]  # fmt: skip


@table("messages, expected", BLOCKS)
def test_blocks_become_messages(messages: list[Any], expected: list[Any]) -> None:
    """Fault: a history of Anthropic's or Inspect's is refused for its blocks, or loses a call or a result."""
    found = read({"messages": messages})
    assert found.messages == expected and {warning.kind for warning in found.warnings} <= {"tool_results"}


@table("kind", [{"a": 1}, ["tool_use"], 7, None])
@table("beside", [[], [{"type": "thinking", "thinking": "hm"}]])
def test_a_block_of_no_known_type_is_an_error_record(kind: object, beside: list[Any]) -> None:
    """Fault: a type that is no text, here or beside a block that is known, ends the whole run."""
    message = {"role": "assistant", "content": [*beside, {"type": kind, "text": "x"}]}
    found = parse_line(json.dumps({"messages": [USER, message]}).encode(), 1)
    assert isinstance(found, BadLine) and "messages[1].content" in found.error.message


def test_what_a_block_says_and_nobody_reads_is_named() -> None:
    """Fault: a failed call or a hidden thought goes without a word; an image is taken for a text."""
    failed = {"type": "tool_result", "tool_use_id": "1", "content": "no", "is_error": True}
    hidden = {"type": "redacted_thinking", "data": "x"}
    messages = [USER, {"role": "assistant", "content": [hidden]}, {"role": "user", "content": [failed]}]
    warning, without_call = read({"messages": messages}).warnings
    assert without_call.kind == "tool_results"
    assert '"redacted_thinking" (first in messages[1])' in warning and '"is_error"' in warning
    image = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image", "source": {}}]}
    found = parse_line(json.dumps({"messages": [{"role": "user", "content": [image]}]}).encode(), 1)
    assert isinstance(found, BadLine) and "only text can be read" in found.error.message


@table(
    "message, sentence",
    [
        ({"content": None}, "messages[1].content is null: rendered as an empty text"),
        ({"content": None, "refusal": "no"}, "the template is given its refusal"),
        ({"refusal": "no"}, "the template is given its refusal"),
        ({"refusal": "no", "content": "so"}, "messages[1].refusal stands beside content; the template is given both"),
    ],
)
def test_an_answer_without_content_is_history(message: dict[str, Any], sentence: str) -> None:
    """Fault: OpenAI's own history, after a refusal, is refused as a whole."""
    found = read({"messages": [USER, {"role": "assistant", **message}, USER]})
    assert found.messages[1] == {"role": "assistant", "content": "", **{k: v for k, v in message.items() if v}}
    assert len(found.warnings) == 1 and sentence in found.warnings[0]


def test_a_system_prompt_is_for_lines_without_one() -> None:
    """Fault: a line's own system message is doubled, or a line goes without."""
    options = LineOptions(system_prompt="Be brief.")
    system = {"role": "system", "content": "Be brief."}
    assert read({"messages": CHAT}, options).messages == [system, *CHAT]
    assert read({"conversations": SPOKEN}, options).messages == [system, *CHAT]
    own = {"role": "system", "content": "Be long."}
    assert read({"messages": [own, USER]}, options).messages == [own, USER]
    prompt = read({"prompt": "hi"}, options)
    assert prompt.messages == [system, USER] and prompt.text is None


@table(
    "data, options, expected",
    [
        (b"id,prompt\r\na,hi\r\nb,\"h,\"\"i\n there\"\r\n", ANY_LINE, [("a", "hi"), ("b", 'h,"i\n there')]),
        (b"\xef\xbb\xbfprompt\tid\nhi, you\ta\n\nho\tb\n", ANY_LINE, [("a", "hi, you"), ("b", "ho")]),
        (b"prompt\nhi\nho\n", ANY_LINE, [("line-1", "hi"), ("line-2", "ho")]),
        (b"q,n\nhi,7\n", LineOptions("messages", prompt="q", id="n"), [("7", "hi")]),
        (b'messages,max_tokens\n"[{""role"": ""user"", ""content"": ""hi""}]",5\n', ANY_LINE, [("line-1", "hi")]),
        (b"id,prompt\na,\"h\xc3\xa9\n\"\n", ANY_LINE, [("a", "h\u00e9\n")]),
        (b"prompt,tools\nhi,[no\n", ANY_LINE, ["tools is \"[no\"; expected a list of tool schemas"]),
        (b"prompt\nhi\n" + b"x" * 999 + b"\na\n", ANY_LINE, [("line-1", "hi"), ("line-2", "x" * 999), ("line-3", "a")]),
        (b"prompt\nhi\n" + b"x" * 1000 + b"\n", ANY_LINE, [("line-1", "hi"), "a row holds more than 1,000 bytes"]),
        (b"prompt\n" + b"x" * 999 + b"\n", ANY_LINE, [("line-1", "x" * 999)]),
        (b"id,prompt\na,hi,no\nb\nc,\xff\nd,ho\n", ANY_LINE, ["has 3 values", "has 1 values", "UTF-8", ("d", "ho")]),
        (b'prompt\nhi\n"no end\n' + b"x\n" * 900, ANY_LINE, [("line-1", "hi"), "cannot be read further after row 1"]),
    ],
)  # fmt: skip
def test_a_table_with_a_header_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, options: LineOptions, expected: Any
) -> None:
    """Fault: CSV and TSV are refused; a cell loses a quote, a line end or its blanks; a ragged row shifts its cells."""
    (tmp_path / "in.txt").write_bytes(data)
    monkeypatch.setattr("apcbatch.data.input.source.MAX_LINE_BYTES", 1000)
    for record, one in zip(open_source(str(tmp_path / "in.txt"), options), expected, strict=True):
        if isinstance(record, BadLine):
            assert one in record.error.message
        else:
            assert (record.id, record.messages[0]["content"]) == one
            assert record.params == ({"max_tokens": 5} if b"max_tokens" in data else {})


def test_columns_exclude_other_formats() -> None:
    """Fault: LLM takes columns that it cannot honour."""
    from apcbatch.resolution import resolve

    with pytest.raises(UsageError, match="tools_column is for lines of the format messages"):
        LineOptions.of(resolve({}, {}, {"tools_column": "t", "format": "batch"}, "LLM"))


def test_the_file_of_a_system_prompt_has_at_most_a_mib(tmp_path: Path) -> None:
    """Fault: a file of any size goes before each conversation, or one is refused at the bound."""
    from apcbatch.resolution import resolve

    path = tmp_path / "prompt"
    given = resolve({}, {}, {"system_prompt": f"@{path}"}, "LLM")
    path.write_bytes(b"x" * (1 << 20))
    assert LineOptions.of(given).system_prompt == "x" * (1 << 20)
    path.write_bytes(b"x" * (1 << 20) + b"\n")
    with pytest.raises(UsageError, match="it holds more than 1,048,576 bytes"):
        LineOptions.of(given)


@table("line", [b"", b"\xffid,prompt", b"id\rprompt", b' {"prompt": 1}', b"[prompt"])
def test_what_is_no_header_is_no_table(line: bytes) -> None:
    """Fault: a first line that is no text, or is JSON, ends the run or makes columns."""
    assert header_of(line) is None


def test_a_long_cell_is_read(tmp_path: Path) -> None:
    """Fault: a conversation of more than the 128 KiB that Python's reader takes by default ends the table."""
    csv.field_size_limit(1 << 17)
    (tmp_path / "in.csv").write_bytes(b"prompt\n" + b"x" * 140_000)
    [record] = open_source(str(tmp_path / "in.csv"))
    assert isinstance(record, Conversation) and len(record.messages[0]["content"]) == 140_000
