"""The trees of several processes, put together: sums, places, bounds."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import orjson
import pytest

from apcbatch.job.tracing.segment import MAX_EDGE_ROWS, EdgeColumns, Segment, parsed, segment_of
from apcbatch.report import tree
from apcbatch.report.tree import ADDED, merge_edges
from tests.report.documents import trace_lines

SUMS = ("restored", "computed", "memory", "disk", "snapshots", "snapshot_bytes", "dropped")


def segments(requests: int, seed: int, count: int = 1) -> list[Segment]:
    return [segment_of(parsed(line)["segment"]) for line in trace_lines(requests, seed, count)]


def sums(columns: dict[str, Any]) -> dict[str, int]:
    return {name: sum(columns[name]) for name in SUMS}


def check_is_a_tree(tree: dict[str, Any]) -> None:
    columns = {field.name: tree[field.name] for field in dataclasses.fields(EdgeColumns)}
    line = trace_lines(20, 0, 1)[0]
    segment = parsed(line)["segment"] | {"stems": columns}
    segment_of(orjson.loads(orjson.dumps(segment)))  # which refuses what is no tree


def test_sums_stay_whatever_is_put_together() -> None:
    """Fault: what a process restored is lost or counted twice where its edges meet another's."""
    for _ in range(5):
        draw = random.randrange(1 << 30)
        parts = [*segments(150, draw), *segments(90, draw + 1), *segments(150, draw)]
        tree = merge_edges(parts)
        assert tree is not None and tree["note"] is None
        check_is_a_tree(tree)
        assert sums(tree) == {name: sum(sum(getattr(one.edges, name)) for one in parts) for name in SUMS}
        assert tree["requests"][0] == sum(one.edges.requests[0] for one in parts)


def test_the_same_edges_are_one() -> None:
    """Fault: a resumed run shows its shared prefix once for each process."""
    [one] = segments(150, random.randrange(1 << 30))
    words = [text or f"edge {row}" for row, text in enumerate(one.edges.text)]
    one = dataclasses.replace(one, edges=dataclasses.replace(one.edges, text=[f"{w} {n}" for n, w in enumerate(words)]))
    tree = merge_edges([one, one])
    assert tree is not None and tree["parent"] == one.edges.parent
    for name in ADDED:
        assert tree[name] == [2 * value for value in getattr(one.edges, name)]


def test_a_late_drop_is_later() -> None:
    """Fault: times of a resumed process count from its own begin, as if they were before."""
    [one] = segments(60, random.randrange(1 << 30))
    later = dataclasses.replace(one, begin=one.begin + 100)
    tree = merge_edges([one, later])
    assert tree is not None
    dropped = [s for s in tree["dropped_s"] if s is not None]
    last = max((s for s in one.edges.dropped_s if s is not None), default=None)
    assert (max(dropped) if dropped else None) == (None if last is None else last + 100)


def test_no_more_edges_than_a_page_shows() -> None:
    """Fault: many resumed processes make a tree of any size; or what is left out is lost from the sums."""
    draw = random.randrange(1 << 30)
    parts = [one for n in range(4) for one in segments(3000, draw + n)]
    assert sum(len(one.edges.parent) for one in parts) > MAX_EDGE_ROWS
    tree = merge_edges(parts)
    assert tree is not None and len(tree["parent"]) == MAX_EDGE_ROWS and "edges that save least" in tree["note"]
    check_is_a_tree(tree)
    assert sums(tree) == {name: sum(sum(getattr(one.edges, name)) for one in parts) for name in SUMS}
    assert sum(tree["hidden"]) > 0


def test_what_saves_least_is_folded_into_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: an edge that saves much is folded before one that saves little, a parent before its children, or what was
    folded is counted as another's, twice or not at all."""
    monkeypatch.setattr(tree, "MAX_EDGE_ROWS", 4)
    # 0 is the root; 1 has the leaves 3 and 4, 2 has the leaf 5. 5 saves least, then its parent 2, then 3.
    columns: dict[str, list[Any]] = {name: [1, 2, 4, 8, 16, 32] for name in ADDED}
    columns |= {"parent": [-1, 0, 0, 1, 1, 2], "begin": [0, 0, 0, 5, 5, 6], "end": [0, 5, 6, 9, 9, 9]}
    columns |= {"restored": [0, 90, 20, 30, 40, 10], "hidden": [0, 0, 0, 0, 3, 0], "requests": [7, 4, 3, 1, 2, 2]}
    columns |= {"dropped_s": [None] * 6, "text": list("abcdef")}
    [one] = segments(20, 0)
    one = dataclasses.replace(one, edges=EdgeColumns(**columns))
    merged = merge_edges([one])
    assert merged is not None and merged["note"] == "2 edges that save least are counted in the edges above them"
    assert (merged["text"], merged["parent"]) == (["a", "b", "d", "e"], [-1, 0, 1, 1])
    assert (merged["restored"], merged["computed"]) == ([30, 90, 30, 40], [1 + 4 + 32, 2, 8, 16])
    assert (merged["requests"], merged["hidden"]) == ([7, 4, 1, 2], [3, 0, 0, 3])
    monkeypatch.setattr(tree, "MAX_EDGE_ROWS", 2)
    both = merge_edges([one])
    assert both is not None and (both["hidden"], both["restored"]) == ([3, 1 + 2], [30, 90 + 30 + 40])
    monkeypatch.setattr(tree, "MAX_EDGE_ROWS", 6)
    whole = merge_edges([one])
    assert whole is not None and whole["note"] is None and whole["text"] == columns["text"]
    monkeypatch.setattr(tree, "MAX_EDGE_ROWS", 2)
    columns = {name: values[:3] for name, values in columns.items()} | {"restored": [0, 20, 90]}
    star = merge_edges([dataclasses.replace(one, edges=EdgeColumns(**columns))])
    assert star is not None and star["text"] == ["a", "c"], "the first edge goes if it saves least"
    columns |= {name: [*values, values[-1]] for name, values in columns.items()}
    columns |= {"parent": [-1, 0, 1, 1], "begin": [0, 0, 5, 5], "end": [0, 5, 9, 9], "text": list("abcd")}
    fork = merge_edges([dataclasses.replace(one, edges=EdgeColumns(**columns | {"restored": [0, 35, 30, 40]}))])
    assert fork is not None and fork["text"] == ["a", "b"], "an edge stays while there are edges below it"
