"""JSON documents: arrays and pretty-printed objects become records, wherever the chunks are cut."""

from __future__ import annotations

import gzip
import json
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from apcbatch.data.conversation import BadLine, Conversation
from apcbatch.data.input.lines import DocumentError, is_document, split_document
from apcbatch.data.input.source import open_source
from apcbatch.errors import UsageError
from tests.data.conftest import USER
from tests.effort import table

LINES = [{"id": f"c-{number}", "messages": [USER]} for number in range(5)]
TRICKY = [
    {"id": 'a"b\\', "messages": [{"role": "user", "content": '}{][,\\" \\\\'}]},
    {"x": [], "y": {}, "z": [[{}], ["]"]]},
    [1, [2, "]"]], "text, with ] and \\", 5, None, {},
]  # fmt: skip


def cut(data: bytes, draw: random.Random) -> Iterator[bytes]:
    """The data in random chunks."""
    while data:
        size = draw.choice((1, 2, 3, 7, 50))
        yield data[:size]
        data = data[size:]


def records_of(data: bytes, draw: random.Random, limit: int = 1 << 20) -> list[Any]:
    return [record for _, record in split_document(cut(data, draw), limit)]


@table("indent", [None, 1, 4])
def test_every_record_comes_out_as_it_was_written(indent: int | None) -> None:
    """Catches a bracket or a quote inside a string that ends a record, at any cut between chunks."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    draw = random.Random(seed)
    for _ in range(60):
        values = draw.choices(TRICKY, k=draw.randrange(6))
        array = json.dumps(values, indent=indent).encode()
        assert [json.loads(record) for record in records_of(array, draw)] == values
        objects = [value for value in values if isinstance(value, dict)]
        joined = b"\n".join(json.dumps(value, indent=indent).encode() for value in objects)
        assert [json.loads(record) for record in records_of(joined, draw)] == objects


def test_a_record_over_the_limit_is_told_and_not_held() -> None:
    """Catches a document whose one huge record fills memory, or takes those after it along."""
    data = b'[{"a": 1}, {"b": "' + b"x" * 100 + b'"}, {"c": 2}]'
    assert records_of(data, random.Random(1), limit=50) == [b'{"a": 1}', 109, b'{"c": 2}']
    assert records_of(data, random.Random(2), limit=108)[1] == 109
    assert records_of(data, random.Random(3), limit=109)[1] == data[11:-11]


@table(
    "data, whole, reason",
    [
        (b'[{"a": 1}, {"b"', 1, "the array has no end"),
        (b'[{"a": 1}, {"b": 2}', 2, "the array has no end"),
        (b'[{"a": 1}] {"b": 2}', 1, "there is more behind the end of the array"),
        (b'{"a":\n1}\n{"b":\n', 1, "the last record has no end"),
    ],
)
def test_a_document_that_breaks_off_keeps_its_whole_records(data: bytes, whole: int, reason: str) -> None:
    """Catches a download cut short that looks like the whole dataset."""
    found = []
    with pytest.raises(DocumentError, match=reason):
        for record in split_document(cut(data, random.Random(2)), 1 << 20):
            found.append(record)
    assert len(found) == whole


PRETTY = json.dumps(LINES[0], indent=2).encode()
KINDS = {
    "array": (json.dumps(LINES).encode(), True),
    "pretty array": (json.dumps(LINES, indent=1).encode(), True),
    "empty array": (b"[ ]\n", True),
    "array, one a line": (b"[\n" + b",\n".join(json.dumps(line).encode() for line in LINES) + b"\n]\n", True),
    "array opened on its first line": (b"[" + b",\n".join(json.dumps(line).encode() for line in LINES) + b"]", True),
    "pretty object": (PRETTY, True),
    "pretty objects": (PRETTY + b"\n" + PRETTY, True),
    "mark before an array": (b"\xef\xbb\xbf" + json.dumps(LINES, indent=1).encode(), True),
    "lines": (b"\n".join(json.dumps(line).encode() for line in LINES), False),
    "one line": (json.dumps(LINES[0]).encode(), False),
    "lists": (b'[{"role": "user"}]\n[{"role": "user"}]\n', False),
    "a list first": (b"[1]\n" + json.dumps(LINES[0]).encode(), False),
    "a torn line first": (b'{"id": "x", "messages": [\n' + json.dumps(LINES[0]).encode(), False),
    "a bad line first": (b'{"id": x}\n' + json.dumps(LINES[0]).encode(), False),
    "numbers": (b"[1, 2]", False),
    "nothing": (b"", False),
    "blank": (b"\n\n", False),
}  # fmt: skip


@table("kind", KINDS)
def test_a_document_is_told_from_lines(kind: str) -> None:
    """Catches an array that is refused, and bad JSON lines that are swallowed as one document."""
    data, expected = KINDS[kind]
    for seed in range(5):
        judged, chunks = is_document(cut(data, random.Random(seed)))
        assert judged is expected and b"".join(chunks) == data
    judged, chunks = is_document(iter([data]))
    assert judged is expected and b"".join(chunks) == data


def test_lines_are_not_awaited_to_tell_them() -> None:
    """Catches a live pipe that is answered only when its second line comes."""

    def pipe() -> Iterator[bytes]:
        yield json.dumps(LINES[0]).encode() + b"\n"
        raise AssertionError("more was read than was needed")

    assert is_document(pipe())[0] is False


@table("name", ["in.json", "in.jsonl", "in.json.gz"])
def test_records_of_a_document_are_lines(tmp_path: Path, name: str) -> None:
    """Catches a record without its number, or a bad one that ends the others."""
    values = [LINES[0], {"messages": []}, LINES[1]]
    data = json.dumps(values, indent=2).encode().replace(b'"messages": []', b'"messages": nothing')
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    first, bad, last = open_source(str(tmp_path / name))
    assert isinstance(first, Conversation) and isinstance(last, Conversation)
    assert (first.id, first.line, last.id, last.line) == ("c-0", 1, "c-1", 3)
    assert isinstance(bad, BadLine) and (bad.line, bad.error.code) == (2, "invalid_json")


def test_a_document_that_breaks_off_says_so(tmp_path: Path) -> None:
    """Catches a truncated document that ends without a word, and one of which nothing can be read."""
    data = json.dumps(LINES, indent=1).encode()
    (tmp_path / "in.json").write_bytes(data[:-5])
    told: list[str] = []
    *read, broken = open_source(str(tmp_path / "in.json"), warn=told.append)
    assert [record.line for record in read] == [1, 2, 3, 4] and isinstance(broken, BadLine) and broken.line == 5
    assert "in.json cannot be read further after record 4: the array has no end" in broken.error.message
    assert told == [broken.error.message]
    (tmp_path / "in.json").write_bytes(data[:40])
    with pytest.raises(UsageError, match="before its first record: the array has no end"):
        list(open_source(str(tmp_path / "in.json")))


@pytest.mark.slow
def test_a_large_array_is_not_held(tmp_path: Path) -> None:
    """Catches an array that is read as a whole: 10 MB of records within a few."""
    path = tmp_path / "large.json"
    with path.open("wb") as file:
        file.write(b"[")
        record = json.dumps({"id": "x", "messages": [{"role": "user", "content": "y" * 20_000}]}).encode()
        file.write(b", ".join([record] * 500) + b"]")
    tracemalloc.start()
    try:
        count = sum(1 for _ in open_source(str(path)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 500 and peak < 5 * 2**20


@table(
    "chunks, records",
    [
        ([b'{"a":\n1}\n', b"7"], [(1, b'{"a":\n1}'), (2, b"7")]),
        ([b'\xef\xbb\xbf["', b'\xef\xbb\xbf"]'], [(1, b'"\xef\xbb\xbf"')]),
    ],
)
def test_a_bare_word_ends_a_document_and_a_mark_begins_it(chunks: list[bytes], records: object) -> None:
    """Catches a last record without brackets that is lost, or has the number of the one before it; a byte order mark
    that is the first record, or one in a text that goes."""
    assert list(split_document(iter(chunks), 99)) == records
