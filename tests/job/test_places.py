"""The place that the name of an output file leads to: what is refused, what is followed, what is a stream."""

from __future__ import annotations

import gzip
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from apcbatch.address import is_stream, output_place
from apcbatch.config import OPTIONS, Config
from apcbatch.errors import UsageError
from apcbatch.job.disk import Disk, write_file
from apcbatch.job.output_paths import check_outputs
from apcbatch.option_values import parse_value
from tests.chats import conversation, write_lines

FOLDERS = (
    "", "./", "{here}/", "/{here}//", "sub/../", "linked/", "sub/up/", "/proc/self/cwd/", "/proc/self/root{here}/",
    "/dev/fd/{folder}/", "gone/../", "in.jsonl/../",
)  # fmt: skip
NAMES = ("in.jsonl", "soft", "chain", "hard", "soft-with-dot")
ENDS = ("", "/", "//", "/.", "/./", "/..", "/x/..", "/x/../", "/../in.jsonl")
SCHEMES = (
    "file:", "FILE://", "file://localhost", "Local:", "local://", "asynclocal://", "simplecache::file:",
    "Filecache::local://", "blockcache://::simplecache::FILE:",
)  # fmt: skip
SUMMARY = b'{"requests":1,"hit_rate":0}'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, object]]:
    """The current folder, with an input and other names of it; the values that the spellings need. The input could be
    a summary, so that nothing but its place keeps --summary from replacing it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "in.jsonl").write_bytes(SUMMARY)
    os.link("in.jsonl", "hard")
    for link, target in {
        "linked": ".",
        "sub/up": "..",
        "soft": "in.jsonl",
        "chain": "soft",
        "soft-with-dot": "in.jsonl/.",
    }.items():
        os.symlink(target, link)
    descriptor = os.open(".", os.O_RDONLY)
    yield {"here": tmp_path, "folder": descriptor}
    os.close(descriptor)


def written(name: str, inputs: tuple[str, ...] = ("in.jsonl",)) -> str | None:
    """Write a summary to a name, through the checks of a run; its place, or None where it is refused."""
    try:
        place = parse_value(OPTIONS["summary"], name, "--summary")
        check_outputs(Config(), inputs, {}, {"--summary": place})
    except (UsageError, ValueError):
        return None
    write_file(place, [b"new"], Disk())
    return str(place)


@pytest.mark.parametrize("schemes", [("",), SCHEMES], ids=["names", "addresses"])
def test_no_spelling_of_a_name_walks_round_the_checks(schemes: tuple[str, ...], folder: dict[str, object]) -> None:
    """Fault: `--summary in.jsonl/`, or another of 540 names and 756 addresses, replaces the input: it is another file
    for the check, and the same one for the writer."""
    names = [f"{begin}{name}" for begin in FOLDERS for name in NAMES]
    spellings = [*itertools.product(schemes, names if schemes == ("",) else names[::6], ENDS)]
    assert len(spellings) >= (540 if schemes == ("",) else 756)
    inodes = {name: os.lstat(name).st_ino for name in (*NAMES, "linked", "sub/up")}
    for scheme, name, end in spellings:
        spelled = scheme + name.format(**folder) + end
        place = written(spelled)
        if place is not None:  # file://localhostX is a name of its own
            assert scheme == "file://localhost" and Path(place).read_bytes() == b"new", spelled
            os.unlink(place)
        assert Path("in.jsonl").read_bytes() == SUMMARY, spelled
    assert inodes == {name: os.lstat(name).st_ino for name in inodes} and os.listdir("sub") == ["up"]


@pytest.mark.parametrize("begin", ["", "Memory://", "simplecache::memory://"])
def test_no_spelling_of_an_address_walks_round_the_checks(begin: str, folder: dict[str, object]) -> None:
    """Fault: `memory://bucket/in.jsonl/.` is no file of the checks, and the file system writes to one."""
    system = fsspec.filesystem("memory")
    system.pipe_file("/bucket/in.jsonl", b"precious")
    for name, end in itertools.product(("bucket/in.jsonl", "/bucket//in.jsonl", "bucket/x/../in.jsonl"), ENDS):
        spelled = (begin or "memory://") + name + end
        with pytest.raises((UsageError, ValueError)):
            place = parse_value(OPTIONS["summary"], spelled, "--summary")
            check_outputs(Config(), ("memory://bucket/in.jsonl",), {}, {"--summary": place})
    system.store.clear()


def test_the_place_of_a_name(folder: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: what a link leads to is not what is checked, a stream is replaced by a file, or a name that is read a
    second time, as in the command that continues, means something else."""
    monkeypatch.setenv("HOME", str(tmp_path))
    os.symlink("sub/later", "dangling")
    os.symlink("/dev/stdout", "out-of-here")
    os.mkfifo("pipe")
    for name, place in (
        ("new", "new"),
        ("./sub//new", "sub/new"),
        ("sub/../new", "new"),
        ("file:new", "new"),
        ("linked/new", "{here}/new"),
        ("sub/up/new", "{here}/new"),
        ("/proc/self/cwd/new", "{here}/new"),
        ("/dev/fd/{folder}/new", "{here}/new"),
        ("{here}/sub/../new", "{here}/new"),
        ("hard", "hard"),
        ("chain", "{here}/in.jsonl"),
        ("dangling", "{here}/sub/later"),
        ("out-of-here", "/dev/fd/1"),
        ("/dev/stdout", "/dev/fd/1"),
        ("/proc/self/fd/2", "/dev/fd/2"),
        ("/dev/null", "/dev/null"),
        ("pipe", "pipe"),
        ("-", "-"),
        ("./-", "./-"),
        ("file:-", "./-"),
        ("./s3:", "./s3:"),
        ("-x", "-x"),
        ("s3://bucket/new", "s3://bucket/new"),
        ("FILE:~/new", "{here}/new"),
    ):
        found = output_place(name.format(**folder))
        assert found == place.format(**folder) and output_place(found) == found, name


