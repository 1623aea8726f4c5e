"""Targets around the input: lines, compressed lines, tables, configurations, options, and an OUT to continue from."""

from __future__ import annotations

import bz2
import copy
import gzip
import io
import json
import lzma
import shutil
from random import Random
from typing import Any

import jsonschema
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
import zstandard

from tests.fuzz.case import Case, answers
from tests.fuzz.child import Fault
from tests.fuzz.mutate import NUMBERS, TEXTS, dump_json, interesting, mutate_bytes, mutate_value, number_text

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Find an order.",
        "parameters": {"type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"]},
    },
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": '{"order": "A-17"}'}}
CONVERSATION: dict[str, Any] = {
    "id": "c-1",
    "messages": [
        {"role": "system", "content": "You help."},
        {"role": "user", "content": "Where is A-17?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": '{"state": "sent"}'},
        {"role": "assistant", "content": "It is on its way."},
        {"role": "user", "content": [{"type": "text", "text": "Thanks"}]},
    ],
    "tools": [TOOL],
}
CHAT = {
    "custom_id": "b-1",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {
        "model": "demo", "messages": CONVERSATION["messages"][:2], "max_tokens": 3, "temperature": 0.7, "top_p": 0.9,
        "seed": 3, "logprobs": True, "stream": False, "tools": [TOOL], "n": 1,
    },
}  # fmt: skip
COMPLETION = {
    "custom_id": "b-2",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"prompt": [5, 6, 7, 8], "max_tokens": 2, "temperature": 0, "logprobs": 1},
}
SHAREGPT = {
    "id": "s-1",
    "conversations": [
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "Hello"},
        {"from": "human", "value": "Bye"},
    ],
}
SETTINGS = SHAREGPT | {
    "id": "s-2", "model": "other", "max_tokens": 2, "temperature": 0.5, "n": 1, "stop": None, "reward": 0.5,
}  # fmt: skip
LINES = (CONVERSATION, CHAT, COMPLETION, SHAREGPT, SETTINGS)
RUN = ("run", "-o", "out.jsonl", "-q", "--progress", "none")


def some_lines(draw: Random, least: int = 1) -> list[dict[str, Any]]:
    """A few sound lines with ids of their own."""
    lines = [copy.deepcopy(draw.choice(LINES)) for _ in range(draw.randint(least, 5))]
    for number, line in enumerate(lines):
        line["custom_id" if "url" in line else "id"] = f"x-{number}"
    return lines


def fuzz_lines(case: Case) -> None:
    """Lines with values or bytes changed: each is answered, the sound ones among them too."""
    draw = case.draw
    written = []
    for line in some_lines(draw):
        kind = draw.randrange(4)
        if kind < 2:
            written.append(dump_json(mutate_value(draw, line, draw.randint(1, 3))))
        else:
            data = dump_json(line)
            written.append(mutate_bytes(draw, data, draw.randint(1, 3)) if kind == 2 else data)
    data = b"\n".join(written) + b"\n" * draw.randrange(2)
    case.write("in.jsonl", data)
    outcome = case.run(
        *RUN, "in.jsonl", "--no-store", "--max-tokens", "2",
        "--turns", draw.choice(("each", "last", "rollout")),
        "--policy", draw.choice(("planned", "all", "last", "none")),
        "--format", draw.choice(("auto", "auto", "auto", "messages", "batch", "sharegpt")),
    )  # fmt: skip
    case.answered_lines(data, outcome.code)


