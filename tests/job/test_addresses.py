"""OUT, INPUT and the summary behind addresses: a local file while the run continues, uploaded when it ends."""

from __future__ import annotations

import gzip
import json
import os
import shlex
import sys

import pytest

from tests.chats import conversation, read_records, write_lines
from tests.job.conftest import answers
from tests.job.fakes import FakeEngine

RUN = ("run", "in.jsonl", "--max-tokens", 2, "--progress", "none", "-q")
OUT = "memory://bucket/out.jsonl"


@pytest.fixture
def whole(apcbatch, tmp_path):
    """The answers of a run with a plain OUT: 8 requests."""
    write_lines(tmp_path / "in.jsonl", [conversation(number) for number in range(4)])
    assert apcbatch(*RUN, "-o", "plain.jsonl").code == 0
    return answers(read_records(tmp_path / "plain.jsonl"))


def lines_of(data):
    return answers([json.loads(line) for line in data.splitlines()])


@pytest.mark.parametrize("packing", ["", ".gz"])
def test_a_finished_out_is_uploaded(apcbatch, tmp_path, memory, whole, packing):
    """Fault: OUT is not where it was asked for, or nobody knows whose disk is used; an address in .gz gets plain
    lines."""
    memory.pipe_file("/bucket/in.jsonl", (tmp_path / "in.jsonl").read_bytes())
    options = ("-o", OUT + packing, "--summary", "memory://bucket/summary.json")
    done = apcbatch("run", "memory://bucket/in.jsonl", *RUN[2:], *options)
    assert done.code == 0, done.stderr
    data, name = memory.cat_file(f"/bucket/out.jsonl{packing}"), f"out.jsonl{packing}"
    assert lines_of(gzip.decompress(data) if packing else data) == whole and (tmp_path / name).read_bytes() == data
    assert json.loads(memory.cat_file("/bucket/summary.json")) == done.summary
    facts = json.loads(memory.cat_file(f"/bucket/{name}.run.json"))
    assert facts["input"]["name"] == "memory://bucket/in.jsonl"
    place = f"{tmp_path}/{name}.part here" if packing else "out.jsonl here"
    assert done.stderr.startswith(f"results go to {place}, and to {OUT}{packing} when the run ends\n")
    assert f"results in {OUT}{packing} and {name}" in done.stderr
    there = {path.name for path in tmp_path.iterdir() if not path.name.startswith("plain")}
    assert there == {"in.jsonl", name, f"{name}.run.json"}


def test_an_upload_that_fails_loses_nothing(apcbatch, tmp_path, memory, whole, monkeypatch):
    """Fault: answers are lost with the connection, or the exit code says that all is well."""
    put = type(memory).put_file

    def refuse(self, local, path, *given, **how):
        if path.endswith("out.jsonl"):
            raise PermissionError("denied for user:hush@host")
        return put(self, local, path, *given, **how)

    monkeypatch.setattr(type(memory), "put_file", refuse)
    stopped = apcbatch(*RUN, "-o", OUT)
    assert stopped.code == 1 and "the answers are safe in out.jsonl on this machine" in stopped.stderr
    assert "results in out.jsonl" in stopped.stderr
    assert answers(read_records(tmp_path / "out.jsonl")) == whole
    words = shlex.split(stopped.final_line)
    assert words[-1] == "--resume" and OUT in words
    monkeypatch.setattr(type(memory), "put_file", put)
    again = apcbatch(*words[words.index("run") :])
    assert again.code == 0 and again.summary["requests"] == 0 and again.summary["already_done"] == 8
    assert lines_of(memory.cat_file("/bucket/out.jsonl")) == whole


