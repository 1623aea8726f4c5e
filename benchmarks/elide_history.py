"""Conversations of an agent that rewrites its history, made from recorded ones.

    python benchmarks/elide_history.py chats.jsonl -o elided.jsonl
    apcbatch run elided.jsonl -o answers.jsonl --window 10000 --window-tokens 100000000

Each assistant turn becomes a request of its own (a `batch` line, `custom_id` as `run` names the turn: `<id>#<turn>`)
whose history has all tool messages but the last few replaced by a stub; nothing else changes. Which messages are
stubs depends on the turn, so that a prompt leaves the path of the one before it at the newest stub.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, BinaryIO

import click
import orjson

KEEP = 5
STUB = "[elided]"
URL = "/v1/chat/completions"

Message = dict[str, Any]


def elide(history: list[Message], keep: int = KEEP, stub: str = STUB) -> list[Message]:
    """The history with the content of all tool messages but the last `keep` replaced; the input is not changed."""
    tools = [index for index, message in enumerate(history) if message["role"] == "tool"]
    old = set(tools[: max(0, len(tools) - keep)])
    return [{**message, "content": stub} if index in old else message for index, message in enumerate(history)]


def turn_ends(messages: list[Message]) -> list[int]:
    """How many messages each request sees: those before every assistant turn that has any, and all of them where the
    last answer is missing."""
    ends = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if messages and messages[-1]["role"] != "assistant":
        ends.append(len(messages))
    return ends


def requests_of(conversation: dict[str, Any], line: int, keep: int, stub: str) -> Iterator[dict[str, Any]]:
    """The batch lines of one conversation, in order; a turn with no history before it has no request."""
    messages = conversation["messages"]
    name = conversation.get("id", f"line-{line}")
    for turn, end in enumerate(turn_ends(messages), start=1):
        if not end:
            continue
        body = {"messages": elide(messages[:end], keep, stub)}
        if conversation.get("tools"):
            body["tools"] = conversation["tools"]
        yield {"custom_id": f"{name}#{turn}", "method": "POST", "url": URL, "body": body}


def conversations_of(lines: Iterable[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, conversation) of each line that is not blank; ClickException for any other line."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = orjson.loads(line)
            usable = all(isinstance(message["role"], str) for message in record["messages"])
        except (orjson.JSONDecodeError, KeyError, TypeError):
            usable = False
        if not usable:
            raise click.ClickException(f"line {number} is no conversation; expected an object with messages")
        yield number, record


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("input", type=click.File("rb"))
@click.option("-o", "--output", type=click.File("wb"), required=True, help="Where the requests go; - is stdout.")
@click.option("--keep", type=click.IntRange(min=0), default=KEEP, show_default=True, help="Tool messages that stay.")
@click.option("--stub", default=STUB, show_default=True, help="What the content of the others becomes.")
@click.option("--limit", type=click.IntRange(min=0), help="Stop after so many conversations.")
def main(input: BinaryIO, output: BinaryIO, keep: int, stub: str, limit: int | None) -> None:
    """Make one request of each assistant turn of INPUT, with the older tool messages of its history elided.

    INPUT has one conversation a line: {"id", "messages", "tools"?}. It is streamed.
    """
    for line, conversation in islice(conversations_of(input), limit):
        for request in requests_of(conversation, line, keep, stub):
            output.write(orjson.dumps(request, option=orjson.OPT_APPEND_NEWLINE))


if __name__ == "__main__":
    main()
