"""Lines: compression, limits, ends of lines, damage."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import random
import sys
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from apcbatch.data.input import lines
from apcbatch.data.input.files import check_readable, open_stream
from apcbatch.data.input.lines import MAX_LINE_BYTES, BrokenEnd, Line, LongLine
from apcbatch.errors import UsageError
from tests.effort import table

PACKED = (".gz", ".zst", ".bz2", ".xz")


def read_lines(name: str, limit: int = MAX_LINE_BYTES) -> Iterator[tuple[int, Line]]:
    """The numbered lines of a file that are not blank."""
    with open_stream(name) as stream:
        for number, data in lines.read_lines(name, stream.chunks(), limit):
            if data != b"":
                yield number, data


def compress(data: bytes, suffix: str) -> bytes:
    """The bytes of a file with this suffix that holds the data."""
    if suffix == ".gz":
        return gzip.compress(data)
    if suffix == ".bz2":
        return bz2.compress(data, 1)
    if suffix == ".xz":
        return lzma.compress(data)
    return zstandard.compress(data) if suffix == ".zst" else data


@table("name", ["in.jsonl", "in.jsonl.GZ", "in.zst", "in", "in.parquet", "in.csv"])
@table("packing", ["", *PACKED])
def test_lines_are_numbered_whatever_the_name_and_the_compression(tmp_path: Path, name: str, packing: str) -> None:
    """A number that skips blank lines names the wrong line in every error record; compressed data under a plain name
    are refused, or plain data under the name of compressed ones."""
    path = tmp_path / name
    path.write_bytes(compress(b'{"a":1}\n\n   \n{"b":2}\r\n{"c":3}', packing))
    assert list(read_lines(str(path))) == [(1, b'{"a":1}'), (4, b'{"b":2}\r'), (5, b'{"c":3}')]


@table("suffix", ["", *PACKED])
@table("data", [None, b"", b"\n", b"\n\n  \n"])
def test_an_empty_file_has_no_lines(tmp_path: Path, suffix: str, data: bytes | None) -> None:
    """Fault: an empty input, or what `touch x.zst` makes, is an error."""
    path = tmp_path / f"empty{suffix}"
    path.write_bytes(b"" if data is None else compress(data, suffix))
    assert list(read_lines(str(path))) == []


def test_a_byte_order_mark_is_dropped_before_each_line(tmp_path: Path) -> None:
    """Files from Windows editors begin with one, `cat` puts it inside, and JSON must not have any."""
    path = tmp_path / "bom.jsonl"
    path.write_bytes(b"\xef\xbb\xbf1\n\xef\xbb\xbf2\n")
    assert list(read_lines(str(path))) == [(1, b"1"), (2, b"2")]


def test_a_pipe_is_not_opened_twice(tmp_path: Path) -> None:
    """A check that opens the input takes the first bytes from a named pipe, or hangs on it."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    check_readable(str(path))
    writer = os.open(path, os.O_RDWR)
    os.write(writer, b"1\n2\n")
    lines = read_lines(str(path))
    assert next(lines) == (1, b"1")
    lines.close()
    os.close(writer)


@table("size", [9, 10, 11, 300_000, 600_000])
def test_lines_across_chunks_are_whole_and_long_ones_are_told(tmp_path: Path, size: int) -> None:
    """The limit holds to the byte, and the line after a long one is read as usual."""
    path = tmp_path / "long.jsonl"
    path.write_bytes(b"a\n" + b"x" * size + b"\nb\n" + b"y" * size)
    limit = 10 if size < 100 else 300_000
    line = b"x" * size if size <= limit else LongLine(size)
    last = b"y" * size if size <= limit else LongLine(size)
    assert list(read_lines(str(path), limit)) == [(1, b"a"), (2, line), (3, b"b"), (4, last)]


