"""`--shard I/N` and `apcbatch merge`: N processes without a driver write what one process would have written."""

from __future__ import annotations

import errno
import gzip
import json
import os
import random
import shlex
import shutil
import signal
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from apcbatch.cli.program import main
from apcbatch.data.chat import render_ahead
from apcbatch.data.chat.render import Renderer
from apcbatch.data.chat.template import ChatTemplate
from apcbatch.job import runfile, shards, sink
from apcbatch.job.disk import Disk
from apcbatch.job.runfile import read_run_file
from apcbatch.job.sink import FileSink
from apcbatch.model.locate import DEMO_DIR
from tests.chats import conversation, forked_lines, read_records, write_lines
from tests.job.conftest import Outcome, batch_line, processes_of

REUSE = (
    "cached_from", "cached_tokens", "computed_tokens", "ideal_cached_tokens", "boundary", "miss_reason", "prefill_ms",
    "decode_ms", "begin_s", "end_s", "drafted_tokens", "accepted_tokens",
)  # fmt: skip
TWELVE = [conversation(number, turns=1 + number % 3) for number in range(12)]
UNNAMED = [{"messages": conversation(number % 4)["messages"]} for number in range(9)]
BAD = [*TWELVE[:3], "{", TWELVE[1], {"id": "x", "messages": []}, *UNNAMED[:5], "{", "[]", TWELVE[4] | {"seed": "x"}]
BATCH = [
    batch_line(f"b-{number}", prompt="Once " * (1 + number % 4), max_tokens=number % 5 or 400) for number in range(11)
]


class KilledError(BaseException):
    """A kill, which no clean-up of the program sees."""


@pytest.fixture(autouse=True)
def options_of_the_run_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """--resume takes --max-tokens from the run file, not from the variable that all tests have."""
    monkeypatch.delenv("APCBATCH_MAX_TOKENS")


def kept(path: Path) -> dict[str, Any]:
    """The records of an OUT by id, each there once, without times and counts of reuse."""
    found: dict[str, Any] = {}
    for record in read_records(path):
        assert record["id"] not in found
        for name in REUSE:
            record["apcbatch"].pop(name, None)
        if record["response"] is not None:
            record["response"]["body"].pop("created")
            record["response"]["body"]["usage"].pop("prompt_tokens_details")
        found[record["id"]] = record
    return found


def facts_of(out: Path) -> dict[str, Any]:
    """What the run file says that does not depend on the time, the processes or the name of OUT."""
    facts = dict(read_run_file(f"{out}.run.json")[0] or {})
    for name in ("begin", "processes", "template_clock"):
        del facts[name]
    return facts


def compared(run: Callable[..., Outcome], words: Iterable[object], count: int, code: int = 0) -> None:
    """Run a command alone and in shards, and compare."""
    words = ["run", *words]
    assert run(*words, "-o", "one.jsonl").code == code
    parts = [f"part.{index}.jsonl" for index in range(1, count + 1)]
    codes = [run(*words, "-o", part, "--shard", f"{at}/{count}").code for at, part in enumerate(parts, start=1)]
    done = run("merge", *random.sample(parts, count), "-o", "all.jsonl")
    assert done.code == code == max(codes), done.stderr
    assert kept(Path("all.jsonl")) == kept(Path("one.jsonl"))
    assert facts_of(Path("all.jsonl")) == facts_of(Path("one.jsonl"))


CASES = {
    "turns": (TWELVE, (), 0),
    "the last turns": (TWELVE, ("--turns", "last"), 0),
    "a limit": (TWELVE, ("--limit", 7), 0),
    "no line": (TWELVE, ("--limit", 0), 0),
    "rollouts that draw": (TWELVE, ("--turns", "rollout", "--temperature", 1), 0),
    "equal lines that draw": (UNNAMED, ("--temperature", 1, "--seed", 5), 0),
    "bad lines, used ids, equal lines": (BAD, ("--temperature", 1), 3),
    "rollouts of bad lines": (BAD, ("--turns", "rollout"), 3),
    "a batch": (BATCH, (), 0),
    "forks": (forked_lines(30, systems=3), ("--window-tokens", 50), 0),
    "a failure of the engine": ([*TWELVE[:3], batch_line("long", prompt=[7] * 5000)], (), 3),
}


