"""Files beside the weights are read only where they are regular and not too long."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from apcbatch.regular_files import identity, open_regular_file, read_regular_file


def test_a_file_is_read_up_to_the_bound(tmp_path: Path) -> None:
    """Catches a bound that is off by one, and a link that is not followed."""
    path = tmp_path / "config.json"
    path.write_bytes(b"12345")
    (tmp_path / "link").symlink_to(path)
    assert read_regular_file(path, 5) == b"12345"
    assert read_regular_file(str(tmp_path / "link"), 5) == b"12345"
    with pytest.raises(OSError) as caught:
        read_regular_file(path, 4)
    assert caught.value.strerror == "it holds more than 4 bytes; at most that many are read"


def test_other_kinds_are_named(tmp_path: Path) -> None:
    """Catches a folder, a device or a socket that is read, one whose error says nothing, a named pipe whose writer a
    run waits for, and the ValueError of a NUL character in a path."""
    os.mkfifo(tmp_path / "pipe")
    for path, kind in ((tmp_path, "a folder"), (Path("/dev/zero"), "a device"), (tmp_path / "pipe", "a named pipe")):
        with pytest.raises(OSError) as caught:
            open_regular_file(path)
        assert caught.value.strerror == f"it is {kind}; expected a regular file"
    with pytest.raises(OSError, match="it is not a file name"):
        open_regular_file("a\0b")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        with pytest.raises(OSError):
            open_regular_file(tmp_path / "socket")
    with pytest.raises(FileNotFoundError):
        open_regular_file(tmp_path / "absent")


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    """Catches the descriptor of a refused path that is left open."""
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(8):
        with pytest.raises(OSError):
            open_regular_file(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_file_has_no_identity(tmp_path: Path) -> None:
    """Fault: a name that no file has ends the run."""
    assert identity(tmp_path / "gone") is identity("a\0b") is None
    assert identity(tmp_path) is not None