TOOLS: tuple[Any, ...] = (
    TOOL, TOOL["function"], {"foo": 1}, {"type": "web_search_preview"}, {"type": "custom", "custom": {"name": "x"}},
    {"name": "look_up", "input_schema": {"type": "object", "properties": {"a": {"enum": ["@0", "@1"]}}}},
    {"type": "custom", "name": "look_up", "input_schema": {"a": "@0"}, "cache_control": {"type": "ephemeral"}},
    {"type": "function", "name": "look_up", "parameters": {"properties": {"a": {"const": "@1"}}, "required": ["a"]}},
    {"name": "look_up", "inputSchema": {"type": "object", "minProperties": "@0"}}, {"name": "f", "paramters": {"a": 1}},
    {"function": {"name": "f", "parameters": {"query": {"type": "str"}}}}, {"functionDeclarations": [TOOL]}, {}, "f",
)  # fmt: skip
FORMS: tuple[dict[str, Any], ...] = (
    {"enum": ["@0", "@1"]}, {"const": {"a": ["@0"]}}, {"type": "integer", "minimum": "@0", "maximum": "@1"},
    {"type": "number", "minimum": "@0", "maximum": "@1"},
    {"type": "integer", "exclusiveMaximum": "@0", "minimum": "@1"},
    {"allOf": [{"type": "integer", "multipleOf": "@0"}, {"multipleOf": "@1"}], "maximum": 10**15},
)  # fmt: skip


def fuzz_numbers(case: Case) -> None:
    """Numbers of any size, in calls, schemas and settings, and tools of any shape: each line is answered, and what is
    answered in a form is valid."""
    draw = case.draw
    written, schemas = [], {}
    for number in range(draw.randint(2, 6)):
        name = f"n-{number}"
        call = {"type": "function", "function": {"name": "look_up", "arguments": {"a": "@0", "b": ["@1"]}}}
        messages = [*CONVERSATION["messages"][:2], {"role": "assistant", "tool_calls": [call]}]
        line: dict[str, Any] = {
            "id": name,
            "messages": [*messages, {"role": "tool", "content": "1e999"}],
            "max_tokens": 40,
        }
        form, way = draw.choice(FORMS), draw.randrange(4)
        if way == 0:
            line |= {"guided_json": form}
        elif way < 3:
            line |= {"tools": [draw.choice(TOOLS)], "tool_choice": draw.choice(("auto", "required"))}
        else:
            line[draw.choice(("seed", "temperature", "top_k", "max_tokens", "note"))] = "@1"
        numbers = [number_text(draw) for _ in range(2)]
        text = json.dumps(line)
        for place, one in enumerate(numbers):
            text = text.replace(f'"@{place}"', one)
        if way == 0:
            schemas[f"{name}#2"] = json.loads(text)["guided_json"]
        written.append(text.encode())
    data = b"\n".join(written) + b"\n"
    case.write("in.jsonl", data)
    outcome = case.run(*RUN, "in.jsonl", "--no-store", "--turns", "last")
    case.answered_lines(data, outcome.code)
    for record in case.records():
        if record["custom_id"] in schemas and record["error"] is None:
            [choice] = record["response"]["body"]["choices"]
            if choice["finish_reason"] == "stop":
                _check_form(json.loads(choice["message"]["content"]), schemas[record["custom_id"]])


def _check_form(value: Any, schema: Any) -> None:
    try:
        jsonschema.validate(value, schema)
    except jsonschema.ValidationError as error:
        raise Fault(f"{value} is no answer to {schema}: {error.message}") from None
    except (jsonschema.SchemaError, OverflowError):  # a step of 0 or below; too large for the oracle
        return


def fuzz_compressed(case: Case) -> None:
    """A damaged compressed file under any name, beside a sound one: what can be read is answered, packed or not."""
    draw = case.draw
    data = b"".join(dump_json(line) + b"\n" for line in some_lines(draw) * draw.choice((1, 30)))
    packed = draw.choice((gzip.compress, zstandard.compress, bz2.compress, lzma.compress))(data)
    suffix = draw.choice(("", ".gz", ".zst", ".bz2", ".xz"))
    case.write(f"in.jsonl{suffix}", mutate_bytes(draw, packed, draw.randint(1, 2)))
    case.write("sound.jsonl", dump_json(SHAREGPT) + b"\n")
    inputs = draw.choice(((f"in.jsonl{suffix}",), (f"in.jsonl{suffix}", "sound.jsonl"), ("sound.jsonl", "in.jsonl*")))
    out = draw.choice(("out.jsonl", "out.jsonl.gz"))
    case.run("run", "-o", out, *RUN[3:], *inputs, "--no-store", "--max-tokens", "1", "--turns", "last")
    if out.endswith(".gz") and (case.folder / out).exists():
        case.write("out.jsonl", gzip.decompress((case.folder / out).read_bytes()))
    case.records()


