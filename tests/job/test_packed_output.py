"""OUT in .gz and .zst: plain lines while the run continues, packed when it ends; nothing is lost in between."""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
import random
import shlex

import pytest
import zstandard

from apcbatch.config import Config
from apcbatch.errors import StoppedError, UsageError
from apcbatch.job import output as output_module
from apcbatch.job.disk import Disk
from apcbatch.job.sink import FileSink
from tests.chats import conversation, write_lines
from tests.effort import tries
from tests.job.conftest import answers
from tests.job.fakes import FakeEngine
from tests.job.test_power_cut import CutDisk, PowerCut, cut  # noqa: F401

BESIDE = (".run.json",)
RUN = ("run", "in.jsonl", "--max-tokens", 2, "--max-running", 2, "--progress", "none", "-q")


def unpacked(path):
    """The records of a packed OUT, which must be packed as its name says."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        whole = gzip.decompress(data)
    else:
        whole = zstandard.ZstdDecompressor().decompressobj().decompress(data)
    return [json.loads(line) for line in whole.splitlines()]


@pytest.fixture
def whole(apcbatch, tmp_path):
    """The answers of a run with a plain OUT: 16 requests."""
    write_lines(tmp_path / "in.jsonl", [conversation(number) for number in range(8)])
    assert apcbatch(*RUN, "-o", "plain.jsonl").code == 0
    records = [json.loads(line) for line in (tmp_path / "plain.jsonl").read_text().splitlines()]
    return answers(records)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", ["out.jsonl.gz", "out.jsonl.zst", "OUT.GZ"])
def test_out_is_packed_as_it_is_named(apcbatch, tmp_path, whole, name):
    """Fault: plain lines under the name of packed ones, or a file left over."""
    before = set(os.listdir(tmp_path))
    done = apcbatch(*RUN, "-o", name, "--ordered")
    assert done.code == 0, done.stderr
    path = tmp_path / name
    if name == "OUT.GZ":
        assert path.read_bytes().startswith(b"\x1f\x8b")
        path = path.rename(tmp_path / "out.gz")
        for suffix in BESIDE:
            (tmp_path / f"OUT.GZ{suffix}").rename(tmp_path / f"out.gz{suffix}")
    assert answers(unpacked(path)) == whole and list(answers(unpacked(path))) == sorted(whole)
    assert set(os.listdir(tmp_path)) - before == {path.name, *(path.name + suffix for suffix in BESIDE)}
    assert f"results go to {tmp_path}/{name}.part here, and to {name} when the run ends" in done.stderr
    assert f"results in {name}" in done.stderr


@pytest.mark.parametrize("is_link", [False, True])
def test_a_file_that_is_named_part_by_chance_stays(apcbatch, tmp_path, whole, is_link):
    """Fault: --overwrite of OUT replaces a file that is called OUT.part by chance, or the one that it links to."""
    mine = tmp_path / ("mine" if is_link else "out.gz.part")
    mine.write_text("precious\n")
    if is_link:
        (tmp_path / "out.gz.part").symlink_to("mine")
    refused = apcbatch(*RUN, "-o", "out.gz", "--overwrite")
    assert refused.code == 2 and f"{mine} has no answers of this program" in refused.stderr
    assert mine.read_text() == "precious\n"
    mine.write_bytes((tmp_path / "plain.jsonl").read_bytes()[:50])
    assert apcbatch(*RUN, "-o", "out.gz", "--overwrite").code == 0


@pytest.mark.parametrize("name", ["out.jsonl.bz2", "out.xz"])
def test_what_would_not_be_packed_is_refused(apcbatch, tmp_path, whole, name):
    """Fault: plain lines in a file named .bz2."""
    refused = apcbatch(*RUN, "-o", name)
    assert refused.code == 2 and f"output {name} would not be packed; give a name in .gz or .zst" in refused.stderr
    assert not (tmp_path / name).exists()


def test_what_is_no_file_is_never_packed(tmp_path):
    """Fault: a pipe that is named *.gz, or what a shell reads from its >(command), is replaced by a packed file, and
    its reader waits for ever."""
    os.mkfifo(tmp_path / "out.gz")
    for path in (f"{tmp_path}/out.gz", "/dev/fd/63.gz", "/proc/self/fd/9.zst"):
        out = output_module.output_for(path)
        assert (out.target, out.lines, out.packing, out.is_built_at_the_end) == (path, path, "", False)


def test_a_finished_out_is_resumed(apcbatch, tmp_path, whole):
    """Fault: packed answers are computed again or lost, also where the input has grown on purpose."""
    assert apcbatch(*RUN, "-o", "out.gz", "--limit", 3).code == 0
    few = unpacked(tmp_path / "out.gz")
    assert len(few) == 6
    more = apcbatch(*RUN, "-o", "out.gz", "--resume")
    assert more.code == 0 and more.summary["already_done"] == 6 and more.summary["requests"] == 10
    assert unpacked(tmp_path / "out.gz")[:6] == few and answers(unpacked(tmp_path / "out.gz")) == whole
    assert not (tmp_path / "out.gz.part").exists()
    again = apcbatch(*RUN, "-o", "out.gz", "--resume")
    assert again.code == 0 and again.summary["requests"] == 0 and answers(unpacked(tmp_path / "out.gz")) == whole


def test_a_refused_resume_leaves_everything_as_it_was(apcbatch, tmp_path, whole):
    """Fault: a resume with another seed leaves an unpacked copy, or a damaged OUT is a traceback."""
    assert apcbatch(*RUN, "-o", "out.gz").code == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert apcbatch(*RUN, "-o", "out.gz", "--resume", "--seed", 5).code == 2
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    (tmp_path / "out.gz").write_bytes(before["out.gz"][:-9])
    torn = apcbatch(*RUN, "-o", "out.gz", "--resume")
    assert torn.code == 2 and "output out.gz cannot be unpacked: the compressed data ends too early" in torn.stderr
    assert not (tmp_path / "out.gz.part").exists()


def test_an_interrupted_run_says_where_its_answers_are(apcbatch, interrupt, tmp_path, whole):
    """Fault: after Ctrl-C the answers are said to be in a file that is not there."""
    interrupt(2)
    stopped = apcbatch(*RUN, "-o", "out.gz")
    assert stopped.code == 130 and not (tmp_path / "out.gz").exists()
    assert f"results in {tmp_path}/out.gz.part, for out.gz is made when the run is complete" in stopped.stderr
    words = shlex.split(stopped.final_line)
    assert apcbatch(*words[words.index("run") :]).code == 0 and answers(unpacked(tmp_path / "out.gz")) == whole


def test_a_disk_that_is_full_at_the_end_loses_nothing(apcbatch, tmp_path, whole, monkeypatch):
    """Fault: the lines go before the packed file is safe."""
    write = Disk.write

    def full(self, fd, data):
        write(self, fd, data)
        if bytes(data[:2]) == b"\x1f\x8b":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Disk, "write", full)
    stopped = apcbatch(*RUN, "-o", "out.gz")
    assert stopped.code == 1 and "out.gz cannot be written: No space left on device; the answers are" in stopped.stderr
    assert sorted(os.listdir(tmp_path)) == [
        "in.jsonl", "out.gz.part", "out.gz.run.json", "plain.jsonl", "plain.jsonl.run.json",
    ]  # fmt: skip
    monkeypatch.setattr(Disk, "write", write)
    words = shlex.split(stopped.final_line)
    assert apcbatch(*words[words.index("run") :]).code == 0
    assert answers(unpacked(tmp_path / "out.gz")) == whole


@pytest.mark.parametrize("number", range(tries(30)))
def test_a_run_goes_on_after_power_cuts(apcbatch, tmp_path, cut, number):  # noqa: F811
    """Fault: the power goes while OUT is packed, and neither the lines nor the packed file have all answers."""
    write_lines(tmp_path / "in.jsonl", [conversation(number) for number in range(4)])
    folder = tmp_path / "sub"
    folder.mkdir()
    run = (*RUN, "-o", "sub/out.gz")
    most = 0
    for attempt in range(6):
        CutDisk.begin(folder, left=random.randint(1, 14 if attempt % 2 else 40))
        with contextlib.suppress(PowerCut):
            assert apcbatch(*run, "--resume").code == 0
        CutDisk.platter(folder)
        if (folder / "out.gz").exists():
            most = max(most, len(unpacked(folder / "out.gz")))
            assert most == 8, "OUT is complete or not there"
        if not (folder / "out.gz.run.json").exists():
            for path in folder.iterdir():
                # a cut between the sync of a temporary file and its rename leaves that file
                assert not path.read_bytes().strip(b"\0") or path.suffix in (".part", ".tmp")
                path.unlink()
    CutDisk.begin(folder)
    assert apcbatch(*run, "--resume").code == 0
    assert len(answers(unpacked(folder / "out.gz"))) == 8
    left = sorted(name for name in os.listdir(folder) if not name.endswith(".tmp"))  # no dead machine removes those
    assert left == ["out.gz", "out.gz.run.json"]


def test_the_packed_file_is_synced_before_the_lines_go(apcbatch, tmp_path, cut, monkeypatch):  # noqa: F811
    """Fault: a power cut just after the end finds neither of them."""
    write_lines(tmp_path / "in.jsonl", [conversation(1)])
    folder = tmp_path / "sub"
    folder.mkdir()
    CutDisk.begin(folder)
    seen = []

    def watched(self, path):
        inode = CutDisk.names.get("sub/out.gz")
        seen.append((path, inode is not None and CutDisk.synced[inode] == (folder / "out.gz").read_bytes()))
        Disk.unlink(self, path)

    monkeypatch.setattr(CutDisk, "unlink", watched)
    assert apcbatch(*RUN, "-o", "sub/out.gz").code == 0
    assert seen == [(str(folder / "out.gz.part"), True)]


def test_a_packed_out_that_appears_during_a_run_stays(apcbatch, tmp_path, whole, monkeypatch):
    """Fault: a file that comes to stand under OUT's name is replaced when the run ends, or by the --resume after it."""
    path, flush = tmp_path / "a9.gz", FakeEngine.flush
    monkeypatch.setattr(FakeEngine, "flush", lambda self: (path.write_bytes(b"theirs"), flush(self)))
    stopped = apcbatch(*RUN, "-o", "a9.gz")
    assert stopped.code == 1 and "a9.gz appeared or was changed while this run went on" in stopped.stderr
    monkeypatch.setattr(FakeEngine, "flush", flush)
    again = apcbatch(*RUN, "-o", "a9.gz", "--resume")
    assert again.code == 2 and "a9.gz is not an OUT of this program" in again.stderr
    assert path.read_bytes() == b"theirs"
    path.rename(tmp_path / "theirs")
    assert apcbatch(*RUN, "-o", "a9.gz", "--resume").code == 0 and answers(unpacked(path)) == whole