@pytest.mark.drawn(4)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_merged_shards_are_one_process(apcbatch, tmp_path, monkeypatch, case: str) -> None:
    """Fault: a request is lost or doubled; a line's number, id, draw or error depends on the shard; the record or the
    run file says that a shard wrote it; or small windows are divided otherwise by each shard."""
    lines, options, code = CASES[case]
    write_lines(tmp_path / "in.jsonl", lines)
    for count in (1, random.choice((2, 3, 4)), random.choice((5, 6, 7))):
        with monkeypatch.context() as patch:
            patch.setattr(shards, "WINDOW_TOKENS", random.choice((1, 500, 1 << 24)))
            compared(apcbatch, ("in.jsonl", "--max-tokens", 3, *options), count, code)
        for path in tmp_path.glob("*.jsonl"):
            path.name == "in.jsonl" or path.unlink()


REAL = {
    "planned": (TWELVE, ()),
    "several drawn answers": (BATCH[:4] + [batch_line("n", n=3, seed=4)], ("--temperature", 1)),
    "rollouts": (TWELVE[:5], ("--turns", "rollout", "--temperature", 1, "--logprobs")),
    "scores": (TWELVE, ("--score",)),
    "all": (TWELVE, ("--policy", "all", "--model", "demo-jamba")),
    "none": (TWELVE, ("--policy", "none")),
    "token ids": ([batch_line(f"t-{n}", prompt=[9 + n * k % 20 for k in range(40 + n)]) for n in range(12)], ()),
}