def fuzz_documents(case: Case) -> None:
    """An array or pretty-printed objects with values or bytes changed: what is whole is answered."""
    draw = case.draw
    lines: Any = some_lines(draw)
    if draw.randrange(2):
        lines = mutate_value(draw, lines, draw.randint(1, 3))
    indent = draw.choice((None, 1, 2))
    try:
        data = json.dumps(lines, indent=indent).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError, RecursionError):
        data = dump_json(lines)
    if draw.randrange(2):
        data = mutate_bytes(draw, data, draw.randint(1, 3))
    case.write("in.json", data)
    case.run(*RUN, "in.json", "--no-store", "--max-tokens", "1", "--turns", "last")
    case.records()


def fuzz_tables(case: Case) -> None:
    """A damaged parquet or arrow file."""
    draw = case.draw
    columns = {
        "id": ["a", "b", "c"],
        "messages": [[{"role": "user", "content": text}] for text in ("one", "two", "three")],
        "note": draw.choice(([1, None, 3], ["x", "y", None], [b"\xff", b"", None])),
    }
    table = pa.table(columns)
    buffer = io.BytesIO()
    suffix = draw.choice((".parquet", ".arrow"))
    if suffix == ".parquet":
        pq.write_table(table, buffer, compression=draw.choice(("none", "snappy", "zstd", "gzip")))
    else:
        with pa.ipc.new_stream(buffer, table.schema) as writer:
            writer.write_table(table)
    case.write(f"in{suffix}", mutate_bytes(draw, buffer.getvalue(), draw.randint(1, 3)))
    case.run(*RUN, f"in{suffix}", "--no-store", "--max-tokens", "1")
    case.records()


WRONG_KINDS = (
    b"id,words\n1,how\n", b"id\twords\n1\thow\n", b"prompt,id\nhi,1\n\"a\nb\",2\n", b"messages\tmax_tokens\nhi\t5\n",
    b"GGUF\x03\0\0\0", b"SQLite format 3\0", b"PK\x03\x04", b"- messages:\n  - role: user\n", b"", b"\n\n", b"[]",
    b'{"data": [{"messages": []}]}', "{}\n".encode("utf-16"), "prompt\n".encode("utf-16-le"), b"<p>hi\n",
)  # fmt: skip


def fuzz_kinds(case: Case) -> None:
    """A file of another kind, changed, repeated or beside a sound one: a sentence, or an answer to each line."""
    draw = case.draw
    data = draw.choice(WRONG_KINDS) * draw.choice((1, 1, 98, 200))
    data = mutate_bytes(draw, data, draw.randint(1, 3)) if data and draw.randrange(2) else data
    case.write("in.jsonl", data)
    case.write("sound.jsonl", dump_json(SHAREGPT) + b"\n")
    inputs = draw.choice((("in.jsonl",), ("in.jsonl",), ("sound.jsonl", "in.jsonl"), ("in.jsonl", "sound.jsonl")))
    column = draw.choice(((), (), ("--prompt-column", "words"), ("--id-column", "id")))
    command = draw.choice((RUN, ("plan",), ("show",)))
    outcome = case.run(*command, *inputs, *column)
    if outcome.code in (0, 3) and command == RUN and not case.records():
        raise Fault(f"exit code {outcome.code}, and no record")


MESSAGES = CONVERSATION["messages"]
BLOCKS = [
    {"role": "user", "content": "Where is A-17?"},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "so"},
        {"type": "tool_use", "id": "1", "name": "look_up", "input": {"order": "A-17"}},
    ]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "x"}]},
    ]},
    {"role": "assistant", "content": None, "refusal": "no"},
    {"role": "user", "content": "Why?"},
]  # fmt: skip
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"conversation": MESSAGES}, {"conversations": MESSAGES}, {"traj": MESSAGES}, {"messages": json.dumps(MESSAGES)},
    {"prompt": "Hi", "chosen": "Hello"}, {"prompt": MESSAGES[:2], "chosen": MESSAGES[:3]}, {"messages": BLOCKS},
    {"input": "Hi", "target": "Hello"}, {"conversation": SHAREGPT["conversations"]}, {"dialog": MESSAGES, "n": 3},
    {"messages": MESSAGES, "tools": json.dumps([TOOL])},
)  # fmt: skip


