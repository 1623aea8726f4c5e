"""The real engine with the bundled model through the command line: what `run` prints and writes."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest

from apcbatch.cli.program import main
from tests.chats import conversation, read_records, write_lines
from tests.effort import tries
from tests.job.conftest import ROOT, answers, batch_line

LINE = re.compile(
    r"(?P<id>\S+) +ok +prompt +(?P<prompt>\d+) +cached +(?P<cached>\d+) \( *[\d.]+ %\) +(?P<source>\S+) +"
    r"new +(?P<new>\d+) +out +(?P<out>\d+)(?:   miss: (?P<miss>.*))?"
)


def tokens(count, seed):
    draw = random.Random(seed)
    return [draw.randrange(10, 4000) for _ in range(count)]


@pytest.fixture
def printed(capsys, monkeypatch, tmp_path):
    """printed(prompts, *options) -> the request lines of a run over these token ids, one after the other."""
    monkeypatch.chdir(tmp_path)

    def run(prompts, *options):
        lines = [batch_line(f"r{number}", prompt=ids, max_tokens=1) for number, ids in enumerate(prompts)]
        write_lines(tmp_path / "in.jsonl", lines)
        capsys.readouterr()
        code = main(["run", "in.jsonl", "-o", "out.jsonl", "--overwrite", "--max-running", "1", *map(str, options)])
        out = capsys.readouterr().out.splitlines()
        assert code == 0
        return [LINE.fullmatch(line) for line in out[:-1]]

    return run


def cached(matches):
    return [int(match["cached"]) for match in matches]


PREFIX, LONG, TAIL = tokens(1000, 1), tokens(2000, 9), tokens(90, 2)
FIRST, SECOND = (LONG[:1700] + tokens(length - 1790, length) + TAIL for length in (3382, 4584))


@pytest.mark.parametrize(
    ("block_size", "prompts", "hits"),
    [
        (16, [PREFIX + tokens(100, 2 + n) for n in range(3)], [0, 992, 992]),
        (16, [LONG, *(LONG[:1500] + tokens(500, 2 + n) for n in range(3))], [0, 1488, 1488, 1488]),
        (544, [FIRST, FIRST, SECOND, SECOND], [0, 3264, 1632, 4352]),
    ],
    ids=["common beginnings", "forks in the middle", "B after A"],
)
def test_what_two_prompts_share_is_cached(printed, block_size, prompts, hits):
    """Fault: only a whole earlier prompt is reused, not its beginning; a divergence inside it restarts from zero."""
    assert cached(printed(prompts, "--block-size", block_size)) == hits


def test_the_same_prompt_resent(printed):
    """Fault: a hit as long as the prompt, or one block too short; a silent zero for one shorter than a block."""
    lengths, hits = (15, 16, 17, 1000, 1008, 1024, 1025), (0, 0, 16, 992, 992, 1008, 1024)
    matches = printed([tokens(length, length) for length in lengths for _ in range(2)], "--block-size", 16)
    assert cached(matches)[::2] == [0] * 7 and cached(matches)[1::2] == list(hits)
    assert [int(match["new"]) + hit for match, hit in zip(matches[1::2], hits, strict=True)] == list(lengths)
    assert matches[1]["miss"] == "shorter_than_block (minimum 16)"


@pytest.fixture
def chats(tmp_path, monkeypatch):
    """An input of four conversations of three turns."""
    monkeypatch.chdir(tmp_path)
    return write_lines(tmp_path / "in.jsonl", [conversation(number, turns=3) for number in range(4)])


OPTIONS = ["--max-tokens", "4", "--block-size", "16", "--logprobs"]


def run(*arguments):
    return main(["run", "in.jsonl", "-q", *OPTIONS, *arguments])


@pytest.mark.slow
def test_killed_each_request_is_there_once(chats, tmp_path):
    """With the real engine and a store. Fault: SIGKILL loses, doubles or changes an answer."""
    assert run("-o", "whole.jsonl", "--no-store") == 0
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "apcbatch", "run", "in.jsonl", "-o", "out.jsonl", "--store", "states", *OPTIONS]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for lines in sorted(random.sample((1, 4, 8), tries(3))):
        process = subprocess.Popen(
            [*command, "--resume", "--max-running", "1"], cwd=tmp_path, env=environment,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        while process.poll() is None and (not out.exists() or out.read_bytes().count(b"\n") < lines):
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert run("-o", "out.jsonl", "--store", "states", "--resume") == 0
    assert answers(read_records(out)) == answers(read_records(tmp_path / "whole.jsonl"))


def test_a_rollout_reuses_its_own_answers(chats, tmp_path, monkeypatch):
    """Fault: a rollout is planned as if its prompts were known; the states of its answers, or the place where a prompt
    leaves an earlier one, are not kept; what is reused changes what the next turn says."""
    monkeypatch.delenv("APCBATCH_POLICY")
    rollout = ("--turns", "rollout", "--max-tokens", "20", "--ignore-eos", "--no-store", "--max-running", "1")
    assert run("-o", "cold.jsonl", *rollout, "--policy", "none") == run("-o", "warm.jsonl", *rollout) == 0
    cold, warm = (read_records(tmp_path / name) for name in ("cold.jsonl", "warm.jsonl"))
    assert answers(cold) == answers(warm) and len(warm) == 12
    turns = {record["custom_id"]: record for record in warm}
    for number in range(4):
        for turn in (2, 3):
            before = turns[f"c-{number}#{turn - 1}"]["response"]["body"]["usage"]
            reuse = turns[f"c-{number}#{turn}"]["apcbatch"]
            # The last token of an answer was never fed, so the state reached lies one token before its end.
            assert reuse["cached_tokens"] == (before["total_tokens"] - 1) // 16 * 16, (number, turn)
    first, second, third = (turns[f"c-{number}#1"]["apcbatch"] for number in range(3))
    assert first["cached_tokens"] == 0 and second["ideal_cached_tokens"] > 16
    assert third["cached_tokens"] == second["ideal_cached_tokens"] // 16 * 16, "where the first two part"
