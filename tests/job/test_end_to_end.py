"""The real engine with the bundled model through the command line: what `run` prints and writes."""

from __future__ import annotations

import json
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
from tests.job.conftest import ROOT, answers

LINE = re.compile(
    r"(?P<id>\S+) +ok +prompt +(?P<prompt>\d+) +cached +(?P<cached>\d+) \( *[\d.]+ %\) +(?P<source>\S+) +"
    r"new +(?P<new>\d+) +out +(?P<out>\d+)(?:   miss: (?P<miss>.*))?"
)


def prompt_line(custom_id, token_ids):
    body = {"prompt": token_ids, "max_tokens": 1}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def tokens(count, seed):
    draw = random.Random(seed)
    return [draw.randrange(10, 4000) for _ in range(count)]


@pytest.fixture
def printed(capsys, monkeypatch, tmp_path):
    """printed(prompts, *options) -> the request lines of a run over these token ids, one after the other."""
    monkeypatch.chdir(tmp_path)

    def run(prompts, *options):
        write_lines(tmp_path / "in.jsonl", [prompt_line(f"r{number}", ids) for number, ids in enumerate(prompts)])
        capsys.readouterr()
        code = main(["run", "in.jsonl", "-o", "out.jsonl", "--overwrite", "--max-running", "1", *map(str, options)])
        out = capsys.readouterr().out.splitlines()
        assert code == 0
        return [LINE.fullmatch(line) for line in out[:-1]]

    return run


def cached(matches):
    return [int(match["cached"]) for match in matches]


def test_the_same_prompt_resent(printed):
    """Fault: a hit as long as the prompt, or one block too short; a silent zero for one shorter than a block."""
    lengths, hits = (15, 16, 17, 1000, 1008, 1024, 1025), (0, 0, 16, 992, 992, 1008, 1024)
    matches = printed([tokens(length, length) for length in lengths for _ in range(2)], "--block-size", 16)
    assert cached(matches)[::2] == [0] * 7 and cached(matches)[1::2] == list(hits)
    assert [int(match["new"]) + hit for match, hit in zip(matches[1::2], hits, strict=True)] == list(lengths)
    assert matches[1]["miss"] == "shorter_than_block (minimum 16)"


def test_common_beginnings_and_forks_in_the_middle(printed):
    """Fault: only a whole earlier prompt is reused, not its beginning, or a divergence inside it restarts from zero."""
    stem, trunk = tokens(1000, 1), tokens(2000, 9)
    prompts = [stem + tokens(100, 2 + n) for n in range(3)]
    prompts += [trunk, *(trunk[:1500] + tokens(500, 2 + n) for n in range(3))]
    assert cached(printed(prompts, "--block-size", 16)) == [0, 992, 992, 0, 1488, 1488, 1488]


def test_the_incremental_agent(printed):
    """Fault: B after A gets nothing."""
    common, tail = tokens(1700, 1), tokens(90, 2)
    first = common + tokens(3382 - 1700 - 90, 3) + tail
    second = common + tokens(4584 - 1700 - 90, 4) + tail
    assert cached(printed([first, first, second, second], "--block-size", 544)) == [0, 3264, 1632, 4352]


@pytest.fixture
def chats(tmp_path, monkeypatch):
    """An input of four conversations of three turns."""
    monkeypatch.chdir(tmp_path)
    return write_lines(tmp_path / "in.jsonl", [conversation(number, turns=3) for number in range(4)])


OPTIONS = ["--max-tokens", "4", "--block-size", "16", "--logprobs"]


def run(*arguments):
    return main(["run", "in.jsonl", "-q", *OPTIONS, *arguments])


@pytest.mark.slow
def test_a_second_run_restores_from_disk_and_answers_the_same(chats, tmp_path, capsys):
    """Fault: states do not survive the process, or a restored one changes a token or a log-probability."""
    assert run("-o", "cold.jsonl", "--no-store", "--policy", "none") == 0
    assert run("-o", "first.jsonl", "--store", "states") == 0
    capsys.readouterr()
    assert run("-o", "second.jsonl", "--store", "states") == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["cached_by_source"]["disk"] > 0 and summary["hit_rate"] > 0.7
    cold, first, second = (answers(read_records(tmp_path / f"{name}.jsonl")) for name in ("cold", "first", "second"))
    assert cold == first == second
    assert main(["store", "check", "states"]) == 0


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


def test_a_rollout_reuses_its_own_answers(chats, tmp_path, capsys):
    """Fault: the states reached by decoding are not found for the next turn, or change what it says."""
    assert run("-o", "cold.jsonl", "--turns", "rollout", "--no-store", "--policy", "none") == 0
    capsys.readouterr()
    assert run("-o", "warm.jsonl", "--turns", "rollout", "--max-running", "2") == 0
    assert json.loads(capsys.readouterr().out)["hit_rate"] > 0.5
    assert answers(read_records(tmp_path / "cold.jsonl")) == answers(read_records(tmp_path / "warm.jsonl"))