def fuzz_layouts(case: Case) -> None:
    """Lines as other tools lay them out, with values or bytes changed: each is answered, or all are refused at once."""
    draw = case.draw
    lines = [copy.deepcopy(draw.choice(LAYOUTS)) | {"id": f"x-{number}"} for number in range(draw.randint(1, 5))]
    written = [dump_json(mutate_value(draw, line, draw.randint(0, 3))) for line in lines]
    data = b"\n".join(mutate_bytes(draw, one, 1) if not draw.randrange(5) else one for one in written)
    case.write("in.jsonl", data)
    column = draw.choice(((), (), ("--messages-column", "dialog"), ("--tools-column", "tools", "--id-column", "n")))
    prompt = draw.choice(((), ("--system-prompt", "Be brief.")))
    outcome = case.run(
        *RUN, "in.jsonl", "--no-store", "--max-tokens", "2", "--turns", draw.choice(("each", "last", "rollout")),
        *column, *prompt,
    )  # fmt: skip
    case.answered_lines(data, outcome.code)


CONFIG: dict[str, Any] = {
    "max_tokens": 2, "block_size": 16, "policy": "planned", "window_tokens": 800, "max_running": 4,
    "max_batch_tokens": 256,
    "temperature": 0.5, "top_p": 0.9, "seed": 1, "limit": 2, "pool_size": "32MiB", "min_gain_tokens": 4,
    "turns": "each", "order": "auto", "summary": "summary.json", "ignore_eos": True, "logprobs": False, "store": "kept",
    "store_size": "1MiB", "dtype": "float32", "draft": "history,lookup", "draft_memory": "1MiB",
}  # fmt: skip


def fuzz_yaml(case: Case) -> None:
    """A configuration with other values, or other bytes."""
    draw = case.draw
    if draw.randrange(3):
        value = copy.deepcopy(CONFIG)
        for _ in range(draw.randint(1, 3)):
            value[draw.choice(list(CONFIG))] = interesting(draw)
        data = dump_json(value) if draw.randrange(2) else _yaml(value)
    else:
        data = mutate_bytes(draw, yaml.safe_dump(CONFIG).encode(), draw.randint(1, 4))
    case.write("c.yaml", data)
    case.write("in.jsonl", dump_json(SHAREGPT) + b"\n")
    case.run(*RUN, "in.jsonl", "--config", "c.yaml")
    case.records()


def _yaml(value: Any) -> bytes:
    try:
        return yaml.safe_dump(value).encode("utf-8", "surrogatepass")
    except (RecursionError, yaml.YAMLError):
        return dump_json(value)


OPTIONS = (
    "max-tokens", "block-size", "window-tokens", "max-running", "max-batch-tokens", "temperature", "top-p", "seed",
    "limit",
    "pool-size", "store-size", "min-gain-tokens", "policy", "turns", "order", "summary", "format", "model", "dtype",
    "draft", "draft-from", "draft-memory",
)  # fmt: skip
SIZES = ("0", "1", "1KiB", "1e3", "5 parsecs", "999999TiB", "-1GiB", "16MiB", "99999999999999999999999999")


def fuzz_options(case: Case) -> None:
    """Options with meaningless values; files go nowhere but into the folder."""
    draw = case.draw
    arguments = []
    for name in draw.sample(OPTIONS, draw.randint(1, 3)):
        value = draw.choice((*SIZES, str(draw.choice(NUMBERS)), draw.choice(TEXTS)))
        arguments += [f"--{name}", value.replace("\0", "").replace("\ud800", "?").replace("/", "_")]
    case.write("in.jsonl", b"".join(dump_json(line) + b"\n" for line in some_lines(draw)))
    command = draw.choice(("run", "run", "plan"))
    if command == "run":
        case.run(*RUN, "in.jsonl", "--store", "kept", *arguments)
        case.records()
    else:
        case.run("plan", "in.jsonl", *arguments)


