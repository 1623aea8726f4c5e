"""A segment of a trace, which is what one process did for an OUT: its types, its line, its reading with all checks.

Must not know: files, how the numbers are gathered (see trace.py), what is drawn from them. Invariant: a segment that
was read is as its types say: columns of one length, finite numbers from 0 on, stems that are a tree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson

FORMAT = 1
MOST_PASSES = 2_048
MOST_STEMS = 4_096
ROOT_PARENT = -1
_HEAD = b'{"format":'
_LARGEST = 2**63 - 1
_LARGEST_MEASURE = 2.0**40  # in seconds; of all rows together no sum is infinite, and a page can show each as a date

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Passes:
    """What the engine did, in columns, one row for one pass or for several that follow each other.

    begin_s: since the segment's begin. seconds: in the passes; from then to the next row nothing ran. prefill_s,
    decode_s, store_s: parts of that. passes: how many the row stands for. prefill_tokens, decode_tokens: computed.
    running, waiting: requests in a pass and in the engine's queue, the most of any. pool_bytes: held at the row's end.
    store_bytes: written to the store from the segment's begin to the row's end. failures: error records that were
    written, those of lines that never came to the engine among them.
    """

    begin_s: list[float]
    seconds: list[float]
    prefill_s: list[float]
    decode_s: list[float]
    store_s: list[float]
    passes: list[int]
    prefill_tokens: list[int]
    decode_tokens: list[int]
    running: list[int]
    waiting: list[int]
    pool_bytes: list[int]
    store_bytes: list[int]
    failures: list[int]


@dataclass(frozen=True, slots=True)
class Stems:
    """The prefix tree of the answered prompts, in columns; parents come before children, row 0 is the empty prefix.

    begin, end: the positions of a stem in tokens; it begins where its parent ends. requests: whose prompts go through
    or end there. restored, computed: over these requests, the tokens of the stem that were; memory, disk: the parts of
    restored. snapshots: kept on the stem in this run, and their bytes; dropped: how many of them went for lack of
    room, dropped_s: when the last one did, since the segment's begin. text: its first words, at most 80 characters,
    empty where they are not known. hidden: requests of branches that are not shown and are counted here with all their
    tokens, so that restored and computed of all rows are the sums of the run whatever was left out.
    """

    parent: list[int]
    begin: list[int]
    end: list[int]
    requests: list[int]
    restored: list[int]
    computed: list[int]
    memory: list[int]
    disk: list[int]
    snapshots: list[int]
    snapshot_bytes: list[int]
    dropped: list[int]
    dropped_s: list[float | None]
    text: list[str]
    hidden: list[int]


@dataclass(frozen=True, slots=True)
class End:
    """How a segment ended. summary: the object that the run printed."""

    seconds: float
    exit_code: int
    summary: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Segment:
    """What one process did. begin: Unix time in seconds. worker: its name among those of one run. program: the words
    that started it, without what is secret. options: name, value and origin of each. machine: see machine.py.
    continue_command: the command that goes on (`continue` in the file), None if nothing is left to do. end: None for a
    process that was killed, or whose OUT could not be written any more."""

    version: str
    begin: float
    worker: str
    program: list[str]
    input: str
    options: list[tuple[str, Any, str]]
    model: str
    fingerprint: str
    dtype: str
    device: str
    machine: dict[str, Any]
    passes: Passes
    stems: Stems
    continue_command: str | None
    end: End | None


def is_segment(line: bytes) -> bool:
    """Whether a line is a segment, of this format or another one."""
    try:
        return line.startswith(_HEAD) and bool(parsed(line))
    except ValueError:
        return False


def parsed(line: bytes) -> dict[str, Any]:
    """The object in a line; ValueError if it is no segment."""
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError:
        raise ValueError("it is no JSON") from None
    if not isinstance(found, dict) or not isinstance(found.get("segment"), dict) or "format" not in found:
        raise ValueError("it is no segment of a trace")
    return found


def line_of(segment: Segment, missing: int) -> bytes:
    """A segment as a line. missing: how many before it were dropped for lack of room."""
    fields = {
        field.name.removesuffix("_command"): getattr(segment, field.name) for field in dataclasses.fields(Segment)
    }
    document = {"format": FORMAT, "segment": fields} | ({"missing": missing} if missing else {})
    return orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE)


def segment_of(found: Mapping[str, Any]) -> Segment:
    """A segment that is as its types say; ValueError, LookupError or TypeError for another one."""
    texts = {
        name: _text(found, name) for name in ("version", "worker", "input", "model", "fingerprint", "dtype", "device")
    }
    program = _list(found, "program", lambda word: isinstance(word, str))
    options = _list(found, "options", lambda row: isinstance(row, list) and len(row) == 3 and isinstance(row[0], str))
    command = found["continue"]
    if not _is_measure(found["begin"]) or not isinstance(found["machine"], dict):
        raise ValueError("its begin or its machine is not what was expected")
    if not (command is None or isinstance(command, str)):
        raise ValueError("the command that continues it is no text")
    return Segment(
        **texts,
        begin=found["begin"],
        program=program,
        options=[(str(name), value, str(origin)) for name, value, origin in options],
        machine=found["machine"],
        passes=_table(Passes, found["passes"], MOST_PASSES),
        stems=_tree(_table(Stems, found["stems"], MOST_STEMS)),
        continue_command=command,
        end=_end(found["end"]),
    )


def _end(found: Mapping[str, Any] | None) -> End | None:
    if found is None:
        return None
    summary = found["summary"]
    if not (_is_measure(found["seconds"]) and is_count(found["exit_code"]) and isinstance(summary, dict)):
        raise ValueError("its end is not what was expected")
    return End(found["seconds"], found["exit_code"], summary)


def _table(kind: type[T], found: Mapping[str, Any], most: int) -> T:
    """Columns of one length, each of numbers or texts as the field's type says."""
    columns = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        check = _CHECKS.get(field.name) or _CHECK_OF_TYPE[str(field.type)]
        columns[field.name] = _list(found, field.name, check)
    lengths = {len(column) for column in columns.values()}
    if len(lengths) != 1 or lengths > set(range(most + 1)):
        raise ValueError(
            f"its columns have {', '.join(map(str, sorted(lengths)))} rows; expected one number up to {most}"
        )
    return kind(**columns)


