"""An input of which nothing can be used ends after its first hundred lines, with what it seems to be."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
from pathlib import Path

import pytest
import zstandard

from apcbatch.data.records import BadLine
from apcbatch.data.source import open_source
from apcbatch.errors import UsageError
from tests.data.conftest import USER

NOISE = random.Random(0).randbytes(200_000)
CSV = b"id,question\n" + b"".join(b"%d,how are you\n" % n for n in range(300))
FILES = {
    "csv": (CSV, "a table of comma- or tab-separated values"),
    "tsv": (CSV.replace(b",", b"\t"), "a table of comma- or tab-separated values"),
    "gzip": (gzip.compress(gzip.compress(NOISE)), "compressed twice; unpack it once"),
    "zstd": (gzip.compress(zstandard.compress(NOISE)), "compressed twice; unpack it once"),
    "bzip2": (bz2.compress(bz2.compress(NOISE)), "compressed twice; unpack it once"),
    "xz": (bz2.compress(lzma.compress(NOISE)), "compressed twice; unpack it once"),
    "parquet": (gzip.compress(b"PAR1" + NOISE), "a compressed parquet file; unpack it"),
    "utf-16": (CSV.decode().encode("utf-16"), "text in UTF-16; convert it"),
    "utf-16 without a mark": (CSV.decode().encode("utf-16-le"), "binary data, or text in UTF-16"),
    "wrong column": (b'{"question": "how are you", "n": 12}\n' * 300, "JSON lines of another kind"),
    "one document": (json.dumps([{"a": n} for n in range(300)], indent=1).encode(), "JSON lines of another kind"),
    "prose": (b"It was a dark night\n" * 300, "something else than conversations"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_what_cannot_be_used_at_all_ends_after_a_hundred_lines(tmp_path: Path, name: str) -> None:
    """Catches a CSV, a wrong column, compressed data under a wrong name: an error record for each of its lines."""
    data, what = FILES[name]
    (tmp_path / "in.jsonl").write_bytes(data)
    records = []
    with pytest.raises(UsageError, match="in.jsonl: the first 100 lines all fail in the same way") as caught:
        for record in open_source(str(tmp_path / "in.jsonl")):
            records.append(record)
    assert len(records) == 100 and all(isinstance(record, BadLine) for record in records)
    assert f"it seems to be {what}" in str(caught.value)


@pytest.mark.parametrize(
    ("line", "reason"),
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


@pytest.mark.parametrize("good", [1, 50, 100])
def test_one_line_that_can_be_used_is_enough(tmp_path: Path, good: int) -> None:
    """Catches a file that is given up for lines that are bad in part, and a bound that is off by one."""
    lines = ["no"] * 300
    lines[good] = json.dumps({"messages": [USER]})
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    assert len(list(open_source(str(tmp_path / "in.jsonl")))) == 300


def test_a_hundred_bad_lines_are_a_hundred_error_records(tmp_path: Path) -> None:
    """Catches a short file that is refused where each line has its record."""
    (tmp_path / "in.jsonl").write_text("no\n" * 100)
    assert len(list(open_source(str(tmp_path / "in.jsonl")))) == 100


def test_lines_that_fail_for_different_reasons_are_all_reported(tmp_path: Path) -> None:
    """Catches faults of their own that are taken for one of the file."""
    lines = ["no", '{"messages": []}'] * 150
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    assert len(list(open_source(str(tmp_path / "in.jsonl")))) == 300
