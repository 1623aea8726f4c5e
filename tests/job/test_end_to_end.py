"""The real engine with the bundled model through the command line: what `run` prints and writes."""

from __future__ import annotations

import pytest

from apcbatch.cli.program import main
from apcbatch.model.locate import DEMO_DIR
from apcbatch.model.weight_files import WeightFiles
from tests.chats import conversation, read_records, write_lines
from tests.job.conftest import answers


@pytest.fixture
def chats(tmp_path, monkeypatch):
    """An input of four conversations of three turns."""
    monkeypatch.chdir(tmp_path)
    return write_lines(tmp_path / "in.jsonl", [conversation(number, turns=3) for number in range(4)])


OPTIONS = ["--max-tokens", "4", "--block-size", "16", "--logprobs"]


def run(*arguments):
    return main(["run", "in.jsonl", "-q", *OPTIONS, *arguments])


def test_a_run_reads_the_headers_of_the_weights_once(chats, tmp_path, monkeypatch):
    """Fault: each check opens and parses the files again, which takes seconds for a model of many experts; or what was
    checked is not what is loaded."""
    read_header, paths = WeightFiles._read_header, []
    monkeypatch.setattr(WeightFiles, "_read_header", lambda *given: paths.append(given[1]) or read_header(*given))
    assert run("-o", "out.jsonl", "--no-store", "--limit", "1") == 0
    assert len(paths) == len(list(DEMO_DIR.glob("*.safetensors"))) == 1


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
