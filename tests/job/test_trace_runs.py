"""The trace of real runs with the bundled model: its sums are the summary's, and OUT is the same without it."""

from __future__ import annotations

import json
import random

import pytest

from apcbatch.cli.program import main
from apcbatch.job.tracing.trace_file import read_trace
from tests.chats import conversation, read_records, write_lines
from tests.effort import tries
from tests.job.test_trace import agrees, without_times

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """run(OUT, *options) -> the summary of a run over in.jsonl."""
    monkeypatch.chdir(tmp_path)

    def start(out, *options):
        capsys.readouterr()
        code = main(["run", "in.jsonl", "-o", out, "--max-tokens", "3", "--device", "cpu", "-q", *map(str, options)])
        assert code in (0, 3)
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return start


OPTIONS = (
    ("--policy", "planned", "--store", "states"),
    ("--policy", "all", "--block-size", 7, "--pool-size", "2MiB"),
    ("--policy", "last", "--turns", "rollout"),
    ("--policy", "none"),
    ("--policy", "planned", "--score"),
    ("--policy", "all", "--turns", "last", "--max-batch-tokens", 50),
)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "_".join(map(str, options)))
def test_the_sums_are_the_summary_s(run, tmp_path, options):
    """Fault: under some policy, in a rollout, of scored or of several answers, after a resume or from the store, the
    tree has other tokens than the summary; or the trace changes an answer."""
    lines = [conversation(random.randrange(100), turns=random.randint(1, 4)) | {"id": str(n)} for n in range(5)]
    several = {"model": "demo", "messages": lines[0]["messages"][:1], "n": 3, "temperature": 1, "max_tokens": 2}
    if "--score" not in options:
        lines.append({"custom_id": "n", "method": "POST", "url": "/v1/chat/completions", "body": several})
    write_lines(tmp_path / "in.jsonl", [*lines, "{"])
    summaries = [run("out.jsonl", *options, "--limit", 3), run("out.jsonl", *options, "--resume")]
    found = read_trace(tmp_path / "out.jsonl.trace.jsonl").segments
    assert len(found) == 2
    for segment, summary in zip(found, summaries, strict=True):
        agrees(segment, summary)
        stems = segment.edges
        assert sum(stems.snapshots) == summary["snapshots_written"] + summary["snapshots_for_later"]
        assert sum(stems.dropped) <= summary["snapshots_evicted"]
        assert sum(segment.passes.prefill_tokens) == summary["computed_tokens"]
        assert segment.passes.store_bytes[-1] <= summary["store_bytes_written"]
        spent = summary["seconds"]
        assert abs(sum(segment.passes.prefill_s) - spent["prefill"]) < 0.01
        assert all(end <= spent["total"] for end in segment.passes.begin_s)
        assert stems.text[1].startswith("<|bos|>") if len(stems.text) == 2 else any(stems.text)
    run("plain.jsonl", *options, "--no-trace")
    assert not (tmp_path / "plain.jsonl.trace.jsonl").exists()
    assert answers_of(tmp_path / "plain.jsonl") == answers_of(tmp_path / "out.jsonl")


def answers_of(path) -> list[dict]:
    """The records by id without times, and without what the second of two runs finds in memory or the store."""
    records = without_times(path)
    for record in records:
        for name in ("cached_tokens", "computed_tokens", "cached_from", "ideal_cached_tokens", "boundary"):
            (record["apcbatch"] or {}).pop(name, None)
        for name in ("miss_reason", "miss_detail"):
            (record["apcbatch"] or {}).pop(name, None)
        body = (record["response"] or {}).get("body")
        if body:
            del body["usage"]
    return sorted(records, key=lambda record: record["id"])


@pytest.mark.data
def test_real_conversations(run, tmp_path, shared_data):
    """Fault: real prompts, which share long beginnings, are counted wrong, or their stems have no words."""
    names = random.sample(["tau_bench", "taskmaster4", "toolbench_dfs"], tries(3))
    lines = [random.sample((shared_data / f"{name}.jsonl").read_text().splitlines(), 2) for name in names]
    write_lines(tmp_path / "in.jsonl", sum(lines, []))
    summary = run("out.jsonl", "--max-tokens", 1)
    [segment] = read_trace(tmp_path / "out.jsonl.trace.jsonl").segments
    agrees(segment, summary)
    assert segment.edges.end[1] > 0 and segment.edges.text[1].startswith("<|bos|>")
    assert max(segment.edges.end) <= max(
        record["response"]["body"]["usage"]["prompt_tokens"] for record in read_records(tmp_path / "out.jsonl")
    )