LINE = b'{"id":"apc-000000","x":1}\n'


def test_an_unfinished_resume_goes_on_from_its_own_lines(tmp_path):
    """Fault: the lines that a killed --resume has added to those of a packed OUT are dropped or refused."""
    out = output_module.output_for(str(tmp_path / "out.gz"))
    sink = FileSink(tmp_path / "out.gz.part")
    out.unpack(sink)
    assert sink.is_empty
    (tmp_path / "out.gz").write_bytes(gzip.compress(LINE))
    out.unpack(sink)
    assert [line for _, line in sink.lines()] == [LINE]
    sink.append(LINE)
    for content in (LINE, b""):
        (tmp_path / "out.gz").write_bytes(gzip.compress(content))
        out.unpack(sink)
    (tmp_path / "out.gz").write_bytes(gzip.compress(b"{}\n"))
    with pytest.raises(UsageError, match=r"out.gz is not an OUT of this program, and the answers for it are in .*part"):
        out.unpack(sink)
    assert [line for _, line in sink.lines()] == [LINE] * 2
    sink.close()


@pytest.mark.parametrize("change", [b"", b"theirs" * 20])
def test_a_packed_out_that_is_changed_during_a_run_stays(tmp_path, change):
    """Fault: the file that a run resumed from is replaced although another program has written to it meanwhile."""
    path = tmp_path / "out.gz"
    path.write_bytes(gzip.compress(LINE))
    out = output_module.output_for(str(path))
    sink = FileSink(tmp_path / "out.gz.part")
    out.unpack(sink)
    path.write_bytes(change)
    with pytest.raises(StoppedError, match="out.gz appeared or was changed while this run went on, and is not replace"):
        out.finish(sink)
    assert path.read_bytes() == change and [line for _, line in sink.lines()] == [LINE]
    sink.close()