def fuzz_resume(case: Case) -> None:
    """An OUT or a run file that somebody edited: it is refused, or each request has one line in the end."""
    draw = case.draw
    data = b"".join(dump_json(line) + b"\n" for line in some_lines(draw, 2))
    case.write("in.jsonl", data)
    arguments = (*RUN, "in.jsonl", "--no-store", "--max-tokens", "2")
    case.run(*arguments)
    name = draw.choice(("out.jsonl", "out.jsonl", "out.jsonl.run.json"))
    edited = (case.folder / name).read_bytes()
    if draw.randrange(2):
        lines = edited.splitlines()
        number = draw.randrange(len(lines)) if name == "out.jsonl" else 0
        value = json.loads(lines[number] if name == "out.jsonl" else edited)
        changed = dump_json(mutate_value(draw, value, draw.randint(1, 2)))
        edited = b"\n".join([*lines[:number], changed, *lines[number + 1 :]]) + b"\n" if len(lines) > 1 else changed
    else:
        edited = mutate_bytes(draw, edited, draw.randint(1, 2))
    case.write(name, edited)
    case.run(*arguments, draw.choice(("--resume", "--resume", "--retry-errors")), expect=(0, 1, 2, 3))


def fuzz_drafts(case: Case) -> None:
    """Earlier answers that somebody damaged, with --draft-from: each request is answered as without them. A field
    `draft` that is neither true nor false is an error of its own line."""
    draw = case.draw
    lines, wrong = some_lines(draw, 2), set()
    for number, line in enumerate(lines, start=1):
        if draw.randrange(2):
            line.get("body", line)["draft"] = value = draw.choice((True, False, interesting(draw), interesting(draw)))
            if value is not None and not isinstance(value, bool):
                wrong.add(number)
    case.write("in.jsonl", b"".join(dump_json(line) + b"\n" for line in lines))
    arguments = ("run", *RUN[3:], "in.jsonl", "--no-store", "--max-tokens", "9", "--turns", "each")
    case.run(*arguments, "-o", "old.jsonl", "--draft", "none", expect=(0, 3))
    expected = answers(case.records("old.jsonl"))
    name = draw.choice(("old.jsonl", "old.jsonl", "old.jsonl", "old.jsonl.run.json"))
    damaged = (case.folder / name).read_bytes()
    if draw.randrange(2):
        parts = [json.loads(part) for part in (damaged.splitlines() if name == "old.jsonl" else [damaged])]
        damaged = b"\n".join(dump_json(mutate_value(draw, part, draw.randrange(4))) for part in parts) + b"\n"
    else:
        damaged = mutate_bytes(draw, damaged, draw.randint(1, 4))
    case.write(name, damaged)
    earlier = "old.jsonl"
    if not draw.randrange(4):
        pack = draw.choice((gzip.compress, zstandard.compress, bz2.compress, lzma.compress))
        packed = pack((case.folder / earlier).read_bytes())
        case.write("old.gz", mutate_bytes(draw, packed, 1) if draw.randrange(2) else packed)
        shutil.copyfile(case.folder / "old.jsonl.run.json", case.folder / "old.gz.run.json")
        earlier = "old.gz"
    sources = draw.choice((("--draft", "previous"), ("--draft", "lookup,history"), ()))
    memory = draw.choice((("--draft-memory", "0"), ("--draft-memory", "2KiB"), ()))
    drafts = ("--draft-from", earlier, *sources, *memory)
    case.run(*arguments, "-o", "out.jsonl", *drafts, expect=(0, 3))
    records = case.records()
    if answers(records) != expected:
        raise Fault("the answers are not those of the run without drafts")
    if not wrong <= {record["line"] for record in records if record["error"] is not None}:
        raise Fault(f"a `draft` of another type was taken in one of the lines {sorted(wrong)}")
