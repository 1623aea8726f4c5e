"""What a run may write over, and what happens to OUT under its hands."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import sys
from contextlib import nullcontext

import orjson
import pytest

from apcbatch.config import Config
from apcbatch.errors import UsageError
from apcbatch.job import output_paths
from apcbatch.job.disk import Disk
from apcbatch.job.output_paths import check_outputs, check_summary, odd_names
from apcbatch.model.locate import DEMO_DIR
from tests.chats import conversation, read_records, write_lines
from tests.effort import table, tries
from tests.job.conftest import answers, killed_while_it_writes
from tests.job.fakes import FakeEngine

RUN = ("run", "in.jsonl", "-o", "out.jsonl", "--max-tokens", 2)


@pytest.fixture(autouse=True)
def chats(tmp_path):
    """An input of four conversations with two turns each, and a configuration file."""
    (tmp_path / "c.yaml").write_text("progress: none\n")
    return write_lines(tmp_path / "in.jsonl", [conversation(number) for number in range(4)])


@table("output, report, expected", [
    ("out.csv", None, ["OUT out.csv gets JSON lines"]),
    ("out.Parquet.gz", "r.txt", ["OUT out.Parquet.gz gets JSON lines", "--report r.txt gets an HTML page"]),
    ("out.jsonl.zst", "r.HTML", []), ("answers", "r.htm", []), ("/dev/null", None, []),
])  # fmt: skip
def test_a_name_that_promises_another_kind_of_file_is_warned_of(output, report, expected):
    """Fault: JSON lines are taken for a CSV, or a page opens as text, without a warning."""
    assert [one.partition(", ")[0] for one in odd_names(output, "--report", report)] == expected


def test_a_run_says_which_names_are_odd(apcbatch):
    """Fault: a warning of a name is not shown, or not in the summary."""
    done = apcbatch("run", "in.jsonl", "--max-tokens", 1, "-o", "out.csv", "--report", "r.txt")
    assert done.code == 0 and done.summary["warnings"][:2] == list(odd_names("out.csv", "--report", "r.txt"))
    assert all(f"warning: {one}" in done.stderr for one in done.summary["warnings"])


def test_a_run_file_that_is_none_of_ours_stays(apcbatch, tmp_path):
    """Fault: --overwrite of OUT, or a fresh OUT, replaces a file that is called OUT.run.json by chance."""
    mine, out = tmp_path / "out.jsonl.run.json", tmp_path / "out.jsonl"
    for options in ([], ["--overwrite"]):
        for content in ("{}", "[1]", "a report of mine\n", '{"config": {}, "input": {}}', ""):
            mine.write_text(content)
            if options:
                out.write_text("old\n")
            done = apcbatch(*RUN, *options)
            assert done.code == 2 and "is not a run file of this program" in done.stderr, (options, content)
            assert mine.read_text() == content and out.exists() == bool(options)


def test_a_run_file_that_cannot_be_read_is_not_called_another_programs(apcbatch, monkeypatch, tmp_path):
    """Fault: --overwrite says that the run file of another user is not a run file of this program; `report` does not
    say why it cannot be read."""
    assert apcbatch(*RUN).code == 0

    def refuse(path, mode):
        if str(path).endswith(".run.json"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return open(path, mode)

    monkeypatch.setattr("apcbatch.job.runfile.open", refuse, raising=False)
    said = f"{tmp_path}/out.jsonl.run.json cannot be read (permission denied)"
    for arguments in ([*RUN, "--overwrite"], [*RUN, "--resume"], ["report", "out.jsonl", "--prompts", "in.jsonl"]):
        done = apcbatch(*arguments)
        assert done.code == 2 and said in done.stderr and "not a run file" not in done.stderr, done.stderr


@pytest.mark.parametrize("name", [b"c\xff.yaml", b"out\xff.jsonl"])
def test_a_name_that_is_not_utf_8_stands_in_the_run_file(apcbatch, tmp_path, name):
    """Fault: --config, and --resume of an OUT, under a name that is not UTF-8 ended in an internal error."""
    write_lines(tmp_path / "in.jsonl", [conversation(number) for number in range(4)])
    (tmp_path / os.fsdecode(b"c\xff.yaml")).write_text("temperature: 0\n")
    config = ["--config", os.fsdecode(b"c\xff.yaml")] if b"yaml" in name else []
    out = "out.jsonl" if b"yaml" in name else os.fsdecode(name)
    for options in (["--limit", 1], ["--resume"]):
        done = apcbatch("run", "in.jsonl", "-o", out, "--max-tokens", 1, *config, *options)
        assert done.code == 0, done.stderr
    origins = orjson.loads((tmp_path / f"{out}.run.json").read_bytes())["origins"]
    assert b"yaml" not in name or origins["temperature"] == "c?.yaml: temperature"


SPELLINGS = ("file://{}", "FILE:{}", "file://localhost{}", "SimpleCache::local://{}")


def model_beside(folder):
    """A copy of the bundled model in a folder, with a few bytes in place of its weights, which are not to be read."""
    shutil.copytree(DEMO_DIR, folder / "model", ignore=shutil.ignore_patterns("model.safetensors"))
    (folder / "model" / "model.safetensors").write_text("precious")


TAKEN = (
    (("-o", "c.yaml", "--overwrite"), "--config and OUT are the same file"),
    (("--summary", "c.yaml"), "--config and --summary are the same file"),
    (("--summary", "in.jsonl"), "INPUT and --summary are the same file"),
    (("-o", "old.jsonl", "--overwrite"), "--draft-from and OUT are the same file"),
    (("-o", "old.jsonl", "--resume"), "--draft-from and OUT are the same file"),
    (("--summary", "old.jsonl"), "--draft-from and --summary are the same file"),
    (("--summary", "old.jsonl.run.json"), "the run file of --draft-from and --summary are the same file"),
    (("--draft-from", "out.jsonl"), "--draft-from and OUT are the same file"),
    (("--draft-from", "gone.jsonl"), "gone.jsonl cannot be read: no such file or directory; give the OUT of an"),
    (("--draft-from", "sub"), "sub cannot be read: it is a folder; expected a regular file; give the OUT of an"),
    (("--draft-from", "a\0b"), "NUL"),
    (("--summary", "out.jsonl"), "OUT and --summary are the same file"),
    (("--summary", "out.jsonl.run.json"), "--summary and OUT.run.json are the same file"),
    (("--summary", "states/s.json"), "lies in the store"),
    (("-o", "states/out.jsonl"), "lies in the store"),
    (("--summary", "model/s.json"), "lies beside the files of the model"),
    (("-o", "model/config.json", "--overwrite"), "lies beside the files of the model"),
    (("--summary", "sub"), "--summary sub cannot be written: it names a folder; expected a file"),
    (("-o", "sub", "--overwrite"), "-o sub cannot be written: it names a folder; expected a file"),
    (("--summary", "missing/s.json"), "its folder does not exist; mkdir -p"),
    (("-o", "missing/o.jsonl"), "its folder does not exist; mkdir -p"),
    (("-o", "not here/o.jsonl"), "not here'"),
    (("--summary", "-"), "--summary needs a file"),
    (("-o", "x" * 300), "File name too long"),
    (("-o", "loop"), "symbolic links"),
    (("-o", "a\0b"), "NUL"),
    (("--store", "a\0b"), "NUL"),
    (("--summary", "a\0b"), "NUL"),
    (("--config", "a\0b"), "NUL"),
)


@pytest.mark.slow
def test_what_belongs_to_something_else_is_not_written_over(apcbatch, tmp_path):
    """Fault: an output replaces INPUT, the configuration, a file of the model or of the store; or ends the run late;
    also where either of the two is the address of a local file."""
    model_beside(tmp_path)
    for folder in ("sub", "states"):
        (tmp_path / folder).mkdir()
    (tmp_path / "old.jsonl").write_text("precious")
    (tmp_path / "loop").symlink_to("loop")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for options, said in TAKEN:
        flags = dict(zip(options[::2], options[1::2], strict=False))
        base = {"-o": "out.jsonl", "--config": "c.yaml", "--model": "model", "--draft-from": "old.jsonl"}
        if flags.get("--store") is None:
            base["--store"] = "states"
        sentence = said.replace(" sub cannot", f" {tmp_path}/sub cannot")
        for way in ("{}", *random.sample(SPELLINGS, min(tries(10), len(SPELLINGS)))):
            spelled = {flag: value if value == "-" else way.format(tmp_path / value) for flag, value in flags.items()}
            words = [word for pair in (base | spelled).items() for word in pair if word != "--overwrite"]
            done = apcbatch("run", "in.jsonl", *words, "--max-tokens", 2, *options[2:])
            assert done.code == 2 and sentence in done.stderr, (options, way, done.stderr)
            words = [way.format(tmp_path / word) if word in base.values() else word for word in words]
            other = apcbatch("run", way.format(tmp_path / "in.jsonl"), *words, "--max-tokens", 2, *options[2:])
            assert other.code == 2 and "internal error" not in done.stderr + other.stderr, (options, way, other.stderr)
            now = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
            assert before == now, (options, way)


def test_a_folder_that_takes_no_file_is_refused_at_once(apcbatch, tmp_path, monkeypatch):
    """Fault: a summary or a page is lost at the end of a run that took hours."""
    (tmp_path / "closed").mkdir()
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: may(path, mode) and not str(path).endswith("closed"))
    for options in (("-o", "closed/o"), ("--summary", "closed/s.json"), ("--report", "closed/r.html")):
        done = apcbatch("run", "in.jsonl", "--max-tokens", 1, *options)
        assert done.code == 2 and f"{options[1]} cannot be written: its folder takes no new file" in done.stderr
    assert not list(tmp_path.glob("in.answers.jsonl*")) and not list((tmp_path / "closed").iterdir())


BESIDE = "lies beside the files of the model"
READ_TWICE = {"OUT": "o", "--summary": "/dev/null", "--report": "/dev/null", "--json": "-"}


@table("model, inputs, read, outputs, said", [
    ("demo", (), {}, {"OUT": "memory://b/o", "OUT.run.json": "."}, "OUT.run.json .* is a folder; move it away"),
    ("demo", ("+a",), {}, {"OUT": "+a"}, "INPUT and OUT are the same file, +a; give one of them another name"),
    ("demo", (), {"--config": "+a"}, {"OUT": "+a"}, "are the same file, +a; give one of them another name"),
    ("demo", ("memory://in", "in.jsonl"), {}, {"OUT": "link"}, "INPUT and OUT are the same file"),
    ("demo", ("in.jsonl", "+a"), {}, {"OUT": "o", "--summary": "+a"}, "INPUT and --summary are the same file"),
    ("demo", (), {}, {"OUT": "new", "--report": "other/../new"}, "OUT and --report are the same file"),
    ("demo", (), {}, {"OUT": "memory://b/x", "--summary": "memory://b//x"}, "OUT and --summary are the same file"),
    ("demo", (), {}, {"OUT": "memory://b/x", "--summary": "memory://b/y"}, None),
    ("./gone", ("memory://in", "-", "in.jsonl"), {"--draft-from": "in.jsonl", "--config": None}, READ_TWICE, None),
    ("./model", (), {}, {"OUT": "model/link"}, BESIDE),
    ("./model", (), {}, {"OUT": "blob"}, BESIDE),
    ("./model", (), {}, {"OUT": "model/new"}, BESIDE),
    ("./model", (), {}, {"OUT": "model/dangling"}, BESIDE),
    ("./model", (), {}, {"OUT": "other/new"}, None),
])  # fmt: skip
def test_each_output_is_a_file_of_its_own(tmp_path, monkeypatch, model, inputs, read, outputs, said):
    """Fault: an output replaces an input, a configuration, another output, what a link beside the model's files leads
    to, or, behind an address, is not checked; what is only read may not be read twice; two outputs may not go to
    /dev/null; a file called +a is standard input; a model that is not there is reported as an output's fault."""
    monkeypatch.chdir(tmp_path)
    model_beside(tmp_path)
    for name in ("blob", "in.jsonl"):
        (tmp_path / name).write_text("precious")
    for link, target in (("model/link", "../blob"), ("model/dangling", "gone"), ("link", "in.jsonl")):
        (tmp_path / link).symlink_to(target)
    (tmp_path / "other").mkdir()
    with nullcontext() if said is None else pytest.raises(UsageError, match=said.replace("+", r"\+")):
        check_outputs(Config(model=model), inputs, read, outputs)


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_an_output_is_not_where_the_command_prints_to(tmp_path, monkeypatch, name):
    """Fault: `run ... -o log > log` mixes answers and lines of the terminal, or a stream without a file is an error."""
    path, other = str(tmp_path / "log"), "stderr" if name == "stdout" else "stdout"
    monkeypatch.setattr(sys, other, None)
    with open(path, "w") as stream:
        monkeypatch.setattr(sys, name, stream)
        with pytest.raises(UsageError, match=f"OUT {path} is where this command prints to; give another file"):
            check_outputs(Config(), (), {}, {"OUT": path})
        check_outputs(Config(), (), {}, {"OUT": f"/dev/fd/{stream.fileno()}"})
        check_outputs(Config(), (), {}, {"OUT": str(tmp_path / "other")})
    os.mkfifo(tmp_path / "pipe")
    with open(os.open(tmp_path / "pipe", os.O_RDWR), "wb", buffering=0) as stream:
        monkeypatch.setattr(sys, name, stream)
        check_outputs(Config(), (), {}, {"OUT": str(tmp_path / "pipe")})


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_command_does_not_print_into_what_it_reads(tmp_path, monkeypatch, name):
    """Fault: `run in.jsonl -o - >> in.jsonl`, or any command with its output there, adds lines to its own input."""
    path = tmp_path / "in.jsonl"
    with open(path, "a") as stream:
        monkeypatch.setattr(sys, name, stream)
        for inputs, read in (((str(path),), {}), (("memory://a", str(path)), {}), ((), {"--config": str(path)})):
            with pytest.raises(UsageError, match=f"{path} is where this command prints to; .* or print elsewhere"):
                check_outputs(Config(), inputs, read, {"OUT": "-"})


