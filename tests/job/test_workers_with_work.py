"""How many workers a run on a cluster can have work for, by the first lines of its input."""

from __future__ import annotations

import io
import sys

import pytest

from apcbatch.cluster import sizing
from tests.chats import conversation, read_records, write_lines
from tests.job.conftest import batch_line
from tests.job.fakes import FakeEngine

MESSAGES = len(conversation(1)["messages"])


@pytest.mark.parametrize(
    ("lines", "options", "most"),
    [
        ([conversation(1)], (), MESSAGES),
        ([conversation(number, turns=3) for number in range(2)], (), 2 * len(conversation(0, turns=3)["messages"])),
        ([conversation(number) for number in range(9)], ("--limit", 2), 2 * MESSAGES),
        ([conversation(1), {}], ("--limit", 5), MESSAGES + 1),
        ([batch_line("a", prompt="x"), batch_line("b", prompt="x")], (), 2),
        ([conversation(1)] + [{}] * 254, (), MESSAGES + 254),
        ([conversation(1)] + [{}] * 255, (), None),
        ([conversation(1)] + [{}] * 299, ("--limit", 280), None),
    ],
)
def test_no_more_workers_than_requests(apcbatch, monkeypatch, tmp_path, lines, options, most):
    """Faults: 64 workers are asked for and the input has three lines; an input that ends behind the lines that are read
    ahead is taken for a long one; a line that is lost or done twice; a cluster starts only once a pipe has ended, or
    with a dtype that each worker resolves by itself."""
    seen = []

    def open_cluster(config, address, salt, warn, say, conversation_of, most_workers):
        assert config.dtype == "bfloat16"
        seen.append(most_workers)
        return FakeEngine(config, warn)

    monkeypatch.setattr(sizing, "open_cluster", open_cluster)
    data = write_lines(tmp_path / "in.jsonl", lines).read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    limit = options[1] if options else len(lines)
    for name in ("in.jsonl", "-"):
        words = ("run", name, "-o", f"{name}.out", "--max-tokens", 1, "--turns", "last", "--ray", "auto", *options)
        assert apcbatch(*words).code in (0, 3)
        found = sorted(one["line"] for one in read_records(tmp_path / f"{name}.out"))
        assert found == [*range(1, 1 + min(limit, len(lines)))]
    assert seen == [most, None]
