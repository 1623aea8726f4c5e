"""OUT as a file: order, rewriting, what the file is when a write fails."""

from __future__ import annotations

import errno
import io
import json
import os
import random
from pathlib import Path
from unittest.mock import Mock

import pytest

from apcbatch import regular_files
from apcbatch.address import output_place
from apcbatch.errors import StoppedError, UsageError
from apcbatch.job import sink as sink_module
from apcbatch.job.disk import Disk
from apcbatch.job.sink import FileSink, StreamSink, open_sink
from tests.effort import table


def line(number):
    return b'{"id":"apc-%06d","x":"%s"}\n' % (number, b"y" * (number % 50))


def test_ordered_sorts_by_number_beyond_six_digits(tmp_path):
    """Fault: numbers are compared as text, or a line is lost in the rewriting."""
    numbers = [*range(995, 1005), *range(999_995, 1_000_005), 0, 7]
    random.Random(3).shuffle(numbers)
    sink = FileSink(tmp_path / "out.jsonl")
    for number in numbers:
        sink.append(line(number))
    os.chmod(sink.path, 0o640)
    sink.finish(ordered=True)
    assert sink.path.read_bytes() == b"".join(map(line, sorted(numbers)))
    assert sink.path.stat().st_mode & 0o777 == 0o640
    sink.append(line(2_000_000))
    assert sink.path.read_bytes().endswith(line(2_000_000)), "the sink continues with the new file"
    with pytest.raises(UsageError, match="another run"):
        FileSink(tmp_path / "out.jsonl")
    sink.close()
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_a_file_in_order_is_not_rewritten(tmp_path):
    """Fault: --ordered copies a large file for nothing."""
    sink = FileSink(tmp_path / "out.jsonl")
    for one in (b"{}\n", b"{}\n", line(1), line(2), line(2), line(3)):
        sink.append(one)
    inode = sink.path.stat().st_ino
    sink.finish(ordered=True)
    assert sink.path.stat().st_ino == inode
    sink.close()


class WatchedDisk(Disk):
    """Notes the calls that make lines safe, and what empties the file."""

    def __init__(self):
        self.calls = []

    def truncate(self, fd, size):
        super().truncate(fd, size)
        self.calls.append("truncate")

    def sync(self, fd):
        super().sync(fd)
        self.calls.append("sync")

    def sync_folder(self, folder):
        super().sync_folder(folder)
        self.calls.append(folder)


def test_what_was_written_is_synced_once(tmp_path, monkeypatch):
    """Fault: an OUT that was emptied has its old lines after a power cut, or idle runs sync OUT again and again."""
    monkeypatch.setattr(sink_module, "BackgroundCall", lambda: Mock(begin=lambda call: call(), is_busy=False))
    monkeypatch.setattr(sink_module, "SYNC_EVERY_S", 0.0)
    sink = FileSink(tmp_path / "out.jsonl", disk := WatchedDisk())
    sink.truncate()
    assert disk.calls == ["truncate", "sync", str(tmp_path)]
    for number in range(2):
        sink.append(line(number))
        for _ in range(2):
            sink.sync_if_due()
        sink.finish(ordered=False)
        assert disk.calls[3:] == ["sync"] * (number + 1)
    sink.append(line(2))
    sink.finish(ordered=False)
    sink.finish(ordered=False)
    assert disk.calls[3:] == ["sync"] * 3
    sink.close()


def test_what_needs_no_change_is_not_touched(tmp_path):
    """Fault: a run that adds no line syncs OUT, or one that finds no torn line cuts it at its end."""
    (tmp_path / "out.jsonl").write_bytes(line(1))
    sink = FileSink(tmp_path / "out.jsonl", disk := WatchedDisk())
    assert sink.cut_torn_line() == 0
    sink.finish(ordered=False)
    sink.close()
    assert disk.calls == []


def test_rewriting_leaves_no_file_open(tmp_path):
    """Fault: each rewriting keeps the file that was replaced on the disk, or another run may write the new one."""
    sink = FileSink(tmp_path / "out.jsonl")
    sink.append(line(1))
    before = len(os.listdir("/proc/self/fd"))
    sink.keep(lambda offset, one: True)
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(UsageError, match="is being written by another run; wait for it, or choose another"):
        FileSink(tmp_path / "out.jsonl")
    sink.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1