def test_stdin_is_a_file_of_the_command(tmp_path, monkeypatch):
    """Fault: `run - -o in.jsonl --overwrite < in.jsonl` replaces the input, and a run whose answers go to the pipe that
    it reads never ends. Two outputs may share a pipe."""
    path, pipe = str(tmp_path / "in.jsonl"), str(tmp_path / "pipe")
    (tmp_path / "in.jsonl").touch()
    os.mkfifo(pipe)
    for stdin in (path, pipe):
        monkeypatch.setattr(output_paths, "STDIN_PATH", stdin)
        with pytest.raises(UsageError, match=f"INPUT and --summary are the same file, {stdin}"):
            check_outputs(Config(), ("-",), {}, {"OUT": "new", "--summary": stdin})
    with pytest.raises(UsageError, match="--config and OUT are the same file"):
        check_outputs(Config(), (), {"--config": pipe}, {"OUT": pipe})
    check_outputs(Config(), ("in.jsonl", "/dev/null"), {}, {"OUT": pipe, "--summary": pipe, "--report": "/dev/null"})


def test_a_summary_replaces_only_a_summary(tmp_path):
    """Fault: --summary replaces a file of somebody else's, or not the one of the run before."""
    path = str(tmp_path / "s.json")
    check_summary(path, Config())
    for content, is_ours in (
        (b"", True),
        (b'{"requests":1,"hit_rate":0}', True),
        (b'{"requests":1,"hit_rate":0,"ok":1}', True),
        (b'{"requests":1}', False),
        (b"[]", False),
        (b"{", False),
    ):
        (tmp_path / "s.json").write_bytes(content)
        check_summary(path, Config(overwrite=True))
        with (
            nullcontext() if is_ours else pytest.raises(FileExistsError, match="a file is there that is no summary of")
        ):
            check_summary(path, Config())
        with open(path, "ab") as log:
            check_summary(f"/dev/fd/{log.fileno()}", Config())  # adds a line and replaces nothing: `2> log`