def test_an_address_that_cannot_be_written_is_told_before_anything_is_computed(apcbatch, tmp_path, memory, monkeypatch):
    """Fault: a bucket without permission is found out after ten hours."""
    write_lines(tmp_path / "in.jsonl", [conversation(1)])

    def refuse(*_, **__):
        raise PermissionError("access denied")

    monkeypatch.setattr(type(memory), "put_file", refuse)
    stopped = apcbatch(*RUN, "-o", OUT)
    assert stopped.code == 1 and f"{OUT}.run.json cannot be written: access denied" in stopped.stderr
    assert not (tmp_path / "out.jsonl").exists() or not (tmp_path / "out.jsonl").read_bytes()
    for name, words in {
        "https://host/out.jsonl": "https://host/out.jsonl cannot be written to",
        "s3://": "has no file name",
        "nosuch://b/out.jsonl": "nosuch://b/out.jsonl cannot be opened: Protocol not known",
    }.items():
        refused = apcbatch(*RUN, "-o", name)
        assert refused.code == 2 and words in refused.stderr, refused.stderr
    monkeypatch.setitem(sys.modules, "s3fs", None)
    refused = apcbatch(*RUN, "-o", "s3://bucket/out.jsonl")
    assert refused.code == 2 and "s3://bucket/out.jsonl needs the package s3fs; pip install s3fs" in refused.stderr


def test_a_summary_that_cannot_be_uploaded_is_a_warning(apcbatch, tmp_path, memory, whole, monkeypatch):
    """Fault: answers that are complete count as stopped because of the summary, or it is missing without a word."""

    def refuse(*_, **__):
        raise RuntimeError("no route to memory://user:hush@bucket/summary.json")

    monkeypatch.setattr(type(memory), "pipe_file", refuse)
    done = apcbatch(*RUN, "-o", "out.jsonl", "--summary", "memory://user:hush@bucket/summary.json")
    assert done.code == 0 and "--summary memory://bucket/summary.json was not written: no route to" in done.stderr
    assert "hush" not in done.stderr


def test_no_secret_is_printed_or_kept(apcbatch, tmp_path, memory, whole):
    """Fault: a password in the command that continues a run, in a note, in the run file."""
    secret = "memory://user:hush@bucket/out.jsonl"
    memory.pipe_file("/user:hush@bucket/in.jsonl", b"no\n" + (tmp_path / "in.jsonl").read_bytes())
    done = apcbatch("run", "memory://user:hush@bucket/in.jsonl", *RUN[2:], "-o", secret)
    assert done.code == 3, done.stderr
    kept = (tmp_path / "out.jsonl.run.json").read_text() + (tmp_path / "out.jsonl").read_text()
    assert "hush" not in done.stderr + done.stdout + kept and "memory://bucket/out.jsonl" in done.stderr


def test_an_address_has_many_spellings(apcbatch, tmp_path, memory):
    """Fault: another spelling of an address walks round the checks, or a path option takes what it never reads."""
    for arguments, words in [
        (("-o", "memory://bucket/in.jsonl", "--overwrite"), "INPUT and the address of OUT are the same file"),
        (("-o", "memory:///bucket//x/../in.jsonl", "--overwrite"), "INPUT and the address of OUT are the same file"),
        (("-o", "SimpleCache::MEMORY://bucket/in.jsonl", "--overwrite"), "are the same file"),
        (("-o", "x.jsonl", "--summary", "memory:///bucket/in.jsonl", "--overwrite"), "INPUT and --summary are"),
        (("-o", OUT, "--summary", "memory:///bucket/out.jsonl", "--overwrite"), "are the same file"),
        (("-o", OUT, "--summary", f"{OUT}.run.json", "--overwrite"), "--summary and the address of OUT.run.json are"),
        (("-o", "x.jsonl", "--summary", "zip://s.json::memory://bucket/in.jsonl"), "cannot be written to"),
        (("-o", "zip://d/s.json::file:///x.zip"), "cannot be written to"),
        (("-o", "x.jsonl", "--summary", "generic://memory://bucket/in.jsonl"), "generic:// wraps another address"),
        (("-o", "dir::memory://bucket/in.jsonl"), "only caches"),
        (
            ("-o", "x.jsonl", "--report", "memory://u:hush@bucket/r.html"),
            "expected a file on this machine, or a folder",
        ),
        (("-o", "x.jsonl", "--store", "memory://u:hush@bucket/s"), "expected a file on this machine, or a folder"),
        (("-o", "x.jsonl", "--config", "ftp://u:hu@sh@bucket/s"), "expected a file on this machine, or a folder"),
        (("-o", "x.jsonl", "--model", "ftp://u:hush@bucket/s"), "expected a file on this machine, or a folder"),
        (("-o", "x.jsonl", "--cache-salt", "@ftp://u:hush@bucket/s"), "expected a file on this machine, or a folder"),
        (("memory:///bucket/in.jsonl", "-o", "x.jsonl"), "is given twice"),
    ]:
        memory.pipe_file("/bucket/in.jsonl", json.dumps(conversation(1)).encode())
        refused = apcbatch("run", "memory://bucket/in.jsonl", *RUN[2:], *arguments)
        assert refused.code == 2 and words in refused.stderr, refused.stderr
        assert "hush" not in refused.stderr and "sh@" not in refused.stderr
        assert list(memory.store) == ["/bucket/in.jsonl"] and not os.listdir(tmp_path)