@pytest.mark.slow
@pytest.mark.drawn(2)
@pytest.mark.parametrize("case", REAL)
def test_real_shards_are_one_process(tmp_path, monkeypatch, capsys, tiny_checkpoint, case: str) -> None:
    """Fault: an answer, a score or a log-probability depends on what else its process computes. Of a compressed INPUT
    and a second one, with other options of reuse for each shard."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("APCBATCH_POLICY", raising=False)
    lines, options = REAL[case]
    if case == "token ids":
        options = ("--model", tiny_checkpoint(random.choice(("mamba", "jamba", "qwen3_5"))))
    half = len(lines) // 2
    Path("a.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines[:half]).encode()))
    write_lines(tmp_path / "b.jsonl", lines[half:])

    def run(*words: object) -> Outcome:
        own = ("--block-size", random.choice((1, 16, 64)), "--window-tokens", random.choice((1, 1 << 20)))
        words = (*words, *own, "-q") if words[0] == "run" else words
        capsys.readouterr()
        code = main(list(map(str, words)))
        return Outcome(code, *capsys.readouterr())

    words = ["run", "a.jsonl.gz", "b.jsonl", "--max-tokens", 5, *options]
    assert run(*words, "-o", "one.jsonl").code == 0
    for shard in ("1/3", "2/3", "3/3"):
        assert run(*words, "-o", f"part.{shard[0]}.jsonl.gz", "--shard", shard).code == 0
    assert run("merge", *(f"part.{index}.jsonl.gz" for index in (3, 1, 2)), "-o", "all.jsonl.gz").code == 0
    Path("all.jsonl").write_bytes(gzip.decompress(Path("all.jsonl.gz").read_bytes()))
    assert kept(Path("all.jsonl")) == kept(Path("one.jsonl"))


@pytest.mark.slow
def test_a_shard_killed_and_resumed(apcbatch, start, interrupt, engines, tmp_path) -> None:
    """Fault: a continued shard has other lines than it began with, loads weights when nothing is left, or counts as
    finished when it was interrupted; options that --resume takes from the run file are asked for again."""
    write_lines(tmp_path / "in.jsonl", [conversation(number) for number in range(20)])
    words = ("run", "in.jsonl", "--max-tokens", 4, "--max-running", 2, "--progress", "none")
    assert apcbatch(*words, "-o", "one.jsonl").code == 0
    process = start(*words, "-o", "part.1.jsonl", "--shard", "1/2", FAKE_HOLD_AT=5)
    process.wait_for_lines(tmp_path / "part.1.jsonl", 5)
    process.send(signal.SIGKILL)
    process.end()
    interrupt(3)
    assert apcbatch(*words, "-o", "part.2.jsonl", "--shard", "2/2").code == 130
    assert json.loads(Path("part.2.jsonl.run.json").read_text())["shard_requests"] is None
    merge = ("merge", "part.1.jsonl", "part.2.jsonl", "-o", "all.jsonl")
    done = apcbatch(*merge)
    assert done.code == 2 and "Not finished: part.1.jsonl (shard 1/2), part.2.jsonl (shard 2/2)" in done.stderr
    assert apcbatch("run", "in.jsonl", "-o", "part.1.jsonl", "--resume").code == 0
    done = apcbatch(*merge)
    assert done.code == 2 and "requests are missing: apc-0000" in done.stderr and not Path("all.jsonl").exists()
    done = apcbatch("run", "in.jsonl", "-o", "part.2.jsonl", "--resume")
    assert done.code == 0 and done.summary["already_done"] > 0 and done.summary["answers_without_line"] == 0
    num_engines = len(engines)
    assert apcbatch("run", "in.jsonl", "-o", "part.2.jsonl", "--resume").code == 0 and len(engines) == num_engines
    assert apcbatch(*merge).code == 0
    assert kept(Path("all.jsonl")) == kept(Path("one.jsonl"))


@pytest.fixture
def parts(apcbatch, tmp_path) -> list[str]:
    """The OUTs of three shards of twelve lines, with a bad one."""
    write_lines(tmp_path / "in.jsonl", [*TWELVE, "{"])
    names = [f"part.{index}.jsonl" for index in (1, 2, 3)]
    for index, name in enumerate(names, start=1):
        assert apcbatch("run", "in.jsonl", "-o", name, "--shard", f"{index}/3", "--max-tokens", 3).code in (0, 3)
    return names


def test_all_is_an_out_as_any_other(apcbatch, parts, tmp_path) -> None:
    """Fault: ALL cannot be continued with a corrected INPUT, compared, or drafted from; or its times are those of its
    parts, each from another begin."""
    done = apcbatch("merge", *parts, "-o", "all.jsonl")
    assert done.code == 3 and "25 requests of 3 shards, 1 error" in done.stdout
    assert done.final_line.startswith("nothing is left to do: the error records (1 invalid_json)")
    begins = [process.begin for process in processes_of(tmp_path / "all.jsonl")]
    assert begins == sorted(process.begin for part in parts for process in processes_of(tmp_path / part))
    late = {record["id"] for record in read_records(tmp_path / parts[2])}
    for record in read_records(tmp_path / "all.jsonl"):
        if record["error"] is None and record["id"] in late:
            assert begins[0] + record["apcbatch"]["begin_s"] >= begins[2] - 1e-3
    write_lines(tmp_path / "in.jsonl", [*TWELVE[:5], conversation(99, 1), *TWELVE[5:]])
    done = apcbatch("run", "in.jsonl", "-o", "all.jsonl", "--resume")
    assert done.code == 0 and (done.summary["already_done"], done.summary["requests"]) == (24, 1), done.stderr
    assert apcbatch("report", "all.jsonl").code == 0
    assert apcbatch("run", "in.jsonl", "-o", "again.jsonl", "--draft-from", "all.jsonl", "--max-tokens", 3).code == 0


def test_errors_that_may_not_come_again(apcbatch, tmp_path, monkeypatch) -> None:
    """Fault: what failed for want of memory in a shard cannot be run again in ALL, or no line says how."""
    monkeypatch.setenv("FAKE_FAIL_ONCE", str(tmp_path / "more memory"))
    write_lines(tmp_path / "in.jsonl", TWELVE)
    for index in (1, 2):
        shard = ("-o", f"part.{index}.jsonl", "--limit", 11, "--shard", f"{index}/2")
        assert apcbatch("run", "in.jsonl", *shard, "--max-tokens", 3).code == 3
    done = apcbatch("merge", "part.1.jsonl", "part.2.jsonl", "-o", "all of it.jsonl")
    again = "apcbatch run INPUT -o 'all of it.jsonl' --limit 11 --retry-errors"
    assert done.code == 3 and "7 errors" in done.stdout and again in done.final_line
    assert [one.continue_command for one in processes_of(tmp_path / "all of it.jsonl")] == [None, None]
    (tmp_path / "more memory").touch()
    done = apcbatch(*shlex.split(again.replace("INPUT", "in.jsonl"))[1:])
    assert done.code == 0 and done.summary["requests"] == 7, done.stderr


def test_what_merge_refuses(apcbatch, parts, tmp_path) -> None:
    """Fault: a merge that lacks a part, has one twice or mixes runs looks whole; one that is refused leaves ALL behind,
    or replaces a file that is no OUT."""
    one, two, three = parts
    options = {"other": ("--max-tokens", 4), "fewer": ("--limit", 5), "dated": ("--template-date", "2026-01-01")}
    for name, words in options.items():
        words = ("--max-tokens", 3, *words)
        assert apcbatch("run", "in.jsonl", "-o", f"{name}.jsonl", "--shard", "2/3", *words).code in (0, 3)
    assert apcbatch("run", "in.jsonl", "-o", "half.jsonl", "--shard", "2/2", "--max-tokens", 3).code in (0, 3)
    assert apcbatch("run", "in.jsonl", "-o", "whole.jsonl", "--max-tokens", 3).code == 3
    lines = (tmp_path / two).read_bytes().splitlines(keepends=True)
    own, other = lines[0], (tmp_path / one).read_bytes().splitlines(keepends=True)[0]
    beyond = own.replace(json.loads(own)["id"].encode(), b"apc-000099")
    contents = {
        "cut": lines[:-1],
        "doubled": [*lines, own],
        "both": [*lines, other],
        "torn": [*lines[:-1], lines[-1][:40]],
    }
    contents |= {"beyond": [*lines[1:], beyond], "foreign": [*lines, own[:40] + b"\n"]}
    for name, content in contents.items():
        (tmp_path / f"{name}.jsonl").write_bytes(b"".join(content))
        shutil.copy(f"{two}.run.json", f"{name}.jsonl.run.json")
    (tmp_path / "alone.jsonl").write_bytes(b"".join(lines))
    facts = json.loads(Path("torn.jsonl.run.json").read_text())
    Path("torn.jsonl.run.json").write_text(json.dumps(facts | {"shard_requests": None}))  # of a shard that was killed
    shutil.copy("cut.jsonl", "changed.jsonl")  # as of a shard whose INPUT had other lines in its middle
    facts = json.loads(Path("cut.jsonl.run.json").read_text())
    facts["shard_requests"][1] -= 1
    Path("changed.jsonl.run.json").write_text(json.dumps(facts))
    for given, sentence in (
        ([one, three], "no OUT is of shard 2/3; give the OUTs of all 3 shards"),
        ([two], "no OUT is of shard 1/3, 3/3; give"),
        ([one, two, three, two], "part.2.jsonl (shard 2/3) and part.2.jsonl (shard 2/3) are of the same shard"),
        ([one, "other.jsonl", three], "max_tokens  3 and 4"),
        ([one, "fewer.jsonl", three], "limit  None and 5"),
        ([one, "dated.jsonl", three], "template_date  None and '2026-01-01'"),
        ([one, "half.jsonl", three], "number of shards  3 and 2"),
        ([one, "whole.jsonl", three], "whole.jsonl is not the OUT of a shard"),
        ([one, "alone.jsonl", three], "alone.jsonl.run.json is missing"),
        (
            [one, "cut.jsonl", three],
            f"1 of 25 requests are missing: {json.loads(lines[-1])['id']}. Not finished: cut.jsonl",
        ),
        ([one, "changed.jsonl", three], "INPUT was not the same for all shards; run them anew"),
        ([one, "doubled.jsonl", three], f"has {json.loads(own)['id']}, which an earlier line of shard 2/3 has"),
        ([one, "both.jsonl", three], f"has {json.loads(other)['id']}, which an earlier line of shard 1/3 has"),
        ([one, "torn.jsonl", three], "Not finished: torn.jsonl"),
        ([one, "foreign.jsonl", three], f"line {len(lines) + 1}, is not a line that this program wrote"),
        ([one, "beyond.jsonl", three], "has apc-000099, and INPUT has 25 requests"),
        ([one, two, "nowhere.jsonl"], "output nowhere.jsonl cannot be read"),
    ):
        done = apcbatch("merge", *given, "-o", "all.jsonl")
        assert done.code == 2 and sentence in done.stderr, (given, done.stderr)
        assert not list(tmp_path.glob("all.jsonl*")) and not list(tmp_path.glob(".apcbatch*"))
    (tmp_path / "dangling.jsonl.run.json").symlink_to("nowhere/dangling.jsonl.run.json")
    before = {path.name: path.is_file() and path.read_bytes() for path in tmp_path.iterdir()}
    for place, overwrite, sentence in (
        ("half.jsonl", False, "half.jsonl exists; give --overwrite"),
        ("in.jsonl", True, "in.jsonl has no answers of this program"),
        (one, True, "OUT 1 and ALL are the same file"),
        (f"{two}.run.json", True, "OUT 2.run.json and ALL are the same file"),
        ("/dev/null", True, "/dev/null is no file"),
        ("-", True, "- is no file"),
        ("dangling.jsonl", True, "dangling.jsonl.run.json, cannot be written: No such file"),
        ("s3://bucket/all.jsonl", True, "expected a file on this machine"),
    ):
        done = apcbatch("merge", *parts, "-o", place, *["--overwrite"] * overwrite)
        assert done.code == 2 and sentence in done.stderr, (place, done.stderr)
    assert {path.name: path.is_file() and path.read_bytes() for path in tmp_path.iterdir()} == before
    (tmp_path / one).rename("all.jsonl.gz.part")
    shutil.copy(f"{one}.run.json", "all.jsonl.gz.part.run.json")
    done = apcbatch("merge", "all.jsonl.gz.part", two, three, "-o", "all.jsonl.gz", "--overwrite")
    assert done.code == 2 and "OUT 1 and ALL.part are the same file" in done.stderr


def test_all_takes_the_place_of_an_out(apcbatch, parts, tmp_path, monkeypatch) -> None:
    """Fault: ALL replaces a file that a run writes, or that appeared meanwhile; or a kill or a rename that fails leaves
    its lines without their run file or beside another one, so that --resume mixes two runs or refuses, and so does the
    same merge."""
    assert apcbatch("run", "in.jsonl", "-o", "all.jsonl", "--max-tokens", 4).code == 3
    merge, write = ("merge", *parts, "--overwrite", "-o"), Disk.write
    monkeypatch.setattr(sink, "LOCK_WAIT_S", 0.01)
    with closing(FileSink(Path("all.jsonl"))):
        done = apcbatch(*merge, "all.jsonl")
    assert done.code == 2 and "all.jsonl is being written by another run" in done.stderr
    with monkeypatch.context() as patch:
        patch.setattr(Disk, "write", lambda *given: (Path("new.jsonl").touch(), write(*given)))
        done = apcbatch(*merge, "new.jsonl")
    assert done.code == 2 and "new.jsonl appeared or was changed" in done.stderr and not Path("new.jsonl").read_bytes()

    def failing(error: BaseException, end: str, source: str, target: str) -> None:
        if target.endswith(end):
            raise error
        Path(source).replace(target)

    errors = KilledError(), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for error, end in product(errors, (".run.json", ".jsonl")):
        with monkeypatch.context() as patch, suppress(KilledError):
            patch.setattr(Disk, "rename", partial(failing, error, end))
            done = apcbatch(*merge, "all.jsonl")
            assert done.code == 2 and "cannot be written: No space left" in done.stderr
        assert not Path("all.jsonl").exists()
        assert apcbatch("merge", *parts, "-o", "all.jsonl").code == 3, "without --overwrite"
        assert apcbatch("run", "in.jsonl", "-o", "all.jsonl", "--resume").code == 3


def test_parts_whose_begin_is_not_known(apcbatch, parts) -> None:
    """Fault: the times of all other parts are shifted by the years since 1970."""
    begins = [json.loads(Path(f"{part}.run.json").read_text())["begin"] for part in parts]
    for part, expected in zip(parts, [*begins[1:], None], strict=True):
        run_file = Path(f"{part}.run.json")
        run_file.write_text(json.dumps(json.loads(run_file.read_text()) | {"begin": None}))
        assert apcbatch("merge", *parts, "-o", "all.jsonl", "--overwrite").code == 3
        assert json.loads(Path("all.jsonl.run.json").read_text())["begin"] == expected
        ends = [one["apcbatch"]["end_s"] for one in read_records(Path("all.jsonl")) if one["error"] is None]
        assert max(ends) < 1e6


def test_what_a_shard_refuses(apcbatch, parts, tmp_path, monkeypatch) -> None:
    """Fault: a shard whose requests change when it is continued, which would be lost or answered twice; one that
    cannot be merged, or reads the OUT of another one; or prompts that differ between shards by the date."""
    dated = tmp_path / "dated"
    shutil.copytree(DEMO_DIR, dated)
    (dated / "chat_template.jinja").write_text("{{- strftime_now('%Y') -}}{{ messages[-1].content }}")
    few = ("in.jsonl", "-o", "few.jsonl", "--max-tokens", 3)
    assert apcbatch("run", *few, "--shard", "2/3", "--limit", 5).code == 0
    assert apcbatch("run", *few, "--resume").code == 0
    (tmp_path / "in").mkdir()
    shutil.copy("in.jsonl", "in")
    shard = ("--shard", "2/3")
    for words, sentence in (
        (("in.jsonl", *shard), "needs an OUT of its own"),
        (("in.jsonl", "-o", "-", *shard), "needs an OUT of its own"),
        (("in", "-o", "in/out.jsonl", *shard), "shards would read each other's OUT"),
        (("in/*.jsonl", "-o", "in/out.jsonl.gz", *shard), "shards would read each other's OUT"),
        (("-", "-o", "out.jsonl", *shard), "reads INPUT twice, which a stream cannot be"),
        (("in.jsonl", "-o", "out.jsonl", "--ray", "local", *shard), "--shard 2/3 runs without a cluster"),
        (("in.jsonl", "-o", "out.jsonl", "--model", dated, *shard), "give all of them the same --template-date"),
        (("in.jsonl", "-o", "out.jsonl", "--shard", "4/3"), "--shard is '4/3'; expected I/N, such as 2/8"),
        (("in.jsonl", "-o", "out.jsonl", "--shard", "0/3"), "expected I/N"),
        (("in.jsonl", "-o", "out.jsonl", "--shard", "1/9999"), "N up to 4096"),
        (("in.jsonl", "-o", "part.2.jsonl", "--resume", "--shard", "1/3"), "shard  then '2/3', now '1/3'"),
        (("in.jsonl", "-o", "part.2.jsonl", "--resume", "--limit", 4), "limit  then None, now 4"),
        (("in.jsonl", "-o", "few.jsonl", "--resume", "--limit", 4), "limit  then 5, now 4"),
    ):
        done = apcbatch("run", *words)
        assert done.code == 2 and sentence in done.stderr, (words, done.stderr)
    apcbatch("merge", *parts, "-o", "all.jsonl")
    done = apcbatch("run", "in.jsonl", "-o", "all.jsonl", "--resume", *shard)
    assert done.code == 2 and "shard  then None, now '2/3'" in done.stderr
    write_lines(tmp_path / "in.jsonl", [*TWELVE, conversation(99)])
    done = apcbatch("run", "in.jsonl", "-o", "part.2.jsonl", "--resume")
    assert done.code == 2 and "input  then {'name': '" in done.stderr and "--resume the merged OUT" in done.stderr
    words = ("run", "in.jsonl", "-o", "middle.jsonl", "--max-tokens", 3, *shard)
    monkeypatch.setattr(runfile, "END_BYTES", 8)
    monkeypatch.setattr(runfile, "LEAST_END_BYTES", 8)
    assert apcbatch(*words).code == 0 and apcbatch(*words, "--resume").code == 0
    Path("in.jsonl").write_text(Path("in.jsonl").read_text().replace('"c-5"', '"c-x"'))
    done = apcbatch(*words, "--resume")
    assert done.code == 2 and "input  then {'name': '" in done.stderr, done.stderr
    options = ("--model", dated, "--template-date", "2026-01-01", "--max-tokens", 1)
    assert apcbatch("run", "in.jsonl", "-o", "out.jsonl", *shard, *options).code == 0


def test_what_others_answer_is_rendered_once(apcbatch, tmp_path, monkeypatch) -> None:
    """Fault: a process renders the prompts of other shards for its own plan again, or those of a line that it has
    answered."""
    rendered: list[int] = []
    texts, numbers = ChatTemplate.texts, {line["messages"][1]["content"]: at for at, line in enumerate(TWELVE, start=1)}

    def counted(self: ChatTemplate, messages: list[Any], *arguments: Any) -> Any:
        rendered.append(numbers[messages[1]["content"]])
        return texts(self, messages, *arguments)

    monkeypatch.setattr(ChatTemplate, "texts", counted)
    monkeypatch.setattr(render_ahead, "AFTER", 1)
    write_lines(tmp_path / "in.jsonl", TWELVE)
    words, part = ("run", "in.jsonl", "-o", "part.jsonl", "--draft", "none", "--shard", "2/3"), tmp_path / "part.jsonl"
    assert apcbatch(*words).code == 0
    own = {record["line"] for record in read_records(part)}
    assert 0 < len(own) < 12 and sorted(rendered) == sorted([*range(1, 13), *own])
    lines = part.read_bytes().splitlines(keepends=True)
    part.write_bytes(b"".join(lines[:-1]))
    rendered.clear()
    assert apcbatch(*words, "--resume").code == 0
    assert sorted(rendered) == sorted([*range(1, 13), json.loads(lines[-1])["line"]])


def test_ctrl_c_while_the_lines_are_divided(apcbatch, tmp_path, monkeypatch) -> None:
    """Fault: a signal waits until a window of 16 million tokens is read, or such a shard counts as finished."""
    rendered: list[int] = []
    render = Renderer.render

    def pressed(self: Renderer, conversation: Any, *arguments: Any) -> Any:
        rendered.append(conversation.line)
        if len(rendered) == 3:
            signal.raise_signal(signal.SIGINT)
        return render(self, conversation, *arguments)

    write_lines(tmp_path / "in.jsonl", TWELVE)
    for policy in ("all", "planned"):
        rendered.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Renderer, "render", pressed)
            words = ("run", "in.jsonl", "-o", f"{policy}.jsonl", "--shard", "2/3", "--policy", policy)
            assert apcbatch(*words).code == 130 and rendered == [1, 2, 3], policy
        assert (read_run_file(f"{policy}.jsonl.run.json")[0] or {})["shard_requests"] is None


@pytest.mark.effort(3)
@pytest.mark.data
@pytest.mark.slow
def test_real_conversations_in_shards(apcbatch, shared_data: Path, tmp_path) -> None:
    """Fault: what only real files have: long tools, long prompts that the engine refuses, hundreds of equal
    beginnings."""
    for path in sorted(shared_data.glob("*.jsonl")):
        folder = tmp_path / path.stem
        folder.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            code = apcbatch("run", path, "-o", "probe.jsonl", "--max-tokens", 2, "--limit", 15).code
            words = (path, "--max-tokens", 2, "--limit", 15)
            compared(apcbatch, words, random.randint(2, 7), code)