def linked(folder, name, spelling):
    """Another name of a file: a hard link, a link, through `..`, an address, or several of these."""
    kind, _, rest = spelling.partition(" ")
    path = folder / name
    if kind in ("hard", "soft"):
        path = folder / "other" / f"{kind}-{name.replace('/', '-')}"
        path.unlink(missing_ok=True)
        (os.link if kind == "hard" else os.symlink)(folder / name, path)
    elif kind == "up":
        path = folder / "other" / ".." / name
    return rest.format(path)


WRITTEN = (
    ("run", "in.jsonl", "-o", "x.jsonl", "--summary"),
    ("run", "in.jsonl", "-o", "x.jsonl", "--report"),
    ("run", "in.jsonl", "--overwrite", "-o"),
    ("run", "in.jsonl", "-o", "old.jsonl", "--resume", "--summary"),
    ("plan", "in.jsonl", "--json"),
    ("tune-block-size", "in.jsonl", "--json"),
    ("tune-block-size", "in.jsonl", "--write"),
    ("report", "old.jsonl", "--prompts", "in.jsonl", "--tune", "curve.json", "--overwrite", "-o"),
)
WAYS = (
    "plain {}", "plain file://{}", "up FILE:{}", "hard {}", "hard local://{}", "soft simplecache::file://{}",
    "plain {}/", "plain file:{}/.", "up {}/x/..", "hard local://{}//", "soft {}/./", "plain /proc/self/root{}",
)  # fmt: skip