def _tree(stems: Stems) -> Stems:
    """Stems whose rows are a tree, from the root on."""
    ends = stems.end
    for row, (parent, begin) in enumerate(zip(stems.parent, stems.begin, strict=True)):
        is_root = row == 0 and parent == ROOT_PARENT and begin == ends[0] == 0
        if not is_root and not (0 <= parent < row and begin == ends[parent] and begin <= ends[row]):
            raise ValueError(f"row {row} of its stems has no place in the tree")
    if not stems.parent:
        raise ValueError("its stems have no root")
    return stems


def _list(found: Mapping[str, Any], name: str, check: Callable[[Any], bool]) -> list[Any]:
    values = found[name]
    if not isinstance(values, list) or not all(map(check, values)):
        raise ValueError(f"its {name} is not what was expected")
    return values


def _text(found: Mapping[str, Any], name: str) -> str:
    if not isinstance(found[name], str):
        raise ValueError(f"its {name} is no text")
    return str(found[name])


def is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST


def _is_measure(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value <= _LARGEST_MEASURE  # type: ignore[operator]


_CHECK_OF_TYPE: Mapping[str, Callable[[Any], bool]] = {
    "list[int]": is_count,
    "list[float]": _is_measure,
    "list[float | None]": lambda value: value is None or _is_measure(value),
    "list[str]": lambda value: isinstance(value, str),
}
_CHECKS: Mapping[str, Callable[[Any], bool]] = {"parent": lambda value: value == ROOT_PARENT or is_count(value)}
