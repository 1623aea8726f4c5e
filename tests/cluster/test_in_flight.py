"""The file that says what a worker was at, and who is blamed by it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from apcbatch.cluster.recovery import InFlightFile, make_file, read_in_flight, recover
from apcbatch.cluster.tasks import Item
from apcbatch.types import Request
from tests.effort import tries


def test_the_file_says_who_is_at_work(tmp_path: Path) -> None:
    """Catches a request that stays in the file, is missing in it, or takes another one's place."""
    path, expected = str(tmp_path / "at-work"), set[int]()
    in_flight = InFlightFile(path)
    for _ in range(tries(10_000)):
        number = random.randrange(60)
        if random.random() < 0.5:
            in_flight.begin(number)
            expected.add(number)
        else:
            in_flight.end(number)
            expected.discard(number)
        assert read_in_flight(path) == expected
    assert os.path.getsize(path) <= 60 * 8


def test_the_file_outlives_a_process(tmp_path: Path) -> None:
    """Catches numbers that are lost with the process that wrote them."""
    path = str(tmp_path / "at-work")
    code = (
        "import os, signal, sys\n"
        "from apcbatch.cluster.recovery import InFlightFile\n"
        "in_flight = InFlightFile(sys.argv[1])\n"
        "for number in (0, 7, 9): in_flight.begin(number)\n"
        "in_flight.end(7)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, path], check=False).returncode == -9
    assert read_in_flight(path) == {0, 9}


def test_files_that_were_left_behind_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a temporary folder that fills up with runs that were killed, and a live worker's or somebody else's file
    that goes."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    descriptors = len(os.listdir("/proc/self/fd"))
    first, second = make_file(), make_file()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    (tmp_path / "other").touch()
    for path in (first, tmp_path / "other"):
        os.utime(path, (1.0, 1.0))
    third = make_file()
    assert {str(path) for path in tmp_path.iterdir()} == {second, third, str(tmp_path / "other")}
    assert os.stat(third).st_mode & 0o777 == 0o600


def test_what_cannot_be_read_is_not_known(tmp_path: Path) -> None:
    """Catches a missing file that is taken for one that says nobody, and a torn one that ends the driver."""
    assert read_in_flight(str(tmp_path / "none")) is None
    (tmp_path / "torn").write_bytes((4).to_bytes(8, "little") + b"\1\2\3")
    assert read_in_flight(str(tmp_path / "torn")) == {3}


def items(count: int) -> list[Item]:
    return [Item(number, Request(str(number), [1])) for number in range(count)]


def test_only_who_was_at_work_is_blamed() -> None:
    """Catches blame for requests that had not begun, and a unit that is torn into pieces for nothing."""
    first, second = items(9)[:5], items(9)[5:]
    failed, groups = recover([first, second], {1, 6})
    assert [[item.number for item in group.items] for group in groups] == [[0, 2, 3, 4], [5, 7, 8], [1], [6]]
    assert [group.is_alone for group in groups] == [False, False, True, True]
    assert [item.deaths for item in first + second] == [0, 1, 0, 0, 0, 0, 1, 0, 0]
    assert not failed and recover([[first[1]]], {1}) == ([first[1]], [])
    failed, groups = recover([[second[1]], [first[0]]], ())
    assert not failed and [len(group.items) for group in groups] == [1, 1]


def test_who_ended_two_workers_alone_fails() -> None:
    """Catches a request that is given up with another one in flight, or that ends a third worker."""
    one, other = items(2)
    for in_flight, deaths, has_failed in (({0, 1}, 1, False), ({0, 1}, 2, False), ({0}, 3, True), ({1}, 3, True)):
        units = [[found] for found in (one, other) if found.number in in_flight]
        failed, _ = recover(units, in_flight)
        assert failed == ([found for unit in units for found in unit] if has_failed else [])
        assert all(found.deaths == deaths for unit in units for found in unit)


def test_nobody_knows_who_was_at_work() -> None:
    """Catches requests that are given up together, or that are not tried alone."""
    some = items(3)
    for _ in range(3):
        failed, groups = recover([some], None)
        assert not failed and [group.is_alone for group in groups] == [True] * 3
    assert recover([[some[0]]], None) == ([some[0]], [])
