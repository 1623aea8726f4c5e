"""Work beside a run: one piece at a time, and nothing that is raised is lost."""

from __future__ import annotations

import threading

import pytest

from apcbatch.job import disk
from apcbatch.job.disk import BackgroundCall, Disk
from apcbatch.job.sink import FileSink


class Interrupt(BaseException):
    pass


def fail() -> None:
    raise Interrupt


def test_what_ends_at_once_is_raised_at_once() -> None:
    """Catches a failure of a quick disk that shows seconds later."""
    work = BackgroundCall()
    with pytest.raises(Interrupt):
        work.begin(fail)
    work.finish()
    work.begin(lambda: None)
    assert not work.is_busy


def test_a_slow_piece_is_waited_for_and_its_failure_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches two pieces at a time, and a failure that nobody hears of."""
    monkeypatch.setattr(disk, "SHORT_CALL_S", 0.001)
    release, work, order = threading.Event(), BackgroundCall(), list[str]()

    def slow() -> None:
        release.wait()
        order.append("slow")
        fail()

    work.begin(slow)
    assert work.is_busy
    daemons = [thread.daemon for thread in threading.enumerate() if thread.name == "apcbatch-disk"]
    assert daemons == [True], "a process that ends early does not wait for it"
    threading.Timer(0.05, release.set).start()
    with pytest.raises(Interrupt):
        work.begin(lambda: order.append("next"))
    work.finish()
    work.begin(lambda: order.append("next"))
    assert order == ["slow", "next"]


def test_lines_that_come_during_a_slow_sync_are_synced_at_the_end(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an engine that waits for a slow disk, and a line that is taken for safe because it came meanwhile."""
    monkeypatch.setattr("apcbatch.job.sink.SYNC_EVERY_S", 0.0)
    release, synced = threading.Event(), list[bytes]()

    class SlowDisk(Disk):
        def sync(self, fd: int) -> None:
            synced.append((tmp_path / "out").read_bytes())
            assert release.wait(5)

    sink = FileSink(tmp_path / "out", SlowDisk())
    sink.remove_if_unused = False
    sink.append(b"1\n")
    sink.sync_if_due()
    sink.append(b"2\n")
    sink.sync_if_due()
    assert synced == [b"1\n"], "the second one waits for the first"
    release.set()
    sink.finish(ordered=False)
    assert synced == [b"1\n", b"1\n2\n"]
    sink.close()
