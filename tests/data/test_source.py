"""Sources: files by suffix, rows through `datasets`, stdin, and what is said when one cannot be read."""

from __future__ import annotations

import io
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from apcbatch.data.conversation import BadLine, Conversation
from apcbatch.data.input import source
from apcbatch.data.input.layouts import LineOptions
from apcbatch.data.input.records import parse_record
from apcbatch.data.input.source import open_source
from apcbatch.errors import UsageError
from apcbatch.formats import Format
from tests.effort import table, tries

USER = {"role": "user", "content": "hi"}
LINES: list[Any] = [
    {"id": "m", "messages": [USER]},
    {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"prompt": [1, 2]}},
    {"id": "s", "conversations": [{"from": "human", "value": "a"}]},
    {"id": "bad", "messages": [{"role": "bot", "content": ""}]},
]
# Rows of one schema: what a row lacks comes back as null.
ROWS: list[Any] = [
    {"id": "a", "messages": [USER], "tools": None},
    {"id": "b",
     "messages": [USER,
         {"role": "assistant", "content": None,
          "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}],
     "tools": '[{"name": "f", "parameters": {"x": null}}]'},
    {"id": "c", "messages": [{"role": "bot", "content": "x"}], "tools": None},
]  # fmt: skip


def ids(spec: str, format: Format | None = None) -> list[str | None]:
    """What identifies each line of a source."""
    return [
        record.id if isinstance(record, Conversation) else f"bad:{record.line}"
        for record in open_source(spec, LineOptions(format))
    ]


def test_stdin_is_a_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """`-` takes JSON lines, with any files in the working folder."""
    data = b"\n".join(json.dumps(line).encode() for line in LINES)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert ids("-") == ["m", "b", "s", "bad:4"]


def test_a_line_of_50_mb_is_an_answer_or_an_error_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One absurd line ends itself and not the job; over the limit it says its size."""
    path = tmp_path / "huge.jsonl"
    huge = b'{"id":"h","messages":[{"role":"user","content":"' + b"x" * 50_000_000 + b'"}]}'
    path.write_bytes(huge + b"\n" + json.dumps(LINES[0]).encode())
    assert ids(str(path)) == ["h", "m"]
    monkeypatch.setattr("apcbatch.data.input.source.MAX_LINE_BYTES", 2**20)
    first, second = open_source(str(path))
    assert isinstance(first, BadLine) and isinstance(second, Conversation)
    assert (first.line, first.error.code, second.line) == (1, "invalid_json", 2)
    assert first.error.message == f"the line holds {len(huge):,} bytes; at most 1,048,576 are read: split it"


TABLES = (".parquet", ".arrow", ".feather")  # the last two: Arrow's stream and its file


def write_rows(path: Path, rows: Any = ROWS, batch_rows: int = 2) -> str:
    """A table of the kind that the suffix names. rows: a list, or a table of pyarrow."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(rows) if isinstance(rows, list) else rows
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        make = pyarrow.ipc.new_stream if path.suffix == ".arrow" else pyarrow.ipc.new_file
        with pyarrow.OSFile(str(path), "wb") as file, make(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=batch_rows)
    return str(path)


@table("name", [*(f"rows{suffix}" for suffix in TABLES), "od[d]*?.parquet"])
def test_rows_are_lines(tmp_path: Path, name: str) -> None:
    """Nulls that the schema puts in are absent keys; tools kept as JSON text keep their own nulls."""
    spec = write_rows(tmp_path / name)
    first, second, third = open_source(spec)
    assert isinstance(first, Conversation) and isinstance(second, Conversation) and isinstance(third, BadLine)
    assert (first.id, first.line, first.messages, first.tools) == ("a", 1, [USER], None)
    assert second.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
    assert second.tools == [{"name": "f", "parameters": {"x": None}}]
    assert third.line == 3
    assert third.error.message == 'messages[0].role is "bot"; expected system, user, assistant or tool'


@table("suffix", TABLES)
def test_maps_are_objects(tmp_path: Path, suffix: str) -> None:
    """Fault: a map comes as a list of pairs, without the objects and nulls in it, or with keys that are no texts."""
    import pyarrow as pa

    arguments = {"x": {"a": 1, "b": None}, "y": None}
    call = {"type": "function", "function": {"name": "f", "arguments": list(arguments.items())}}
    row = {
        "messages": [{**USER, "tool_calls": None}, {"role": "assistant", "content": "", "tool_calls": [call]}],
        "logit_bias": [(50, -100.0), (7, 1.5)],
        "metadata": [("k", None)],
    }
    values = pa.struct({"a": pa.int64(), "b": pa.int64()})
    function = pa.struct({"name": pa.string(), "arguments": pa.map_(pa.string(), values)})
    calls = pa.list_(pa.struct({"type": pa.string(), "function": function}))
    messages = pa.list_(pa.struct({"role": pa.string(), "content": pa.string(), "tool_calls": calls}))
    types = {
        "messages": messages, "logit_bias": pa.map_(pa.int64(), pa.float64()),
        "metadata": pa.map_(pa.string(), pa.string()),
    }  # fmt: skip
    table = pa.Table.from_pylist([row, row], schema=pa.schema(types))
    for record in open_source(write_rows(tmp_path / f"maps{suffix}", table)):
        assert isinstance(record, Conversation), record
        function = {"name": "f", "arguments": {"x": {"a": 1}, "y": None}}
        assert record.messages[1]["tool_calls"] == [{"type": "function", "function": function}]
        assert record.params == {"logit_bias": {7: 1.5, 50: -100.0}} and record.columns == ()


def test_damaged_rows_are_a_usage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Library tracebacks are not sentences; and a table of which nothing can be read is answered with one error
    record."""
    path, told = tmp_path / "bad.parquet", list[str]()
    path.write_bytes(b"PAR1 this is no parquet file PAR1")
    with pytest.raises(UsageError, match=r"^cannot read .*bad\.parquet as parquet: "):
        open_source(str(path))
    whole = Path(write_rows(tmp_path / "torn.arrow", ROWS * 500, 600)).read_bytes()
    (tmp_path / "torn.arrow").write_bytes(whole[: len(whole) // 2])
    *records, last = open_source(str(tmp_path / "torn.arrow"), warn=told.append)
    assert len(records) > 0 and isinstance(last, BadLine) and last.line == len(records) + 1
    assert f"torn.arrow cannot be read further after row {len(records)}: " in last.error.message
    assert told == [last.error.message]

    def rows(_: object) -> Iterator[Any]:
        raise OSError("the disk is away")
        yield

    monkeypatch.setattr(source, "rows_in", rows)
    with pytest.raises(UsageError, match="rows.parquet cannot be read further after row 0: the disk is away"):
        next(open_source(write_rows(tmp_path / "rows.parquet")))


@pytest.mark.parametrize("suffix", TABLES)
def test_any_damage_of_a_table_is_a_sentence_or_rows(tmp_path: Path, suffix: str) -> None:
    """Catches what pyarrow and `datasets` raise for damaged lengths, types and metadata: tracebacks before."""
    whole = Path(write_rows(tmp_path / f"whole{suffix}", ROWS * 50)).read_bytes()
    for number in range(tries(100)):
        data = bytearray(whole)
        for _ in range(random.choice([1, 3, 20])):
            data[random.randrange(len(data))] = random.randrange(256)
        path = tmp_path / f"damaged-{number}{suffix}"
        path.write_bytes(data[: random.randrange(len(data))] if number % 5 == 0 else data)
        try:
            assert all(isinstance(record, (Conversation, BadLine)) for record in open_source(str(path)))
        except UsageError as error:
            assert path.name in str(error)


def hub_folder(tmp_path: Path, *splits: str) -> str:
    """A dataset with these splits, as `hf:` takes it: a local folder has the same form as one on the hub."""
    for split in splits:
        rows = [{"id": split, "messages": [USER]}]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return f"hf:{tmp_path}"


def test_a_hub_dataset_streams_a_split(tmp_path: Path) -> None:
    """Without a split it is the only one, or train."""
    spec = hub_folder(tmp_path, "train", "test")
    assert ids(spec) == ["train"]
    assert ids(f"{spec}:test") == ["test"]
    only = tmp_path / "only"
    only.mkdir()
    assert ids(hub_folder(only, "validation")) == ["validation"]


def test_a_hub_dataset_that_cannot_be_opened_is_a_usage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off-line, a wrong name, a wrong split, several splits: one sentence with what to do."""
    spec = hub_folder(tmp_path, "test", "validation")
    with pytest.raises(UsageError, match=r"has the splits .*; choose one: hf:.*:(test|validation)$"):
        open_source(spec)
    with pytest.raises(UsageError, match="check the name, the split and the network"):
        open_source(f"{spec}:nosuch")
    with pytest.raises(UsageError, match="names no dataset; expected hf:org/name"):
        open_source("hf:")

    def unreachable(*_: object, streaming: bool, **__: object) -> None:
        assert streaming, "a dataset is not downloaded as a whole"
        raise ConnectionError("Couldn't reach 'org/name' on the Hub (offline).\nmore")

    monkeypatch.setattr("datasets.load.load_dataset", unreachable)
    with pytest.raises(UsageError, match=r"cannot open hf:org/name: Couldn't reach .*; check the name"):
        open_source("hf:org/name")


def test_wrong_inputs_are_told_at_once(tmp_path: Path) -> None:
    """Before a model is loaded, not when the first line is pulled."""
    for spec in ("absent.jsonl", "absent.parquet", str(tmp_path)):
        with pytest.raises(UsageError, match="cannot read|holds no input"):
            open_source(spec)
    (tmp_path / "a.jsonl").symlink_to("absent")
    with pytest.raises(UsageError, match="cannot read .*a.jsonl: no such file"):
        open_source(str(tmp_path / "*.jsonl"))


@pytest.mark.drawn(1)
@pytest.mark.slow
@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "conversations", "messages"),
    [("tau_bench", 400, 11602), ("toolbench_dfs", 52, 340), ("taskmaster4", 500, 1883)],
)
def test_real_conversations_are_all_read(shared_data: Path, name: str, conversations: int, messages: int) -> None:
    """Catches a check that is stricter than real files: an error record, an unknown field, a key that is not read."""
    counts: Counter[str] = Counter()
    told: list[str] = []
    for record in open_source(str(shared_data / f"{name}.jsonl"), warn=told.append):
        assert isinstance(record, Conversation) and record.params == {} and told == [], record
        # tau_bench has 99 calls whose arguments are no JSON
        assert all("arguments is no JSON text of an object" in sentence for sentence in record.warnings)
        counts["conversations"] += 1
        counts["messages"] += len(record.messages)
    assert counts == {"conversations": conversations, "messages": messages}


def test_a_row_that_is_nested_too_deeply_is_one_error_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a row of a table that ends the run because parsing goes down with it."""

    def deep(row: Any, *rest: Any) -> Any:
        if row["id"] == "c":
            raise RecursionError
        return parse_record(row, *rest)

    monkeypatch.setattr(source, "parse_record", deep)
    *_, found = open_source(write_rows(tmp_path / "rows.parquet"))
    assert isinstance(found, BadLine) and (found.line, found.error.message) == (3, "the row is nested too deeply")