def test_nothing_at_an_address_is_replaced_unasked(apcbatch, tmp_path, memory, whole):
    """Fault: a summary or a run file replaces what somebody keeps in the bucket; or the way out is closed."""
    summary = ("--summary", "memory://bucket/s.json")
    for place, run in {
        "/bucket/s.json": (*RUN, "-o", "a.jsonl", *summary),
        "/bucket/out.jsonl.run.json": (*RUN, "-o", OUT),
        "/bucket/out.jsonl": (*RUN, "-o", OUT),
    }.items():
        memory.pipe_file(place, b"precious")
        refused = apcbatch(*run)
        assert refused.code == 2 and not (tmp_path / "a.jsonl").exists(), refused.stderr
        assert memory.cat_file(place) == b"precious"
    kept = apcbatch(*RUN, "-o", OUT, "--overwrite")
    assert kept.code == 2 and "is not a run file of this program" in kept.stderr
    memory.rm_file("/bucket/out.jsonl.run.json")
    assert "--resume continues from out.jsonl and" in apcbatch(*RUN, "-o", OUT, "--resume").stderr
    assert apcbatch(*RUN, "-o", OUT, *summary, "--overwrite").code == 0
    assert apcbatch(*RUN, "-o", "b.jsonl", *summary).code == 2, "an earlier summary, of another run"
    assert apcbatch(*RUN, "-o", OUT, *summary, "--resume").code == 0, "its own"
    memory.pipe_file("/bucket/out.jsonl", b"precious")
    refused = apcbatch(*RUN, "-o", OUT, "--resume")
    assert refused.code == 2 and f"{OUT} is not an OUT of this program" in refused.stderr
    assert memory.cat_file("/bucket/out.jsonl") == b"precious"


def test_what_appears_at_an_address_during_a_run_stays(apcbatch, tmp_path, memory, whole, monkeypatch):
    """Fault: an OUT or a summary that somebody uploads while the run continues is replaced when it ends."""
    flush = FakeEngine.flush

    def appears(self):
        memory.pipe_file("/bucket/out.jsonl", b"theirs")
        memory.pipe_file("/bucket/s.json", b"theirs")
        return flush(self)

    monkeypatch.setattr(FakeEngine, "flush", appears)
    stopped = apcbatch(*RUN, "-o", OUT, "--summary", "memory://bucket/s.json")
    assert stopped.code == 1 and f"{OUT} appeared while this run went on" in stopped.stderr
    assert "--summary memory://bucket/s.json was not written: a file is there" in stopped.stderr
    assert memory.cat_file("/bucket/out.jsonl") == memory.cat_file("/bucket/s.json") == b"theirs"
    assert answers(read_records(tmp_path / "out.jsonl")) == whole
