"""Segment of a trace: what one process did for an OUT. Define its types, write it as a JSON line, check what is read.

The metadata of a field has its meaning and its key in the line; docs/reference/formats.md is made from them. Invariant:
a segment that was read matches its types: columns of one length, finite numbers from 0 on, edges that form a tree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import orjson

FORMAT = 1
MAX_PASS_ROWS = 2_048
MAX_EDGE_ROWS = 4_096
ROOT_PARENT = -1
_HEAD = b'{"format":'
_LARGEST = 2**63 - 1
_LARGEST_MEASURE = 2.0**40  # in seconds; sums over all rows stay finite, and a page can show each value as a date

T = TypeVar("T")


def _means(meaning: str, key: str | None = None) -> Mapping[str, str | None]:
    """Return the metadata of a field: its meaning, and its key in the line if that is not its name."""
    return {"meaning": meaning, "key": key}


def key_of(one: dataclasses.Field[Any]) -> str:
    """Return the key of a field in the line."""
    return one.metadata["key"] or one.name


@dataclass(frozen=True, slots=True)
class PassColumns:
    """Activity of the engine over time, a row for each pass or for several successive ones."""

    begin_s: list[float] = field(metadata=_means("seconds since the segment's begin"))
    seconds: list[float] = field(
        metadata=_means("seconds in the row's passes; then the engine was idle until the next row")
    )
    prefill_s: list[float] = field(metadata=_means("of these, in prefill"))
    decode_s: list[float] = field(metadata=_means("of these, in decode"))
    store_s: list[float] = field(metadata=_means("of these, in scheduling and waiting for the store"))
    passes: list[int] = field(metadata=_means("number of passes in the row"))
    prefill_tokens: list[int] = field(metadata=_means("prompt tokens computed"))
    decode_tokens: list[int] = field(metadata=_means("answer tokens computed"))
    running: list[int] = field(metadata=_means("maximum number of sequences in a pass"))
    waiting: list[int] = field(metadata=_means("maximum number of requests queued in the engine"))
    pool_bytes: list[int] = field(metadata=_means("bytes of the snapshots in memory at the row's end"))
    store_bytes: list[int] = field(metadata=_means("bytes written to the store up to the row's end"))
    failures: list[int] = field(
        metadata=_means("error records, including those of lines that never reached the engine")
    )


@dataclass(frozen=True, slots=True)
class EdgeColumns:
    """Prefix tree of the answered prompts, a row for each edge. Restored and computed tokens, summed over all rows,
    equal the run's sums, even if edges were merged into their parents."""

    parent: list[int] = field(metadata=_means("row of the parent; -1 for the first row, the empty prefix"))
    begin: list[int] = field(metadata=_means("position where the edge begins, in tokens: the parent's end"))
    end: list[int] = field(metadata=_means("position where the edge ends: prompts fork there, or one ends"))
    requests: list[int] = field(metadata=_means("requests whose prompts contain the edge"))
    restored: list[int] = field(metadata=_means("tokens of the edge that were restored, over these requests"))
    computed: list[int] = field(metadata=_means("tokens of the edge that were computed, over these requests"))
    memory: list[int] = field(metadata=_means("restored tokens whose snapshot was in memory"))
    disk: list[int] = field(metadata=_means("restored tokens whose snapshot was in the store"))
    snapshots: list[int] = field(metadata=_means("snapshots that the run kept on the edge"))
    snapshot_bytes: list[int] = field(metadata=_means("bytes of these snapshots"))
    dropped: list[int] = field(metadata=_means("snapshots evicted for lack of room"))
    dropped_s: list[float | None] = field(
        metadata=_means("time of the last eviction, in seconds since the segment's begin; or null")
    )
    text: list[str] = field(
        metadata=_means("first words of the edge, at most 80 characters; empty if they are not known")
    )
    hidden: list[int] = field(metadata=_means("requests of branches that were merged into this edge"))


@dataclass(frozen=True, slots=True)
class End:
    """End of a segment: its duration, exit status and summary."""

    seconds: float = field(metadata=_means("seconds from the start to the end"))
    exit_code: int = field(metadata=_means("the exit status"))
    summary: dict[str, Any] = field(metadata=_means("the summary"))


