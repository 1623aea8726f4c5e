"""Writes docs/reference/formats.md from the tables of fields, warnings and output keys; run it after every change of
apcbatch/data/fields.py, apcbatch/answer.py, tools/output_keys.py or apcbatch/job/processes.py. What is above the first
table of fields is written by hand.

A test compares the file with what this script would write, so that no field stays undocumented.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from apcbatch.answer import WARNING_KINDS
from apcbatch.data.fields import CHATS, FIELDS, INSIDE, REQUESTS, Field, Kind, json_text

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a script finds the files beside it alone


from tools import output_keys  # noqa: E402

TARGET = ROOT / "docs" / "reference" / "formats.md"
SECTIONS: tuple[tuple[Kind, str, str], ...] = (
    ("content", "What a line and a body consist of", "what"),
    ("honoured", "Settings that are honoured", "what"),
    ("refused", "Fields that are refused", "what it would be"),
    ("harmless", "Fields that are harmless", "what"),
)
OUTPUTS = (
    (
        "The output record",
        "OUT has one JSON line for each request, written as it finishes; `--ordered` puts them into the order of the "
        "input at the end. A key is there if the key above it is no null; some belong to chats or completions alone.",
        output_keys.RECORD,
    ),
    (
        "The summary",
        "`--summary FILE` writes one JSON object about what this process did.",
        output_keys.SUMMARY,
    ),
    (
        "The processes of a run",
        "`OUT.run.json` has an entry for each process that worked on `OUT`: the first run, each `--resume`; of joined "
        "shards, those of all. It is written when the process has loaded the model, and replaced when it ends, so that "
        "a process that was killed has no `end`. These are the keys of that part; the others are for `--resume`.",
        output_keys.PROCESSES,
    ),
)
GROUPS = {REQUESTS: "everywhere", CHATS: "chats"}
NAMES = {
    "chat": "chat body",
    "completions": "completion body",
    "message": "message",
    "spoken": "`sharegpt` message",
    "part": "text part",
    "call": "tool call",
    "function": "its function",
}


def document() -> str:
    """The whole page."""
    page = TARGET.read_text(encoding="utf-8")
    parts = [page[: page.index(f"\n\n## {SECTIONS[0][1]}\n")]]
    for kind, heading, what in SECTIONS:
        fields = [field for field in FIELDS if field.kind == kind and not is_inside(field)]
        parts += [f"## {heading}", "\n".join(table(fields, what))]
    inside = [field for field in FIELDS if is_inside(field)]
    parts += ["## What a message consists of", "\n".join(inside_table(inside))]
    kinds = ["| kind | about |", "|---|---|", *(f"| `{kind}` | {about} |" for kind, about in WARNING_KINDS.items())]
    parts += ["## Kinds of warnings", "\n".join(kinds)]
    for heading, text, keys in OUTPUTS:
        parts += [f"## {heading}", text, "\n".join(output_keys.table(keys))]
    return "\n\n".join(parts) + "\n"


def table(fields: list[Field], what: str) -> Iterator[str]:
    """One row a field. The column of values is there if some field takes only certain ones."""
    limited = any(field.accepted is not None for field in fields)
    heads = ["field", "where", what, *(["taken, besides null"] if limited else [])]
    yield f"| {' | '.join(heads)} |"
    yield "|" + "---|" * len(heads)
    for field in fields:
        cells = [f"`{field.name}`", where(field), field.note + (f"; {field.hint}" if field.hint else "")]
        yield f"| {' | '.join(cells + [values(field)] * limited)} |"


def is_inside(field: Field) -> bool:
    """Whether the field belongs to a message, or to what it holds."""
    return all(shape in INSIDE for shape in field.shapes)


def inside_table(fields: list[Field]) -> Iterator[str]:
    """One row a field of messages, with what becomes of it."""
    yield "| key | where | what | |"
    yield "|---|---|---|---|"
    becomes = {"content": "read", "honoured": "read", "refused": "refused", "harmless": "harmless"}
    for field in fields:
        note = field.note + (f"; {field.hint}" if field.hint else "")
        yield f"| `{field.name}` | {where(field)} | {note} | {becomes[field.kind]} |"


def where(field: Field) -> str:
    """The shapes that have the field."""
    if field.shapes in GROUPS:
        return GROUPS[field.shapes]
    return ", ".join(NAMES.get(shape, f"`{shape}` line") for shape in field.shapes)


def values(field: Field) -> str:
    """The values that are taken."""
    if field.accepted is None:
        return "any that is valid"
    return ", ".join(f"`{json_text(value)}`" for value in field.accepted) or "none"


if __name__ == "__main__":
    TARGET.write_text(document(), encoding="utf-8")
