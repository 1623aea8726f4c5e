"""Several inputs in one run: numbers, places, resume, kills."""

from __future__ import annotations

import gzip
import json

import pytest

from tests.chats import conversation, read_records, write_lines
from tests.job.conftest import answers

OPTIONS = ("--max-tokens", 2, "--progress", "none", "-q")
FILES = ("b.jsonl", "a.jsonl.gz", "c.parquet")


@pytest.fixture
def shards(apcbatch, tmp_path):
    """Three files of different kinds, and what one file of all their lines is answered."""
    lines = [conversation(number) for number in range(9)]
    nameless = [{"messages": line["messages"]} for line in lines[:3]]
    write_lines(tmp_path / "b.jsonl", [*nameless, "no"])
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(x) + "\n" for x in lines[3:6]).encode()))
    from datasets import Dataset

    Dataset.from_list(lines[6:]).to_parquet(tmp_path / "c.parquet")
    write_lines(tmp_path / "all.jsonl", [*nameless, "no", *lines[3:]])
    assert apcbatch("run", "all.jsonl", "-o", "whole.jsonl", *OPTIONS).code == 3
    found = answers(read_records(tmp_path / "whole.jsonl"))
    assert len(found) == 19
    return found


def without_errors(found):
    """The answers without the words of errors, which name the file."""
    return {number: (*one[:3], one[3] and one[3]["code"], one[4]) for number, one in found.items()}


@pytest.mark.slow
def test_several_files_are_answered_as_one(apcbatch, tmp_path, shards):
    """Fault: two requests with one id or one line; an error that does not name its file."""
    done = apcbatch("run", *FILES, "-o", "out.jsonl", *OPTIONS)
    assert done.code == 3, done.stderr
    records = read_records(tmp_path / "out.jsonl")
    assert without_errors(answers(records)) == without_errors(shards)
    places = {record["line"]: (record["apcbatch"]["file"], record["apcbatch"]["file_line"]) for record in records}
    assert [places[line] for line in (1, 4, 5, 8, 10)] == [
        ("b.jsonl", 1), ("b.jsonl", 4), ("a.jsonl.gz", 1), ("c.parquet", 1), ("c.parquet", 3)
    ]  # fmt: skip
    [bad] = [record for record in records if record["error"]]
    assert bad["line"] == 4 and bad["error"]["message"].endswith(" (b.jsonl, line 4)")
    assert "file" not in read_records(tmp_path / "whole.jsonl")[0]["apcbatch"]


def test_other_files_or_another_order_keep_what_is_answered(apcbatch, tmp_path, shards):
    """Fault: answers of one file go to the lines of another, as the numbers are the same; or a file that is added
    later, or another order of the files, is refused."""
    assert apcbatch("run", *FILES, "-o", "out.jsonl", *OPTIONS).code == 3
    before = (tmp_path / "out.jsonl").read_bytes()
    write_lines(tmp_path / "d.jsonl", [conversation(20)])
    for files, requests, without_line in (
        (("a.jsonl.gz", "c.parquet", "b.jsonl"), 0, 0),
        (("d.jsonl", "b.jsonl", "a.jsonl.gz"), 2, 6),
        (FILES, 0, 2),
    ):
        done = apcbatch("run", *files, "-o", "out.jsonl", *OPTIONS, "--resume")
        counts = done.summary["requests"], done.summary["answers_without_line"]
        assert (done.code, *counts) == (3, requests, without_line), (files, done.stderr)
        changes = "0 lines corrected" if requests or without_line else "no line is corrected, new or gone"
        assert f"INPUT has changed: {changes}" in done.stderr
    assert (tmp_path / "out.jsonl").read_bytes().startswith(before)


def test_a_folder_and_a_pattern_are_resumed(apcbatch, tmp_path, shards):
    """Fault: the command that continues lists a hundred files, or a folder is another input than its files."""
    (tmp_path / "shards").mkdir()
    for name in FILES:
        (tmp_path / name).rename(tmp_path / "shards" / name)
    for given, output in (("shards", "shards.answers.jsonl"), ("shards/*", "out.jsonl")):
        options = () if output.startswith("shards") else ("-o", output)
        first = apcbatch("run", given, *options, *OPTIONS, "--limit", 5)
        assert first.code == 0, first.stderr
        again = apcbatch("run", given, *options, *OPTIONS, "--resume")
        assert again.code == 3 and again.summary["already_done"] > 0
        assert len(answers(read_records(tmp_path / output))) == 19
        stopped = apcbatch("run", given, *options, *OPTIONS, "--overwrite", "--strict")
        assert stopped.code == 1 and f"run {given} " in stopped.final_line.replace("'", "")


def test_plan_and_tune_take_several(apcbatch, tmp_path, shards):
    """Fault: `plan` sees another input than `run`."""
    one = apcbatch("plan", "all.jsonl", "--json", "one.json")
    several = apcbatch("plan", *FILES, "--json", "several.json")
    assert one.code == several.code == 0
    assert json.loads((tmp_path / "one.json").read_text()) == json.loads((tmp_path / "several.json").read_text())
    refused = apcbatch("tune-block-size", "all.jsonl", "-", "--verify", 1)
    assert refused.code == 2 and "- can be read once" in refused.stderr
