"""What the names on a command line stand for: files, folders of shards, patterns, saved datasets, addresses."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from fsspec.registry import known_implementations

from apcbatch.address import _PACKAGES, _named_package, open_filesystem
from apcbatch.data.conversation import BadLine, Conversation
from apcbatch.data.input import files, inputs, source
from apcbatch.data.input.inputs import Inputs, _as_address, find_inputs
from apcbatch.data.input.source import open_source
from apcbatch.errors import UsageError
from tests.data.conftest import USER
from tests.effort import table


def line(name: str) -> bytes:
    return json.dumps({"id": name, "messages": [USER]}).encode() + b"\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, **files: bytes) -> None:
    """Files by name; `__` in a name stands for a dot."""
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name.replace("__", ".")).write_bytes(data)


def read(*given: str) -> list[tuple[int, str]]:
    """(line, id) of each line; for a bad one its words."""
    records = list(open_source(find_inputs(given)))
    return [(one.line, one.id if isinstance(one, Conversation) else one.error.message) for one in records]


def test_files_are_read_in_the_given_order_and_numbered_through(folder: Path) -> None:
    """Catches two lines with one number, which is a key of resume, and two ids `line-1`."""
    nameless = json.dumps({"messages": [USER]}).encode()
    write(folder, b__jsonl=nameless + b"\n\n" + nameless + b"\n\n", a__jsonl=gzip.compress(nameless), c=line("c"))
    assert read("b.jsonl", "a.jsonl", "c") == [(1, "line-1"), (3, "line-3"), (5, "line-5"), (6, "c")]
    (folder / "all.jsonl").write_bytes(nameless + b"\n\n" + nameless + b"\n\n" + nameless + b"\n" + line("c"))
    assert read("all.jsonl") == read("b.jsonl", "a.jsonl", "c"), "as cat would join them"


def test_records_say_where_they_stand(folder: Path) -> None:
    """Catches an error on line 700 of ten files that does not name the file."""
    write(folder, a__jsonl=line("a") * 2, b__jsonl=b"\n" + b"no\n")
    *_, bad = open_source(find_inputs(["a.jsonl", "b.jsonl"]))
    assert isinstance(bad, BadLine) and bad.line == 4 and bad.file_line == ("b.jsonl", 2)
    [alone, _] = open_source("a.jsonl")
    assert alone.file_line is None


def test_all_kinds_of_files_come_together(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a kind of file that starts counting anew, or that stdin cannot stand among."""
    import pyarrow
    import pyarrow.parquet

    rows = [{"id": "p1", "messages": [USER]}, {"id": "p2", "messages": [USER]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "table.jsonl")
    write(folder, array__json=json.dumps([json.loads(line("d1")), json.loads(line("d2"))], indent=1).encode())
    stdin = type("Stdin", (), {"buffer": __import__("io").BytesIO(bz2.compress(line("s")))})
    monkeypatch.setattr(sys, "stdin", stdin)
    assert read("array.json", "table.jsonl", "-") == [(1, "d1"), (2, "d2"), (3, "p1"), (4, "p2"), (5, "s")]


def test_a_folder_stands_for_its_shards(folder: Path) -> None:
    """Catches hidden files, notes, outputs of a run or subfolders among the inputs, and a chance order."""
    names = ["part-10.jsonl", "part-2.JSONL.GZ", "part-1.parquet.zst", "x.json", "y.ndjson.xz", "z.arrow"]
    others = [".hidden.jsonl", "README.md", "done.jsonl", "done.jsonl.run.json", "chats.csv", "jsonl"]
    write(folder / "shards", **{name.replace(".", "__"): b"" for name in names + others})
    (folder / "shards" / "more.jsonl").mkdir()
    told: list[str] = []
    (folder / "shards" / "more.jsonl").rename(folder / "shards" / "more")
    found = find_inputs(["shards/"], told.append)
    assert [os.path.basename(name) for name in found.files] == sorted(names)
    assert told == ["INPUT has 6 files of the folder shards/; not README.md, chats.csv, done.jsonl and 3 more"], (
        "what is left out is said"
    )
    write(folder / "few", **{name.replace(".", "__"): b"" for name in ("a.jsonl", "b.csv", "c.csv", "d.csv")})
    find_inputs(["few/"], told.append)
    assert told[1:] == ["INPUT has 1 file of the folder few/; not b.csv, c.csv, d.csv"]
    write(folder / "empty", notes__txt=b"")
    with pytest.raises(UsageError, match="the folder empty holds no input; expected files that end in .jsonl, "):
        find_inputs(["empty"])


def test_files_are_opened_as_they_come(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a folder of 100,000 files of which each is opened before the first line; and one that goes meanwhile."""
    write(folder / "f", a__jsonl=line("a"), b__jsonl=line("b"), c__jsonl=line("c"))
    opened: list[str] = []
    real = source.open_stream
    monkeypatch.setattr(source, "open_stream", lambda name: opened.append(name) or real(name))
    told: list[str] = []
    records = open_source(find_inputs(["f"]), warn=told.append)
    next(records)
    assert set(opened) == {"f/a.jsonl"}
    (folder / "f" / "b.jsonl").unlink()
    gone, last = records
    assert isinstance(gone, BadLine) and gone.file_line == ("f/b.jsonl", 1) and "cannot read f/b.jsonl" in told[0]
    assert isinstance(last, Conversation) and (last.id, last.line) == ("c", 3)


def test_a_pattern_that_the_shell_left_is_expanded(folder: Path) -> None:
    """Catches 'shards/*.jsonl' taken for a name, and a file whose name has a star that cannot be given."""
    write(folder / "shards", b__jsonl=line("b"), a__jsonl=line("a"), c__txt=line("c"))
    assert read("shards/*.jsonl") == [(1, "a"), (2, "b")]
    assert read("shards/[bc].*", "shards/a.jsonl") == [(1, "b"), (2, "c"), (3, "a")]
    write(folder / "shards" / "more", d__ndjson=line("d"))
    assert read("**/*.ndjson") == [(1, "d")], "at any depth"
    assert read("sh*s") == [(1, "a"), (2, "b")], "a folder that matches stands for its shards"
    (folder / "a[1]*.jsonl").write_bytes(line("odd"))
    assert read("a[1]*.jsonl") == [(1, "odd")]
    with pytest.raises(UsageError, match=r"cannot read no/\*.jsonl: no file matches this pattern"):
        find_inputs(["no/*.jsonl"])


@pytest.mark.parametrize("given", [("a.jsonl", "./a.jsonl"), ("a.jsonl", "*.jsonl"), ("-", "-"), ("hf:x", "hf:x")])
def test_a_file_that_is_there_twice_is_refused(folder: Path, given: tuple[str, ...]) -> None:
    """Catches each of its ids as a duplicate, one error record a line."""
    write(folder, a__jsonl=line("a"))
    with pytest.raises(UsageError, match="is given twice; name each input once"):
        find_inputs(given)


def saved(folder: Path, *splits: str) -> None:
    """What save_to_disk writes: a dataset, or several as a dictionary."""
    from datasets import Dataset, DatasetDict

    if not splits:
        rows = [{"id": f"r{number}", "messages": [USER]} for number in range(5)]
        Dataset.from_list(rows).save_to_disk(folder, num_shards=2)
        return
    made = {split: Dataset.from_list([{"id": split, "messages": [USER]}]) for split in splits}
    DatasetDict(made).save_to_disk(folder)


def test_a_saved_dataset_is_an_input(folder: Path) -> None:
    """Catches a folder of save_to_disk whose shards come in disorder, or whose other tables are read."""
    saved(folder / "one")
    (folder / "one" / "cache-0123.arrow").write_bytes(b"what map left")
    assert read("one") == [(number + 1, f"r{number}") for number in range(5)]


def test_a_split_of_a_saved_dataset_is_chosen(folder: Path) -> None:
    """Without a choice it is the only one, or train; otherwise the sentence has one to copy."""
    saved(folder / "two", "train", "test")
    assert read("two") == [(1, "train")] and read("two/test") == [(1, "test")]
    saved(folder / "only", "validation")
    assert read("only") == [(1, "validation")]
    (folder / "only" / "notes").mkdir()
    assert read("only") == [(1, "validation")], "a folder without a table is no split"
    saved(folder / "none", "a", "b")
    with pytest.raises(UsageError, match="the dataset in none has the splits a, b; choose one: none/a"):
        find_inputs(["none"])
    write(folder / "empty", dataset_dict__json=b"{}")
    with pytest.raises(UsageError, match="the dataset in empty has the splits none$"):
        find_inputs(["empty"])


@table(
    "state",
    [b"no", b"{}", b'{"_data_files": 5}', b'{"_data_files": [{"filename": "../secret.arrow"}]}',
     b'{"_data_files": [{"filename": "/etc/passwd"}]}', b'{"_data_files": [{"filename": 3}]}',
     b'{"_data_files": [{"filename": "absent.arrow"}]}'],
)  # fmt: skip
def test_a_saved_dataset_names_only_its_own_tables(folder: Path, state: bytes) -> None:
    """Catches a path that comes from data, and a damaged state.json that ends in a traceback."""
    write(folder / "bad", state__json=state)
    (folder / "secret.arrow").touch()
    with pytest.raises(UsageError, match="state.json|absent.arrow"):
        find_inputs(["bad"])


def test_a_file_that_breaks_off_does_not_stop_the_next(folder: Path) -> None:
    """Catches a torn shard that takes those after it along, and numbers that are used twice."""
    torn = gzip.compress(line("a") + b"".join(os.urandom(30).hex().encode() + b"\n" for _ in range(40)))
    write(folder, a__gz=torn[:-4], b__jsonl=line("b"))
    told: list[str] = []
    records = list(open_source(find_inputs(["a.gz", "b.jsonl"]), warn=told.append))
    assert isinstance(records[0], Conversation) and records[0].id == "a"
    assert isinstance(records[-1], Conversation) and records[-1].id == "b"
    assert [record.line for record in records] == list(range(1, len(records) + 1)) and len(told) == 1


def test_a_later_file_of_the_wrong_kind_is_one_error_record(folder: Path) -> None:
    """Catches a run that ends in the middle because of one shard, and a record for each line of a table of commas."""
    write(folder, a__jsonl=line("a"), b__jsonl=b"1,2\n" * 300, c__jsonl=b"\x1f\x8bno", d__jsonl=line("d"))
    told: list[str] = []
    records = list(open_source(find_inputs(["a.jsonl", "b.jsonl", "c.jsonl", "d.jsonl"]), warn=told.append))
    assert len(records) == 1 + 101 + 1 + 1 and len(told) == 2
    assert "b.jsonl: none of the first 100 lines is a JSON object" in told[0]
    assert "c.jsonl cannot be read further before its first line" in told[1]
    assert [record.line for record in records] == sorted({record.line for record in records})
    assert isinstance(records[-1], Conversation) and records[-1].id == "d"
    with pytest.raises(UsageError, match="none of the first 100 lines"):
        list(open_source(find_inputs(["b.jsonl", "a.jsonl"])))


def test_a_table_on_stdin_is_a_sentence(folder: Path) -> None:
    """Catches a traceback of a library that cannot go back in a pipe."""
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"id": "p", "messages": [USER]}]), folder / "t.parquet")
    os.mkfifo("pipe")
    writer = threading.Thread(target=lambda: Path("pipe").write_bytes(Path("t.parquet").read_bytes()))
    writer.start()
    with pytest.raises(UsageError, match="pipe holds a table .parquet., which cannot be read from a stream"):
        list(open_source("pipe"))
    writer.join()


def test_addresses_are_inputs(folder: Path, memory: Any) -> None:
    """Catches a file, a folder or a pattern behind an address that is taken for a path."""
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"id": "p", "messages": [USER]}]), folder / "t")
    for name, data in {"a.jsonl": line("a"), "b.jsonl.gz": line("b"), "c.json": gzip.compress(line("c"))}.items():
        memory.pipe_file(f"/bucket/{name}", data)
    memory.pipe_file("/bucket/d.parquet", (folder / "t").read_bytes())
    assert read("memory://bucket/c.json", "memory://bucket/a.jsonl") == [(1, "c"), (2, "a")]
    assert read("memory://bucket/*.json*") == [(1, "a"), (2, "b"), (3, "c")]
    assert read("memory://bucket") == [(1, "a"), (2, "b"), (3, "c"), (4, "p")]
    assert find_inputs(["memory://bucket/*.jsonl"]).files == ("memory://bucket/a.jsonl",), "it begins as given"
    write(folder / "f", x__jsonl=line("x"), y__jsonl=line("y"))
    assert read(f"file://{folder}/f/y.jsonl", f"file://{folder}/f/x*") == [(1, "y"), (2, "x")]
    for name in ("memory://bucket/no.jsonl", "memory://no/*.jsonl"):
        with pytest.raises(UsageError, match=f"cannot read {name.replace('*', '.')}: "):
            find_inputs([name])


def test_the_package_of_an_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a traceback where a package is missing, or a protocol that nobody knows."""
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(UsageError, match="s3://bucket/a.jsonl needs the package s3fs; pip install s3fs"):
        find_inputs(["s3://bucket/a.jsonl"])
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.http", raising=False)
    with pytest.raises(UsageError, match="https://host/a.jsonl needs the package aiohttp; pip install aiohttp$"):
        open_filesystem("https://host/a.jsonl")
    for protocol in known_implementations:
        package = _PACKAGES.get(protocol) or _named_package(protocol)
        assert package is None or re.fullmatch("[a-z][a-z0-9_-]+", package), protocol
    with pytest.raises(UsageError, match="nosuch://x cannot be opened: Protocol not known: nosuch"):
        find_inputs(["nosuch://x"])


def test_no_secret_of_an_address_is_shown(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a password or a signature in an error, a warning or the run file."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("403 for https://user:hush@host/a.jsonl?X-Amz-Signature=hush: denied")

    monkeypatch.setattr(type(memory), "exists", refuse)
    with pytest.raises(UsageError) as caught:
        find_inputs(["memory://user:hush@host/a.jsonl?sig=hush"])
    assert "hush" not in str(caught.value) and "memory://host/a.jsonl cannot be read: 403" in str(caught.value)
    assert "hush" not in Inputs(("s3://user:hush@b/x?sig=hush",), ()).shown


def test_an_address_that_breaks_off_is_an_error_record(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a lost connection that ends the run with a traceback."""
    memory.pipe_file("/bucket/a.jsonl", line("a") * 3)
    real = memory.open

    class Torn:
        def __init__(self, *given: Any) -> None:
            self._file, self._left = real(*given), 1

        def __enter__(self) -> Torn:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def read(self, size: int) -> bytes:
            if not self._left:
                raise RuntimeError("connection lost")  # not an OSError: packages raise what they like
            self._left -= 1
            return bytes(self._file.read(len(line("a")) + 5))

    monkeypatch.setattr(type(memory), "open", lambda self, *given: Torn(*given))
    [first, broken] = open_source("memory://bucket/a.jsonl")
    assert isinstance(first, Conversation) and isinstance(broken, BadLine)
    assert "memory://bucket/a.jsonl cannot be read further after line 1: connection lost" in broken.error.message


@table(
    "name, path, found, expected",
    [
        ("memory://b/*.json", "/b/*.json", "/b/a.json", "memory://b/a.json"),
        ("s3://b/f/", "b/f", "b/f/1.jsonl", "s3://b/f/1.jsonl"),
        ("s3://b/b/*", "b/b/*", "b/b/1", "s3://b/b/1"),
        ("aa://a/x*", "a/x*", "a/x1", "aa://a/x1"),
        ("s3://key@host/x*", "other/x*", "other/x1", None),
        ("zip://*.jsonl::a.zip", "*.jsonl", "a.jsonl", "zip://a.jsonl::a.zip"),
        ("simplecache::zip://d/*::s3://b/a.zip", "d/*", "d/x", "simplecache::zip://d/x::s3://b/a.zip"),
        ("zip://::file:///t/a.zip", "", "/a.jsonl", "zip:///a.jsonl::file:///t/a.zip"),
        ("s3://b/f/*", "b/f/*", "c/f/1", None),
    ],
)
def test_a_file_behind_an_address_has_the_addresss_beginning(
    name: str, path: str, found: str, expected: str | None
) -> None:
    """Catches a found file whose address lost the host, the options or the archive of the given one, or that is another
    file."""
    assert _as_address(name, path, found) == expected


def test_many_names_are_counted() -> None:
    """Catches a sentence of a thousand names, and a count that is off by one."""
    assert Inputs(("a", "b", "c"), ()).shown == "a, b, c"
    assert Inputs(("a", "b", "c", "d"), ()).shown == "a and 3 more"


def test_a_remote_file_is_read_by_its_read_alone() -> None:
    """Catches a decompressor that reads past the method which hides secrets."""
    remote = files._Remote(io.BytesIO(b"x"), "memory://b/x")
    assert not hasattr(remote, "read1") and remote.read() == b"x" and remote.seekable()


@table("name", ["https://host/f/?a=[1]", "HTTP://host/f*"])
def test_a_web_address_is_one_file(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Catches a web server that is asked for the files of a folder, or a query that is taken for a pattern."""
    monkeypatch.setattr(inputs, "open_filesystem", lambda name: (object(), name))
    assert find_inputs([name]).files == (name,)


def test_a_folder_that_cannot_be_listed_is_a_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a traceback for a folder of another user."""
    (folder / "f").mkdir()

    def refuse(path: str) -> list[str]:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(UsageError, match="^cannot read the folder f: permission denied$"):
        find_inputs(["f"])


def test_an_address_that_cannot_be_opened_is_a_sentence(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a traceback of a package that raises what it likes."""
    memory.pipe_file("/bucket/a.jsonl", line("a"))

    def refuse(*_: object) -> None:
        raise RuntimeError("no token")

    monkeypatch.setattr(type(memory), "open", refuse)
    with pytest.raises(UsageError, match="memory://bucket/a.jsonl cannot be read: no token"):
        list(open_source("memory://bucket/a.jsonl"))