@pytest.mark.drawn(3)
@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["", *PACKED])
def test_a_long_line_is_not_held(tmp_path: Path, suffix: str) -> None:
    """A line of 50 MB over the limit costs its chunks and no more."""
    path = tmp_path / f"long.jsonl{suffix}"
    path.write_bytes(compress(b"[" + b" " * 50_000_000 + b"]\n1\n", suffix))
    tracemalloc.start()
    try:
        lines = list(read_lines(str(path), 2**20))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert lines == [(1, LongLine(50_000_002)), (2, b"1")]
    assert peak < 40 * 2**20


@table("dictionary, fits", [(31, True), (32, False)])
def test_an_xz_file_takes_up_to_256_mib(tmp_path: Path, dictionary: int, fits: bool) -> None:
    """Fault: a file packed with `xz -9e` or more is refused, or one that asks for all memory is not."""
    data = bytearray(lzma.compress(b"1\n"))
    data[16] = dictionary  # 192 or 256 MiB, in the header of the block, which ends with its checksum
    end = 12 + 4 * data[12]
    data[end : end + 4] = zlib.crc32(data[12:end]).to_bytes(4, "little")
    path = tmp_path / "a.xz"
    path.write_bytes(data)
    if fits:
        assert list(read_lines(str(path))) == [(1, b"1")]
    else:
        with pytest.raises(UsageError, match="memory usage limit exceeded"):
            list(read_lines(str(path)))


def test_several_frames_and_members_are_one_stream(tmp_path: Path) -> None:
    """Files joined with `cat` hold one frame or member after the other."""
    for suffix in PACKED:
        path = tmp_path / f"joined{suffix}"
        path.write_bytes(compress(b"1\n2", suffix) + compress(b"2\n3\n", suffix))
        assert [data for _, data in read_lines(str(path))] == [b"1", b"22", b"3"]


@pytest.mark.slow
@pytest.mark.parametrize("suffix", PACKED)
def test_damage_midway_names_the_line_that_was_reached(tmp_path: Path, suffix: str) -> None:
    """Catches a truncated download that looks like the whole dataset, and whole lines before the cut that are lost."""
    source = random.Random(0)
    whole = b"".join(source.randbytes(40).hex().encode() + b"\n" for _ in range(16_000))
    data = compress(whole, suffix)
    path = tmp_path / f"torn{suffix}"
    half = len(data) // 2
    for torn in (data[:half], data[:-1], data[:half] + b"\0" * half):
        path.write_bytes(torn)
        *lines, (line, end) = read_lines(str(path))
        assert [number for number, _ in lines] == list(range(1, line))
        if torn[-1]:  # cut short: without its check sum, damage inside gzip data can pass for some bytes
            assert b"".join(data + b"\n" for _, data in lines) == whole[: 81 * (line - 1)] and line > 1
        assert isinstance(end, BrokenEnd)
        assert f"torn{suffix} cannot be read further after line {line - 1}: " in end.reason


@table("packing", PACKED)
def test_compressed_stdin_is_unpacked(monkeypatch: pytest.MonkeyPatch, packing: str) -> None:
    """Catches a `-` that needs zcat, also where a pipe gives one byte at a time."""

    class Slow(io.BytesIO):
        def read1(self, size: int | None = -1, /) -> bytes:
            return super().read1(1)

    for stream in (io.BytesIO, Slow):
        monkeypatch.setattr(sys, "stdin", type("Stdin", (), {"buffer": stream(compress(b"1\n2\n", packing))}))
        assert list(read_lines("-")) == [(1, b"1"), (2, b"2")]


def test_what_is_not_a_readable_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong path is reported before anything is loaded, with what would be right."""
    with pytest.raises(UsageError, match="no such file or directory; give a file, - for stdin, or hf:org/name"):
        check_readable(str(tmp_path / "absent.jsonl"))
    with pytest.raises(UsageError, match="it is a folder"):
        check_readable(str(tmp_path))
    with pytest.raises(UsageError, match="not a file name"):
        check_readable("a\0b")
    path = tmp_path / "secret"
    path.touch()
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UsageError, match="cannot read stdin: it is closed"):
        check_readable("-")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UsageError, match="permission denied"):
        check_readable(str(path))