@dataclass(frozen=True, slots=True)
class Segment:
    """Work of one process on an OUT. end: None if the process was killed, or if OUT could not be written any more."""

    version: str = field(metadata=_means("version of apcbatch"))
    begin: float = field(metadata=_means("when it began, in seconds since 1970 (UTC)"))
    worker: str = field(metadata=_means("`main`"))
    program: list[str] = field(metadata=_means("the command, without secrets"))
    input: str = field(metadata=_means("INPUT as given"))
    options: list[tuple[str, Any, str]] = field(metadata=_means("name, value and origin of each option"))
    model: str = field(metadata=_means("`--model`"))
    fingerprint: str = field(metadata=_means("fingerprint of the model, in hex"))
    dtype: str = field(metadata=_means("`--dtype`, `auto` resolved"))
    device: str = field(metadata=_means("`cpu` or `cuda`"))
    machine: dict[str, Any] = field(metadata=_means("null for what is not known"))
    passes: PassColumns = field(
        metadata=_means(f"columns, at most {MAX_PASS_ROWS:,} rows; a row is a pass, or several that follow each other")
    )
    edges: EdgeColumns = field(
        metadata=_means(
            f"columns, at most {MAX_EDGE_ROWS:,} rows: the edges of the prefix tree, parents before children", "stems"
        )
    )
    continue_command: str | None = field(
        metadata=_means("the command that continues the run; null if nothing is left to do", "continue")
    )
    end: End | None = field(metadata=_means("null if the process was killed"))


def is_segment(line: bytes) -> bool:
    """Return whether a line is a segment, in this format or another one."""
    try:
        return line.startswith(_HEAD) and bool(parsed(line))
    except ValueError:
        return False


def parsed(line: bytes) -> dict[str, Any]:
    """Parse the object in a line; ValueError if it is no segment."""
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError:
        raise ValueError("it is no JSON") from None
    if not isinstance(found, dict) or not isinstance(found.get("segment"), dict) or "format" not in found:
        raise ValueError("it is no segment of a trace")
    return found


def line_of(segment: Segment, missing: int) -> bytes:
    """Serialise a segment as a line. missing: number of earlier segments that were dropped for lack of room."""
    fields = {key_of(one): getattr(segment, one.name) for one in dataclasses.fields(Segment)}
    document = {"format": FORMAT, "segment": fields} | ({"missing": missing} if missing else {})
    return orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE)


def segment_of(found: Mapping[str, Any]) -> Segment:
    """Make a segment that matches its types; ValueError, LookupError or TypeError if `found` does not."""
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
        passes=_table(PassColumns, found["passes"], MAX_PASS_ROWS),
        edges=_tree(_table(EdgeColumns, found["stems"], MAX_EDGE_ROWS)),
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
    """Make columns of one length, each of numbers or texts as its field's type says; ValueError otherwise."""
    columns = {}
    for one in dataclasses.fields(kind):  # type: ignore[arg-type]
        check = _CHECKS.get(one.name) or _CHECK_OF_TYPE[str(one.type)]
        columns[one.name] = _list(found, one.name, check)
    lengths = {len(column) for column in columns.values()}
    if len(lengths) != 1 or max(lengths) > most:
        raise ValueError(
            f"its columns have {', '.join(map(str, sorted(lengths)))} rows; expected one number up to {most}"
        )
    return kind(**columns)


def _tree(edges: EdgeColumns) -> EdgeColumns:
    """Return the edges; ValueError unless their rows are a tree with the root first."""
    ends = edges.end
    for row, (parent, begin) in enumerate(zip(edges.parent, edges.begin, strict=True)):
        is_root = row == 0 and parent == ROOT_PARENT and begin == ends[0] == 0
        if not is_root and not (0 <= parent < row and begin == ends[parent] and begin <= ends[row]):
            raise ValueError(f"row {row} of its stems has no place in the tree")
    if not edges.parent:
        raise ValueError("its stems have no root")
    return edges


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
