"""What a file of results looks like after a kill, and where its last whole line ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from apcbatch.job import sink
from apcbatch.job.sink import FileSink

CONTENTS = [
    b"", b"\n", b"a", b"ab", b"a\n", b"\na", b"a\nb", b"abc\n", b"abcd\n", b"abcde", b"abcdefghi", b"a\nbcdefghijk",
    b"ab\n" * 5, b"ab\n" * 5 + b"c", b"abcdefg\nhijklmno", b"\n" * 9, b"abcdefgh\n", b"\nabcdefgh", b"abc\nabcd",
]  # fmt: skip


def test_what_follows_the_last_newline_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a torn line that is kept, or a whole one that is lost, wherever the reading is cut into windows."""
    for content in CONTENTS:
        for window in (1, 4, 1 << 20):
            monkeypatch.setattr(sink, "WINDOW_BYTES", window)
            monkeypatch.setattr(sink, "LINE_BYTES", window)
            path = tmp_path / "out.jsonl"
            path.write_bytes(content)
            out = FileSink(path)
            whole = content[: content.rfind(b"\n") + 1]
            assert out.has_lines() == bool(whole), window
            assert out.cut_torn_line() == len(content) - len(whole), window
            assert path.read_bytes() == whole, window
            assert out.cut_torn_line() == 0, window
            lines = list(out.lines())
            assert [line for _, line in lines] == whole.splitlines(keepends=True), window
            assert all(out.line_at(offset) + b"\n" == line for offset, line in lines), window
            out.keep(lambda offset, line: len(line) > 2)
            assert path.read_bytes() == b"".join(line for _, line in lines if len(line) > 2), window
            out.close()