def test_a_file_system_without_locks_will_do(tmp_path, monkeypatch):
    """Fault: a run on a file system that cannot lock files ends in a traceback."""

    def refuse(fd, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(regular_files.fcntl, "flock", refuse)
    sink = FileSink(tmp_path / "out.jsonl")
    sink.append(line(1))
    sink.finish(ordered=True)
    sink.close()
    assert sink.path.read_bytes() == line(1)


def test_no_line_goes_behind_half_of_another_program_s(tmp_path):
    """Fault: a line is appended to what another program has begun to write, and neither can be read."""
    sink = FileSink(tmp_path / "out.jsonl")
    sink.append(line(1))
    with open(sink.path, "ab") as other:
        other.write(b"half")
    with pytest.raises(StoppedError, match="was written to by another program while this run wrote it"):
        sink.append(line(2))
    assert sink.path.read_bytes() == line(1) + b"half"
    sink.close()


@pytest.fixture
def clocked(tmp_path, monkeypatch):
    """(a sink opened at 10 s, the list that holds the time, what syncs in the background)."""
    clock = [10.0]
    monkeypatch.setattr(sink_module.time, "monotonic", lambda: clock[0])
    background = Mock(is_busy=False, begun=[])  # notes when a call begins, and is waited for
    background.begin = lambda call: background.begun.append(clock[0])
    background.finish = lambda: background.begun.append("finish")
    monkeypatch.setattr(sink_module, "BackgroundCall", lambda: background)
    sink = FileSink(tmp_path / "out.jsonl")
    yield sink, clock, background
    sink.close()


def test_lines_are_synced_as_often_as_they_should_be(clocked):
    """Fault: each line is synced, which takes longer than the answers; or none is once a sync has taken long."""
    sink, clock, background = clocked
    for number, (now, is_busy) in enumerate([(11.9, False), (12.0, False), (13.9, False), (14.0, True), (14.1, False)]):
        sink.append(line(number))
        clock[0], background.is_busy = now, is_busy
        sink.sync_if_due()
    assert background.begun == [12.0, 14.1]
    sink.finish(ordered=False)
    assert background.begun[2:] == ["finish"]


@pytest.mark.parametrize("call", ["sync_if_due", "finish"])
@pytest.mark.parametrize(
    ("size", "words"),
    [
        (None, "was removed, renamed or replaced while this run wrote it"),
        (3, "was shortened by another program while this run wrote it: it has 3 bytes of"),
        (2000, "was written to by another program while this run wrote it: it has 2,000 bytes of"),
    ],
)
def test_what_others_do_to_out_stops_the_run(clocked, call, size, words):
    """Fault: a run answers into a file that is gone, or the error names the wrong change."""
    sink, clock, _ = clocked
    sink.append(line(1))
    if size is None:
        sink.path.unlink()
    else:
        os.truncate(sink.path, size)
    clock[0] = 12.0
    with pytest.raises(StoppedError, match=words):
        sink.finish(ordered=False) if call == "finish" else sink.sync_if_due()


def test_only_an_unused_file_of_this_run_is_removed(tmp_path):
    """Fault: a run that is refused leaves an empty OUT, or takes another one with it."""
    for case, is_left in [
        ("new", False),
        ("filled", False),
        ("there", True),
        ("written", True),
        ("wanted", True),
        ("replaced", True),
    ]:
        path = tmp_path / "out.jsonl"
        if case == "there":
            path.touch()
        sink = FileSink(path)
        if case == "filled":
            sink.fill(iter([line(1)]))
        elif case == "written":
            sink.append(line(1))
        elif case == "wanted":
            sink.remove_if_unused = False
        elif case == "replaced":
            (tmp_path / "other").touch()
            (tmp_path / "other").rename(path)
        sink.close()
        assert path.exists() == is_left


def test_a_file_goes_on_after_it_was_emptied_or_cut(tmp_path):
    """Fault: the run that empties OUT, or cuts off its torn line, takes the new size for another program's doing."""
    (tmp_path / "out.jsonl").write_bytes(line(1) + b"torn")
    sink = FileSink(tmp_path / "out.jsonl")
    sink.cut_torn_line()
    sink.append(line(2))
    assert sink.path.read_bytes() == line(1) + line(2)
    sink.truncate()
    sink.append(line(3))
    assert sink.path.read_bytes() == line(3)
    sink.close()


def test_a_lock_that_is_given_up_soon_is_waited_for(tmp_path, monkeypatch):
    """Fault: a run that continues a killed one at once is refused, as a helper process that was being started still
    has the killed one's OUT open."""
    killed = FileSink(tmp_path / "out.jsonl")
    monkeypatch.setattr("apcbatch.regular_files.time.sleep", lambda seconds: killed.close())
    FileSink(tmp_path / "out.jsonl").close()


def test_an_out_that_cannot_be_opened_leaves_nothing_open(tmp_path):
    """Fault: each refused OUT costs the process a descriptor, or is a traceback."""
    sink = FileSink(tmp_path / "out.jsonl")
    before = len(os.listdir("/proc/self/fd"))
    for path, words in (
        ("out.jsonl", "another run"),
        ("missing/o", "cannot be opened: No such file"),
        ("", "cannot be opened: Is a directory"),
    ):
        with pytest.raises(UsageError, match=words):
            open_sink(str(tmp_path / path), ordered=False)
    assert len(os.listdir("/proc/self/fd")) == before
    sink.close()


@pytest.mark.parametrize(("further", "first"), [(-1, 1), (0, 0), (1, 0)])
def test_the_last_lines_are_whole_ones(tmp_path, further, first):
    """Fault: the first of the last lines is torn or left out, or a bound that is the whole file is an error."""
    sink = FileSink(tmp_path / "out.jsonl")
    lines = [line(number) for number in range(3)]
    for one in lines:
        sink.append(one)
    begins = [0, len(lines[0]), len(lines[0] + lines[1])]
    assert list(sink.lines(len(b"".join(lines)) + further)) == list(zip(begins, lines, strict=True))[first:]
    sink.close()


def test_lines_without_a_number_come_first_in_their_order():
    """Fault: lines that compare equal change places, or one without a number is taken for a request's."""
    stream = io.BytesIO()
    sink = StreamSink(stream, "OUT", ordered=True)
    others = [b'{"x":%d}\n' % number for number in range(100)]
    for one in [line(5), *others, line(0)]:
        sink.append(one)
    assert stream.getvalue() == b""
    sink.finish(ordered=True)
    sink.close()
    assert stream.getvalue() == b"".join([*others, line(0), line(5)])


def test_short_writes_are_completed(tmp_path, monkeypatch):
    """Fault: half a line, because the system took only a part of it; or lines wait in a buffer, and a kill takes them
    along."""
    sink = FileSink(tmp_path / "out.jsonl")
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: write(fd, data[:3]))
        sink.append(line(4))
    assert sink.path.read_bytes() == line(4)
    sink.close()