OURS = json.dumps({"version": "1", "config": {}, "input": {}}).encode()


@pytest.mark.parametrize(
    ("there", "run_file", "local", "how", "refused"),
    [
        (None, None, {}, {}, None),
        (LINE, None, {}, {}, "output memory://b/out.gz exists; give --resume"),
        (LINE, OURS, {}, {}, "output memory://b/out.gz exists; give --resume"),
        (None, OURS, {}, {}, "output memory://b/out.gz.run.json exists; give --resume"),
        (None, OURS, {}, {"resume": True}, None),
        (None, None, {}, {"resume": True}, None),
        (LINE, OURS, {}, {"overwrite": True}, None),
        (LINE, b"{}", {}, {"overwrite": True}, "memory://b/out.gz.run.json is not a run file of this program"),
        (LINE, OURS, {}, {"resume": True}, "--resume continues from out.gz and out.gz.run.json in this folder"),
        (LINE, OURS, {"out.gz": b"", "out.gz.part": b""}, {"resume": True}, "--resume continues from out.gz"),
        (LINE, OURS, {"out.gz": b"x"}, {"resume": True}, None),
        (LINE, OURS, {"out.gz.part": b"x"}, {"resume": True}, None),
        (b"", OURS, {"out.gz": b"x"}, {"resume": True}, None),
        (b"{}\n", OURS, {"out.gz": b"x"}, {"resume": True}, "memory://b/out.gz is not an OUT of this program"),
    ],
)
def test_what_lies_at_an_address_decides(tmp_path, monkeypatch, there, run_file, local, how, refused):
    """Fault: another run's answers in a bucket are replaced, or an upload that broke off cannot be made again."""
    monkeypatch.chdir(tmp_path)
    heads = {"": there, ".run.json": run_file}
    monkeypatch.setattr(output_module, "read_head", lambda name, most, suffix="": heads[suffix])
    for name, data in local.items():
        (tmp_path / name).write_bytes(data)
    out = output_module.output_for("memory://b/out.gz")
    assert (out.target, out.is_built_at_the_end, out.exists()) == ("out.gz", True, bool(local))
    if refused is None:
        out.check_address(Config(**how))
        assert (out.is_uploaded, out.uploaded_run_file) == (there is not None, run_file)
    else:
        with pytest.raises(UsageError, match=refused):
            out.check_address(Config(**how))
