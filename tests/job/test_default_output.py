"""`run INPUT` without -o: where the answers go, and what happens to those that are there."""

from __future__ import annotations

import gzip
import os
import shlex

import pytest

from apcbatch.errors import UsageError
from apcbatch.job.output_paths import default_output
from tests.chats import conversation, read_records, write_lines
from tests.job.conftest import answers

OUT = "chats.answers.jsonl"
OPTIONS = ("--max-tokens", 2)


@pytest.fixture(autouse=True)
def chats(tmp_path):
    """An input of four conversations with two turns each."""
    return write_lines(tmp_path / "chats.jsonl", [conversation(number) for number in range(4)])


def test_the_name_comes_from_the_input():
    """Fault: answers land beside the data, two splits share one name, or a version or a secret is in the name."""
    for input, output in [
        ("chats.jsonl", OUT),
        ("../data/chats.json", OUT),
        ("/data/chats.JSONL.GZ", OUT),
        ("chats.ndjson.zst", OUT),
        ("chats.parquet", OUT),
        ("chats.arrow", OUT),
        ("chats", OUT),
        ("chats.v2.jsonl", "chats.v2.answers.jsonl"),
        ("chats.txt", "chats.txt.answers.jsonl"),
        (".jsonl", ".jsonl.answers.jsonl"),
        ("..jsonl", "..jsonl.answers.jsonl"),
        ("hf:org/name", "name.answers.jsonl"),
        ("hf:org/name:test", "name-test.answers.jsonl"),
        ("hf:org/name/", "name.answers.jsonl"),
        ("memory://bucket/data/chats.jsonl.gz", OUT),
        ("chats.jsonl.txt", "chats.jsonl.txt.answers.jsonl"),
        ("shards/", "shards.answers.jsonl"),
        ("data/chats.jsonl.xz", OUT),
        ("s3://user:hush@bucket/data/chats.jsonl.gz?x=1", OUT),
        ("hf://datasets/org/name/chats.parquet", OUT),
    ]:
        assert default_output([input]) == output


def test_a_stream_has_no_name():
    """Fault: answers in `-.answers.jsonl`, or in `63.answers.jsonl` for a shell's <(command), or in `*.answers`."""
    for input, words in [
        ("-", "stdin has no name"),
        ("/dev/stdin", "/dev/stdin has no name"),
        ("/dev/fd/63", "/dev/fd/63 has no name"),
        ("/proc/self/fd/0", "/proc/self/fd/0 has no name"),
        ("/", "/ has no one name"),
        ("data/*.jsonl", r"data/\*.jsonl has no one name"),
        ("part-?.jsonl", r"part-\?.jsonl has no one name"),
        ("hf:", "hf: has no one name"),
    ]:
        with pytest.raises(UsageError, match=f"^{words} to make OUT's name from; give -o FILE"):
            default_output([input])
    for several in (["a.jsonl", "b.jsonl"], ["-", "a.jsonl"], ["s3://bucket/*"]):
        with pytest.raises(UsageError, match="no one name to make OUT's name from; give -o FILE"):
            default_output(several)


def test_a_file_may_be_called_like_a_pattern(tmp_path, monkeypatch):
    """Fault: a file whose name has a bracket is taken for several, or a folder without a name for none."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a[1].jsonl").touch()
    (tmp_path / "+in.jsonl").touch()
    assert default_output(["."]) == f"{tmp_path.name}.answers.jsonl"
    assert default_output(["a[1].jsonl"]) == "a[1].answers.jsonl" and default_output(["+in.jsonl"]) == "+in" + OUT[5:]


def test_answers_go_to_the_current_folder_and_the_run_says_so(apcbatch, tmp_path):
    """Fault: nobody knows where the answers are, during the run or after it; or the second `apcbatch run chats.jsonl`
    throws the first one's answers away."""
    (tmp_path / "data").mkdir()
    packed = tmp_path / "data" / "chats.jsonl.gz"
    packed.write_bytes(gzip.compress((tmp_path / "chats.jsonl").read_bytes()))
    done = apcbatch("run", packed, *OPTIONS)
    assert done.code == 0 and done.stderr.splitlines()[0] == f"results go to {OUT}"
    assert f"results in {OUT}" in done.final_line
    assert len(read_records(tmp_path / OUT)) == 8 and os.listdir(tmp_path / "data") == [packed.name]
    before = (tmp_path / OUT).read_bytes()
    refused = apcbatch("run", "chats.jsonl", *OPTIONS)
    assert refused.code == 2 and all(word in refused.final_line for word in (OUT, "--resume", "--overwrite"))
    assert (tmp_path / OUT).read_bytes() == before
    named = apcbatch("run", packed, "-o", "named.jsonl", *OPTIONS)
    assert named.code == 0 and "results go to" not in named.stderr


@pytest.mark.parametrize("name", ["chats.jsonl", "my chats.jsonl", "-chats.jsonl"])
def test_the_command_that_continues_finds_the_answers(apcbatch, interrupt, tmp_path, name):
    """Fault: the last line of an interrupted run begins another OUT, or is no command."""
    (tmp_path / "chats.jsonl").rename(tmp_path / name)
    interrupt(2)
    stopped = apcbatch("run", f"./{name}", *OPTIONS, "--max-running", 1, "-q")
    output = tmp_path / name.replace(".jsonl", ".answers.jsonl")
    assert stopped.code == 130 and 0 < len(read_records(output)) < 8
    assert f"results in {output.name}\n" in stopped.stderr, "a plain OUT is there already"
    words = shlex.split(stopped.final_line)
    assert apcbatch(*words[words.index("run") :]).code == 0
    assert len(answers(read_records(output))) == 8
    assert sorted(os.listdir(tmp_path)) == sorted([name, output.name, f"{output.name}.run.json"])