@pytest.mark.drawn(3)
@pytest.mark.parametrize("command", WRITTEN, ids=lambda command: " ".join(command[::2]))
def test_no_command_writes_over_what_it_reads(apcbatch, tmp_path, monkeypatch, command):
    """Fault: an output of any command, under any name that a file has, replaces what the command reads or belongs to a
    model, a store or an earlier run."""
    assert apcbatch("run", "in.jsonl", "-o", "old.jsonl", "--max-tokens", 1).code == 0
    model_beside(tmp_path)
    for folder in ("states/objects", "other"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("states/index.sqlite", "states/objects/a", "salt.txt", "curve.json", "precious.txt",
                 "earlier.jsonl", "earlier.jsonl.run.json"):  # fmt: skip
        (tmp_path / name).write_text("precious")
    names = ["in.jsonl", "model/config.json", "model/model.safetensors"]
    if command[0] == "report":
        names += ["old.jsonl", "old.jsonl.run.json", "curve.json"]
        monkeypatch.setenv("APCBATCH_MODEL", "model")
        options = ()
    else:
        names.append("c.yaml")
        options = ("--model", "model", "--config", "c.yaml")
    if command[0] == "run":
        names += ["salt.txt", "states/index.sqlite", "states/objects/a", "earlier.jsonl", "earlier.jsonl.run.json"]
        options += ("--store", "states", "--cache-salt", "@file:salt.txt", "--draft-from", "file:earlier.jsonl")
        if command[-1] != "-o":
            names += ["precious.txt", "old.jsonl" if "x.jsonl" in command else "old.jsonl.run.json"]
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for name in names:
        for way in random.sample(WAYS, min(tries(20), len(WAYS))):
            done = apcbatch(*command, linked(tmp_path, name, way), *options)
            assert done.code == 2 and "internal error" not in done.stderr, (name, way, done.stderr)
            shutil.rmtree(tmp_path / "other")
            (tmp_path / "other").mkdir()
            now = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
            assert before == now, (name, way, done.stderr)


def test_the_summary_replaces_an_earlier_one_as_a_whole(apcbatch, tmp_path, monkeypatch):
    """Fault: half a summary after a full disk, a link replaced by a file, or a temporary file left behind; a finished
    run ends in a traceback because its folder has vanished; a named pipe is replaced by a file."""
    earlier = '{"requests": 3, "hit_rate": 0.5}'
    (tmp_path / "real.json").write_text(earlier)
    (tmp_path / "s.json").symlink_to("real.json")
    names = {path.name for path in tmp_path.iterdir()} | {"out.jsonl", "out.jsonl.run.json"}
    write = Disk.write

    def full(self, fd, data):
        if data.startswith(b'{"requests"'):
            write(self, fd, data[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, fd, data)

    with monkeypatch.context() as patch:
        patch.setattr(Disk, "write", full)
        done = apcbatch(*RUN, "--summary", "s.json")
    assert done.code == 0 and f"--summary {tmp_path}/real.json was not written: No space" in done.stderr
    assert (tmp_path / "real.json").read_text() == earlier
    done = apcbatch(*RUN, "--summary", "s.json", "--overwrite")
    assert json.loads((tmp_path / "real.json").read_text()) == done.summary
    assert (tmp_path / "s.json").is_symlink() and {path.name for path in tmp_path.iterdir()} == names
    (tmp_path / "sub").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(FakeEngine, "flush", lambda self: shutil.rmtree(tmp_path / "sub"))
        done = apcbatch(*RUN, "--summary", "sub/s.json", "--overwrite")
    assert done.code == 0 and "warning: --summary sub/s.json was not written: No such file" in done.stderr
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    done = apcbatch(*RUN, "--summary", "pipe", "--overwrite")
    assert json.loads(os.read(reader, 1 << 16)) == done.summary
    os.close(reader)


def test_what_a_kill_left_goes_with_the_next_run(apcbatch, tmp_path):
    """Fault: a run that was killed while it wrote its run file or its summary leaves a temporary file for good."""
    for name in ("out.jsonl", "out.jsonl.run.json", "s.json"):
        killed_while_it_writes(tmp_path / name)
    assert len(list(tmp_path.glob(".apcbatch-*.tmp"))) == 3
    assert apcbatch(*RUN, "--summary", "s.json").code == 0
    assert not list(tmp_path.glob(".apcbatch-*.tmp"))


def removed(folder):
    (folder / "out.jsonl").unlink()


def replaced(folder):
    (folder / "other").write_text("")
    os.replace(folder / "other", folder / "out.jsonl")


def folder_renamed(folder):
    folder.rename(folder.with_name("elsewhere"))


def shortened(folder):
    path = folder / "out.jsonl"
    os.truncate(path, path.stat().st_size // 2)


def emptied(folder):
    os.truncate(folder / "out.jsonl", 0)


def lengthened(folder):
    with open(folder / "out.jsonl", "ab") as file:
        file.write(b"\n")


def overwritten(folder):
    with open(folder / "out.jsonl", "r+b") as file:
        file.write(b"not json, but as long")


GONE = "was removed, renamed or replaced while this run wrote it"
WORDS = {
    removed: GONE,
    replaced: GONE,
    folder_renamed: GONE,
    shortened: "was shortened by another program while this run wrote it",
    emptied: "was shortened by another program while this run wrote it",
    lengthened: "was written to by another program while this run wrote it",
    overwritten: "it has other bytes than this run gave it",
}


@pytest.mark.drawn(4)
@pytest.mark.parametrize("happens", WORDS)
@pytest.mark.parametrize("at_the_end", [False, True])
def test_an_out_that_is_gone_is_noticed(apcbatch, tmp_path, monkeypatch, happens, at_the_end):
    """Fault: `8 ok; results in out.jsonl`, and there is no out.jsonl, or it lacks lines."""
    (tmp_path / "sub").mkdir()
    from apcbatch.job import sink

    monkeypatch.setattr(sink, "SYNC_EVERY_S", 1e9 if at_the_end else 0.0)
    step, steps = FakeEngine.step, []

    def stepped(self):
        steps.append(1)
        if len(steps) == 2:
            happens(tmp_path / "sub")
        return step(self)

    monkeypatch.setattr(FakeEngine, "step", stepped)
    options = ("--max-tokens", 1, "--max-running", 1)
    done = apcbatch("run", "in.jsonl", "-o", "sub/out.jsonl", *options, "--progress", "none")
    assert done.code == 1 and WORDS[happens] in done.stderr
    assert "results in" not in done.stderr and done.final_line.endswith("--resume")
    assert len(steps) == (8 if happens == overwritten or (at_the_end and WORDS[happens] == GONE) else 2)
    if happens == overwritten:
        done = apcbatch("run", "in.jsonl", "-o", "sub/out.jsonl", *options, "--resume")
        assert done.code == 2 and "out.jsonl, line 1, is not a line that this program wrote" in done.stderr
    if happens in (shortened, emptied):
        monkeypatch.setattr(FakeEngine, "step", step)
        assert apcbatch("run", "in.jsonl", "-o", "sub/out.jsonl", *options, "--resume").code == 0
        assert len(answers(read_records(tmp_path / "sub" / "out.jsonl"))) == 8


def test_a_full_disk_stops_and_resumes(apcbatch, tmp_path, monkeypatch):
    """Fault: a line that was not written counts, or what is half written is in the way."""
    write, room = Disk.write, [3000]

    def limited(self, fd, data):
        if len(data) > room[0] and b"apc-0" in bytes(data):
            write(self, fd, data[: room[0]])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room[0] -= len(data) * (b"apc-0" in bytes(data))
        write(self, fd, data)

    monkeypatch.setattr(Disk, "write", limited)
    done = apcbatch(*RUN)
    assert done.code == 1 and "cannot be written: No space left" in done.stderr
    monkeypatch.setattr(Disk, "write", write)
    assert apcbatch(*RUN, "--resume").code == 0
    assert len(answers(read_records(tmp_path / "out.jsonl"))) == 8


EDITS = [
    "not json", '{"a": 1}', '{"id":"x","line":"1","turn":1,"error":null,"response":{}}',
    "[]", "3", '"x"', "null", "", "\r", "[" * 5000, '{"a":' * 3000, "\ufeff{}",
    *(('"line":1', f'"line":{value}') for value in ("0", "-1", "true", "1e3", '"1"', "null", "9" * 40, "[]")),
    *(('"turn":1', f'"turn":{value}') for value in ("0", "{}", "9" * 19, "1.5", "false")),
    *(('"error":null', f'"error":{value}') for value in ("1", "{}", '{"code":"internal"}', "[]", '"x"')),
    *(('"response":{', f'"response":{value},"x":{{') for value in ("null", "3", "[]", '{"body":null}')),
    *(('"apcbatch":{', f'"apcbatch":{value},"x":{{') for value in ("null", "[]", "7")),
    *(('"completion_token_ids":[', f'"completion_token_ids":[{value},') for value in (-1, 1e9, '"a"', 9999999999)),
    ('"finish_reason":"', '"finish_reason":["'),
    ('"finish_reason":"length","stop_reason', '"finish_reason":7,"stop_reason'),
    ('"id":"apc-', '"id":7,"x":"apc-'),
    ('"choices":[', '"choices":[],"y":['),
    ('"id":"apc-000000"', '"id":"apc-000007"'), ('"id":"apc-000000"', '"id":"mine"'),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("turns", ["each", "rollout"])
def test_a_hand_edited_out_is_refused_in_a_sentence(apcbatch, tmp_path, turns):
    """Fault: a value that no run writes ends in `internal error`, or counts as an answer."""
    assert apcbatch(*RUN, "--turns", turns, "--ordered").code == 0
    out = tmp_path / "out.jsonl"
    first, *rest = out.read_text().splitlines(keepends=True)
    for edit in random.sample(EDITS, min(tries(240 if turns == "each" else 120), len(EDITS))):
        line = edit + "\n" if isinstance(edit, str) else first.replace(*edit, 1)
        assert line != first, edit
        out.write_text(line + "".join(rest))
        before = out.read_bytes()
        done = apcbatch(*RUN, "--turns", turns, "--resume")
        where = "two records with the id apc-000007" if "apc-000007" in str(edit) else "line 1"
        assert done.code == 2 and where in done.stderr, (edit, done.stderr)
        assert "internal error" not in done.stderr and out.read_bytes() == before, edit
    for data in (b"\xff\xfe{}\n", first.encode() * 2):
        out.write_bytes(data + "".join(rest).encode())
        done = apcbatch(*RUN, "--turns", turns, "--resume")
        assert done.code == 2 and "out.jsonl, line " in done.stderr
    out.write_text(first.replace("\n", "\r\n") + "".join(rest), newline="")
    assert apcbatch(*RUN, "--turns", turns, "--resume").code == 0, "a foreign line end is no other answer"
