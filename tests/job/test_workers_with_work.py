"""How many workers a run on a cluster can have work for, by the first lines of its input."""

from __future__ import annotations

import pytest

from apcbatch.cluster import open as cluster_opening
from apcbatch.data.input.records import BadLine
from apcbatch.errors import RequestError
from apcbatch.job import open
from tests.chats import conversation, read_records, write_lines
from tests.job.fakes import FakeEngine

MESSAGES = len(conversation(1)["messages"])


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("lines", "options", "most"),
    [
        ([conversation(1)], (), MESSAGES),
        ([conversation(number, turns=3) for number in range(2)], (), 2 * len(conversation(0, turns=3)["messages"])),
        ([conversation(number) for number in range(9)], ("--limit", 2), 2 * MESSAGES),
        ([conversation(1), {}], ("--limit", 5), MESSAGES + 1),
        ([conversation(number) for number in range(400)], (), None),
        ([conversation(number) for number in range(400)], ("--limit", 300), None),
    ],
)
def test_no_more_workers_than_requests(apcbatch, monkeypatch, tmp_path, lines, options, most):
    """Faults: 64 workers are asked for and the input has three lines; a line that is lost or done twice."""
    seen = []

    def open_cluster(config, address, salt, warn, say, conversation_of, most_workers):
        seen.append(most_workers)
        return FakeEngine(config, warn)

    monkeypatch.setattr(cluster_opening, "open_cluster", open_cluster)
    write_lines(tmp_path / "in.jsonl", lines)
    apcbatch("run", "in.jsonl", "-o", "out.jsonl", "--max-tokens", 1, "--turns", "last", "--ray", "auto", *options)
    assert seen == [most]
    limit = options[1] if options else len(lines)
    assert sorted(one["line"] for one in read_records(tmp_path / "out.jsonl")) == [
        *range(1, 1 + min(limit, len(lines)))
    ]


def test_a_few_lines_are_read_ahead():
    """Faults: an input that ends behind the lines that are read ahead is taken for a long one, or a line is lost."""
    for lines, most in [(0, 1), (255, 255), (256, None), (300, None)]:
        records = [BadLine(number, RequestError("invalid_json", "no")) for number in range(lines)]
        found, number = open._bound_workers(iter(records), None)
        assert number == most and list(found) == records
