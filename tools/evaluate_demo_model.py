#!/usr/bin/env python3
"""How good answers are: python tools/evaluate_demo_model.py INPUT OUT, the file that was answered and its answers.

OUT is what `apcbatch run INPUT` has written. Each answer is compared with the turn that the conversation has at its
place.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator, ValidationError

Call = tuple[str, dict[str, Any]]  # name, arguments


@dataclass
class Counts:
    """Of the answers of one domain. Those of calls count only turns where the recorded turn calls a tool."""

    answers: int = 0
    ended: int = 0  # by themselves
    same_text: int = 0  # where the recorded turn calls nothing: the very words
    texts: int = 0
    call_turns: int = 0
    valid: int = 0  # every call parses, names a tool of the conversation and fits its schema; there is at least one
    right_tools: int = 0  # the recorded names in the recorded order
    exact: int = 0  # the recorded names and arguments
    arguments: int = 0  # recorded arguments of turns with the right tools
    right_arguments: int = 0
    needless: int = 0  # calls where the recorded turn calls nothing

    def add(self, other: Counts) -> None:
        """Add the counts of another domain."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


def calls_of(message: dict[str, Any]) -> list[Call] | None:
    """The calls of an assistant's message; None if one of them is no call with an object of arguments."""
    calls = []
    for call in message.get("tool_calls") or []:
        function = call.get("function") or {}
        arguments = function.get("arguments")
        try:
            parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        except ValueError:
            return None
        if not isinstance(parsed, dict):
            return None
        calls.append((str(function.get("name")), parsed))
    return calls


def fits(calls: list[Call], tools: list[dict[str, Any]]) -> bool:
    """Whether every call names a tool and its arguments fit the tool's schema."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    try:
        for name, arguments in calls:
            Draft202012Validator(schemas[name]).validate(arguments)
    except (KeyError, ValidationError):
        return False
    return True


def compare(recorded: dict[str, Any], tools: list[dict[str, Any]], choice: dict[str, Any]) -> Counts:
    """The counts of one answer; choice: the first of the answer's body."""
    message, ended = choice["message"], choice["finish_reason"] != "length"
    wanted, got = calls_of(recorded) or [], calls_of(message)
    has_tags = "<tool_call>" in (message.get("content") or "")  # a call that did not parse stays in the text
    counts = Counts(answers=1, ended=int(ended))
    if not wanted:
        counts.texts = 1
        counts.same_text = int(not got and (message.get("content") or "") == (recorded.get("content") or ""))
        counts.needless = int(bool(got) or has_tags)
        return counts
    counts.call_turns = 1
    if not got or has_tags or not fits(got, tools):
        return counts
    counts.valid = 1
    if [name for name, _ in got] == [name for name, _ in wanted]:
        counts.right_tools = 1
        counts.exact = int(got == wanted)
        for (_, arguments), (_, given) in zip(wanted, got, strict=True):
            counts.arguments += len(arguments)
            counts.right_arguments += sum(given.get(key) == value for key, value in arguments.items())
    return counts


def compared(records: dict[str, dict[str, Any]], answers: Iterator[dict[str, Any]]) -> dict[str, Counts]:
    """The counts by domain (the id up to its first hyphen), of all answers to a recorded turn."""
    found: dict[str, Counts] = defaultdict(Counts)
    for line in answers:
        name, turn = line["apcbatch"]["conversation"], line["turn"]
        record = records[name]
        recorded = [message for message in record["messages"] if message["role"] == "assistant"]
        if line["error"] is None and turn <= len(recorded):  # a last turn may have been left to be answered
            choice = line["response"]["body"]["choices"][0]
            found[name.split("-")[0]].add(compare(recorded[turn - 1], record.get("tools") or [], choice))
    return found


def table(found: dict[str, Counts]) -> Iterator[str]:
    """Markdown, a row for each domain and one for all."""
    total = Counts()
    for counts in found.values():
        total.add(counts)
    heads = ("answers", "end by themselves", "call turns", "valid", "right tools", "exact", "arguments", "needless")
    yield "| | " + " | ".join(heads) + " |"
    yield "|---" * (len(heads) + 1) + "|"
    for name, counts in (*sorted(found.items()), ("all", total)):
        shares = (
            str(counts.answers),
            share(counts.ended, counts.answers),
            str(counts.call_turns),
            share(counts.valid, counts.call_turns),
            share(counts.right_tools, counts.call_turns),
            share(counts.exact, counts.call_turns),
            share(counts.right_arguments, counts.arguments),
            share(counts.needless, counts.texts),
        )
        yield f"| {name} | " + " | ".join(shares) + " |"


def share(part: int, whole: int) -> str:
    """A part as a percentage."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a JSONL file."""
    with path.open(encoding="utf-8") as file:
        yield from (json.loads(line) for line in file)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="compare answers with the recorded turns")
    parser.add_argument("input", type=Path, metavar="INPUT")
    parser.add_argument("out", type=Path, metavar="OUT")
    options = parser.parse_args()
    records_by_id = {record["id"]: record for record in lines(options.input)}
    print(*table(compared(records_by_id, lines(options.out))), sep="\n")


if __name__ == "__main__":
    main()
