"""An input of the wrong kind ends at once, with what it seems to be; one line of the right kind makes it records."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import random
import tarfile
import zipfile
from pathlib import Path

import pytest
import zstandard

from apcbatch.data.input.inputs import find_inputs
from apcbatch.data.input.source import open_source
from apcbatch.errors import UsageError
from tests.data.conftest import USER
from tests.effort import table

NOISE = random.Random(0).randbytes(200_000)
CSV = b"id,words\n" + b"".join(b"%d,how are you\n" % n for n in range(97))
JSON = json.dumps({"messages": [USER]}).encode() + b"\n"
STORED, TARRED = io.BytesIO(), io.BytesIO()
with zipfile.ZipFile(STORED, "w") as archive:
    archive.writestr("a.jsonl", JSON * 98)
with tarfile.open(fileobj=TARRED, mode="w") as tar:
    member = tarfile.TarInfo("a.jsonl")
    member.size = 98 * len(JSON)
    tar.addfile(member, io.BytesIO(JSON * 98))
FILES = {
    "csv": (CSV, 'a table of comma-separated values (CSV) whose header ("id", "words") names no column'),
    "tsv": (CSV.replace(b",", b"\t"), 'a table of tab-separated values (TSV) whose header ("id", "words") names no'),
    "csv in latin-1": (b"n\xf6,w\xf6rter\n" * 98, "a table of comma-separated values (CSV) whose header (no text)"),
    "gzip": (gzip.compress(gzip.compress(NOISE)), "compressed twice; unpack it once"),
    "zstd": (gzip.compress(zstandard.compress(NOISE)), "compressed twice; unpack it once"),
    "bzip2": (bz2.compress(bz2.compress(NOISE)), "compressed twice; unpack it once"),
    "xz": (bz2.compress(lzma.compress(NOISE)), "compressed twice; unpack it once"),
    "parquet": (gzip.compress(b"PAR1" + NOISE), "a compressed parquet file; unpack it"),
    "zip of conversations": (STORED.getvalue(), "a zip archive; unpack it first"),
    "tar of conversations": (gzip.compress(TARRED.getvalue()), "a tar archive; unpack it first"),
    "utf-16": (JSON.decode().encode("utf-16") * 98, "text in UTF-16; convert it"),
    "utf-16 without a mark": ((JSON.decode() * 98).encode("utf-16-le"), "binary data, or text in UTF-16"),
    "gguf": (b"GGUF\x03\0\0\0" + NOISE, "a GGUF file, which holds a model"),
    "sqlite": (b"SQLite format 3\0" + NOISE, "an SQLite database"),
    "yaml": (b"- messages:\n  - role: user\n    content: hi\n" * 30, "YAML"),
    "yaml of one document": (b"---\nmessages:\n- role: user\n" * 30, "YAML"),
    "html": (b"<!doctype html>\n<p>hi\n" * 49, "HTML or XML"),
    "wrong column": (b'{"question": "how are you", "n": 12}\n' * 98, 'its keys are "question", "n"'),
    "one document": (json.dumps([{"a": n} for n in range(98)], indent=1).encode(), 'its keys are "a"'),
    "a key around it": (json.dumps({"data": [{"messages": [USER]}] * 98}).encode(), 'its keys are "data"'),
    "prose": (b"It was a dark night\n" * 98, "text; expected JSON lines"),
    "torn": (JSON[:-4], "not valid JSON"),
}


@table("name", FILES)
def test_a_small_sample_of_the_wrong_kind_is_one_sentence(tmp_path: Path, name: str) -> None:
    """Catches 98 error records, or a table of zeros, for a CSV, an archive, a database; and a first conversation that
    is lost in the header of an archive."""
    data, what = FILES[name]
    (tmp_path / "in.jsonl").write_bytes(data)
    records = []
    with pytest.raises(UsageError, match="in.jsonl") as caught:
        for record in open_source(str(tmp_path / "in.jsonl")):
            records.append(record)
    assert not records and what in str(caught.value)
    count = {"csv": "none of its 98 lines is", "torn": "its only line is not", "html": "none of its 98 lines is"}
    assert count.get(name, "") in str(caught.value)


@table("data", [b"", b"\n \n", b"[]", b"\xef\xbb\xbf", gzip.compress(b"", mtime=0)])
def test_nothing_but_empty_files_is_refused(tmp_path: Path, data: bytes) -> None:
    """Catches a run of nothing that ends well; beside other files an empty one is a warning."""
    empty, good, told = tmp_path / "empty", tmp_path / "good", list[str]()
    empty.write_bytes(data)
    good.write_bytes(JSON)
    with pytest.raises(UsageError, match=r"empty is empty: there is nothing to answer"):
        list(open_source(str(empty)))
    [record] = open_source(find_inputs([str(empty), str(good)]), warn=told.append)
    assert record.line > 0 and told == [f"{empty} is empty"]
    assert len(list(open_source(find_inputs([str(good), str(empty)])))) == 1


@table(
    "line, reason",
    [
        ({"messages": [{"role": "bot", "content": "x"}]}, 'messages[0].role is "bot"; expected'),
        ({"messages": [USER], "n": 0}, "n is 0; expected an integer from 1 to 128"),
    ],
)
def test_a_fault_in_lines_of_the_right_kind_is_called_by_its_name(
    tmp_path: Path, line: dict[str, object], reason: str
) -> None:
    """Catches a user who is sent to look for another format because of one field."""
    (tmp_path / "in.jsonl").write_text((json.dumps(line) + "\n") * 300)
    with pytest.raises(UsageError, match="the first 100 lines all fail in the same way") as caught:
        list(open_source(str(tmp_path / "in.jsonl")))
    assert reason in str(caught.value) and str(caught.value).endswith("; correct that in its lines")


NONE = '{"messages": []}'


@table("lines", [
    *([*["no"] * good, JSON.decode().strip(), *["no"] * (299 - good)] for good in (1, 50, 99)),
    *([*first, *[NONE] * 300] for first in ([JSON.decode().strip()], ["no"], [NONE, '{"messages": 3}'])),
    ["no", NONE] * 150,
])  # fmt: skip
def test_one_line_of_another_kind_is_enough(tmp_path: Path, lines: list[str]) -> None:
    """Catches a file that is given up for lines that are bad in part, for faults of their own that are taken for one of
    the file, or in its middle; and a bound that is off by one."""
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    assert len(list(open_source(str(tmp_path / "in.jsonl")))) == len(lines)