def test_a_name_that_no_file_can_have_is_refused(folder: dict[str, object]) -> None:
    """Fault: a name that the system would refuse is written to as another one, or ends in a traceback."""
    os.symlink("loop", "loop")
    for name, words in (
        ("in.jsonl/", "in.jsonl/ cannot be written: it names a folder; expected a file, such as out.jsonl"),
        ("sub", "sub cannot be written: it names a folder"),
        ("..", "it names a folder"),
        ("soft-with-dot", "it names a folder"),
        ("in.jsonl/x", "in.jsonl is no folder"),
        ("in.jsonl/../x", "Not a directory"),
        ("my gone/x", "its folder does not exist; mkdir -p 'my gone'"),
        ("loop", "Too many levels of symbolic links"),
        ("x" * 256, "File name too long"),
        ("a\0b", "it is no file name"),
        ("/dev/fd/987654", "/dev/fd/987654 cannot be written: no such descriptor is open"),
        ("/proc/self/exe", "only open descriptors"),
        ("/proc/self/task/../exe", "only open descriptors"),
        ("s3://bucket", "s3://bucket has no file name"),
        ("s3://u:hush@bucket/x/..", "s3://bucket/x/.. has no file name"),
    ):
        with pytest.raises(UsageError) as refused:
            output_place(name)
        assert words in str(refused.value), name


def test_every_output_of_a_command_is_read_as_one(apcbatch: Any, tmp_path: Path) -> None:
    """Fault: an option of some command writes to a name without asking for its place."""
    write_lines(tmp_path / "in.jsonl", [conversation(1)])
    assert apcbatch("run", "in.jsonl", "-o", "old.jsonl", "--max-tokens", 1).code == 0
    (tmp_path / "c.yaml").write_text("report: in.jsonl/\n")
    for words in (
        ("run", "in.jsonl", "-o"),
        ("run", "in.jsonl", "-o", "new.jsonl", "--summary"),
        ("run", "in.jsonl", "-o", "new.jsonl", "--report"),
        ("run", "in.jsonl", "--config", "c.yaml"),
        ("plan", "in.jsonl", "--json"),
        ("tune-block-size", "in.jsonl", "--json"),
        ("tune-block-size", "in.jsonl", "--write"),
        ("report", "old.jsonl", "-o"),
    ):
        done = apcbatch(*words, *["file:in.jsonl/."] * (words[-1] != "c.yaml"))
        assert done.code == 2 and "in.jsonl/" in done.stderr and "it names a folder" in done.stderr, done.stderr
    assert not (tmp_path / "new.jsonl").exists()
    os.mkdir("in.answers.jsonl")
    done = apcbatch("run", "in.jsonl")
    assert done.code == 2 and "in.answers.jsonl cannot be written: it names a folder" in done.stderr


def test_what_is_below_dev_and_proc_is_what_its_kind_says(apcbatch: Any, tmp_path: Path) -> None:
    """Fault: a file in /dev/shm or /proc/self/cwd counts as a stream: a second --resume fails, `.gz` is written plain,
    and two summaries are joined in one file."""
    write_lines(tmp_path / "in.jsonl", [conversation(1)])
    with open("/proc/self/cmdline", "rb") as other, open(tmp_path / "in.jsonl", "rb") as file:
        assert is_stream(f"/dev/fd/{file.fileno()}") and is_stream(f"/proc/self/fd/{other.fileno()}")
    assert is_stream("/dev/null") and is_stream("/dev/stdin")
    assert not any(map(is_stream, ("/dev/shm/new", "/dev/shm", "/proc/self/cwd/in.jsonl", "in.jsonl", "gone/x")))
    run = ("run", "in.jsonl", "--max-tokens", 1, "-o", "/proc/self/cwd/out.jsonl.gz", "--summary", "/proc/self/cwd/s")
    for options in ((), ("--resume",), ("--resume",)):
        done = apcbatch(*run, *options)
        assert done.code == 0, done.stderr
        assert json.loads((tmp_path / "s").read_bytes()) == done.summary
    assert gzip.decompress((tmp_path / "out.jsonl.gz").read_bytes()).count(b"\n") == 2