def test_a_pipe_is_a_stream(tmp_path):
    """Fault: a named pipe is locked, truncated or read back."""
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    sink = open_sink(str(tmp_path / "pipe"), ordered=False)
    assert isinstance(sink, StreamSink)
    sink.append(line(1))
    assert os.read(reader, 1000) == line(1)
    os.close(reader)


def test_only_what_a_link_led_to_at_first_is_written(tmp_path):
    """Fault: rewriting replaces a symbolic link by a file, or a link that is changed after the checks leads the lines
    to another file."""
    for name in ("real.jsonl", "other.jsonl"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "link.jsonl").symlink_to("real.jsonl")
    place = output_place(str(tmp_path / "link.jsonl"))
    (tmp_path / "link.jsonl").unlink()
    (tmp_path / "link.jsonl").symlink_to("other.jsonl")
    with pytest.raises(UsageError, match="link.jsonl cannot be opened: Too many levels of symbolic links"):
        FileSink(tmp_path / "link.jsonl")
    sink = FileSink(Path(place))
    sink.append(line(2))
    sink.append(line(1))
    sink.finish(ordered=True)
    sink.close()
    assert (tmp_path / "real.jsonl").read_bytes() == line(1) + line(2) and not (tmp_path / "other.jsonl").read_bytes()
    assert (tmp_path / "link.jsonl").is_symlink()


def test_a_closed_standard_output_is_a_sentence(monkeypatch):
    """Fault: a process without standard output breaks where its lines should go."""
    monkeypatch.setattr("sys.stdout", None)
    with pytest.raises(UsageError, match="standard output is closed; give -o a file"):
        open_sink("-", ordered=False)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "OUT cannot be written: No space left on device"),
        (BrokenPipeError(), "the reader of the results is gone; nothing more is computed"),
    ],
)
def test_a_stream_that_breaks_stops_the_run(error, sentence, monkeypatch):
    """Fault: a run that continues without a reader, and a second complaint as Python closes the stream."""
    silenced = []
    monkeypatch.setattr(sink_module, "silence", silenced.append)

    class Broken(io.BytesIO):
        def write(self, data):
            raise error

    stream = Broken()
    with pytest.raises(StoppedError, match=sentence):
        StreamSink(stream, "OUT", ordered=False).append(line(1))
    assert silenced == [stream]


@table("is_terminal", [False, True])
def test_a_terminal_gets_no_control_characters(is_terminal: bool) -> None:
    """Fault: an answer moves the cursor of the terminal that shows it, or a pipe gets other bytes than a file."""

    class Stream(io.BytesIO):
        def isatty(self) -> bool:
            return is_terminal

    stream = Stream()
    given = '{"text":"\u009b2J é"}\n'.encode()
    StreamSink(stream, "OUT", ordered=False).append(given)
    shown = stream.getvalue()
    assert (shown == given) is not is_terminal and json.loads(shown) == json.loads(given)
    assert (b"\xc2\x9b" in shown) is not is_terminal


CONTENTS = [
    b"", b"\n", b"a", b"ab", b"a\n", b"\na", b"a\nb", b"abc\n", b"abcd\n", b"abcde", b"abcdefghi", b"a\nbcdefghijk",
    b"ab\n" * 5, b"ab\n" * 5 + b"c", b"abcdefg\nhijklmno", b"\n" * 9, b"abcdefgh\n", b"\nabcdefgh", b"abc\nabcd",
]  # fmt: skip


def test_what_follows_the_last_newline_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a torn line that is kept, or a whole one that is lost, wherever the reading is cut into windows."""
    for content in CONTENTS:
        for window in (1, 4, 1 << 20):
            monkeypatch.setattr(sink_module, "WINDOW_BYTES", window)
            monkeypatch.setattr(sink_module, "LINE_BYTES", window)
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
