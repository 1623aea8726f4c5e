"""The edges of a trace and their rows, against sums over every token of every prompt."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import fields

import numpy as np

from apcbatch.engine.observer import KeptSnapshot
from apcbatch.errors import RequestError
from apcbatch.job.tracing.edge_rows import edge_columns
from apcbatch.job.tracing.edges import Edge, SnapshotCounts, TokenCounts, TraceTree, _fold_order, edges_below
from apcbatch.job.tracing.segment import EdgeColumns
from tests.plan.plan_oracle import random_dataset


def array(tokens):
    return np.array(tokens, np.int32)


def shown(token_ids):
    return " ".join(map(str, token_ids))


def requests_of(seed):
    """(prompt, cached tokens, source) of random requests: what is restored is a prefix that came before."""
    draw, before = random.Random(seed), [()]
    for prompt in random_dataset(seed).prompts:
        longest = max(sum(1 for _ in common(prompt, other)) for other in before)
        cached = draw.randint(0, min(longest, len(prompt) - 1)) if draw.random() < 0.8 else 0
        yield prompt, cached, draw.choice(["memory", "disk"]) if cached else "none"
        before.append(prompt)


def common(one, other):
    for a, b in zip(one, other, strict=False):
        if a != b:
            return
        yield a


def paths(edges: EdgeColumns, prompts) -> list[tuple[int, ...]]:
    """The prefix at each row's end, found by its text, which tells the first tokens of the row."""
    found: list[tuple[int, ...]] = [()]
    for parent, begin, end, text in list(zip(edges.parent, edges.begin, edges.end, edges.text, strict=True))[1:]:
        head = tuple(map(int, text.split()[:-1] if len(text) == 80 else text.split()))
        whole = found[parent] + head
        found.append(next(prompt[:end] for prompt in prompts if prompt[: begin + len(head)] == whole))
    return found


def test_each_row_counts_the_tokens_of_its_requests():
    """Fault: an edge that is split, cut where a request was resumed, or put together again counts tokens twice, in the
    wrong row, or not at all."""
    seed = random.randrange(10**6)
    for number in range(60):
        requests = list(requests_of(seed + number))
        tree = TraceTree()
        for prompt, cached, source in requests:
            tree.answered(array(prompt), cached, source)
        edges = edge_columns(tree.root, shown)
        assert tree.num_edges == sum(edge.parent is not None for edge in edges_below(tree.root))
        expected = {name: Counter() for name in ("memory", "disk", "computed", "requests")}
        for prompt, cached, source in requests:
            for position in range(len(prompt)):
                expected[source if position < cached else "computed"][prompt[: position + 1]] += 1
                expected["requests"][prompt[: position + 1]] += 1
        ends = {prompt for prompt, _, _ in requests}
        prefixes = paths(edges, [prompt for prompt, _, _ in requests])
        where = f"seed {seed + number}"
        assert len(set(prefixes)) == len(prefixes), where
        for row, prefix in enumerate(prefixes):
            edge = [prefix[:p] for p in range(edges.begin[row] + 1, edges.end[row] + 1)]
            for name in ("memory", "disk", "computed"):
                assert getattr(edges, name)[row] == sum(expected[name][p] for p in edge), (where, row, name)
            assert edges.restored[row] == edges.memory[row] + edges.disk[row]
            assert edges.requests[row] == (expected["requests"][prefix] if prefix else len(requests)), where
            assert not row or len({expected["requests"][p] for p in edge}) == 1, where
        forks = {p[:-1] for p in expected["requests"]} - {()}
        branches = Counter(p[:-1] for p in expected["requests"])
        assert set(prefixes) == {()} | ends | {p for p in forks if branches[p] > 1}, where


def test_what_is_folded_goes_on_counting():
    """Fault: tokens or requests of a branch that was folded to stay within the bounds are lost or counted twice; the
    bounds do not hold."""
    for bounds in [(10**6, 7), (40, 10**6), (25, 5), (1, 1)]:
        seed = random.randrange(10**6)
        folded = 0
        for number in range(60):
            requests = list(requests_of(seed + number))
            tree = TraceTree(*bounds)
            for prompt, cached, source in requests:
                tree.answered(array(prompt), cached, source)
                assert tree.num_tokens <= bounds[0] and tree.num_edges <= bounds[1], seed + number
            most = random.Random(seed + number).randint(1, 9)
            edges = edge_columns(tree.root, shown, most)
            assert len(edges.parent) <= most
            for name in ("memory", "disk"):
                total = sum(cached for _, cached, source in requests if source == name)
                assert sum(getattr(edges, name)) == total, seed + number
            assert sum(edges.computed) == sum(len(prompt) - cached for prompt, cached, _ in requests), seed + number
            assert edges.requests[0] == len(requests)
            assert all(hidden <= number for hidden, number in zip(edges.hidden, edges.requests, strict=True))
            folded += edges.hidden[0]
        assert folded, f"nothing was folded into the root from seed {seed} on"


def test_nothing_is_folded_at_the_bounds():
    """Fault: an edge is folded though there is room for it, to the token and to the edge."""
    for bounds, rows in [((6, 9), 3), ((5, 9), 2), ((99, 2), 3), ((99, 1), 1)]:
        tree = TraceTree(*bounds)
        for first in (1, 5):
            tree.answered(array([first, 2, 3]), 0, "none")
        edges = edge_columns(tree.root, shown)
        assert (len(edges.parent), sum(edges.computed)) == (rows, 6)


def test_an_edge_grows_only_where_nothing_is_counted_at_its_end():
    """Fault: tokens are appended behind requests that ended or resumed there, and count as theirs."""
    for counted, grows in [
        ({}, True),
        ({"ends": 1}, False),
        ({"memory": 1}, False),
        ({"disk": 1}, False),
        ({"folded": TokenCounts(requests=1)}, False),
        ({"folded": TokenCounts(memory=5)}, True),
        ({"parent": None}, False),
        ({"children": {b"": Edge(b"", None, 1)}}, False),
    ]:
        edge = Edge(**{"tokens": bytes(4), "parent": Edge(b"", None, 0), "end": 1} | counted)
        assert edge.can_grow == grows


def test_a_tenth_is_free_after_folding():
    """Fault: every request folds an edge, or most of the picture goes at once; or what goes is not the oldest."""
    for bounds in [(40, 99), (99, 40)]:
        tree = TraceTree(*bounds)
        for number in range(41):
            assert tree.num_edges == tree.num_tokens == number
            tree.answered(array([number]), 0, "none")
        assert tree.num_edges == tree.num_tokens == 36
        assert [edge.tokens for edge in edges_below(tree.root)[1:]] == [array([one]).tobytes() for one in range(5, 41)]


def test_the_branch_that_saves_most_stays():
    """Fault: the rows that are folded are those that the picture is about."""
    tree = TraceTree(max_edges=40)
    saver = array(range(1000, 1100))
    for _ in range(3):
        tree.answered(saver, 99, "memory")
    for number in range(200):
        tree.answered(array([number, number + 1, number + 2]), 0, "none")
    for most in (4_096, 5, 2):
        edges = edge_columns(tree.root, shown, most)
        assert (0, 99, 3, 297) in zip(edges.begin, edges.end, edges.requests, edges.restored, strict=True)
        assert edges.hidden[0] > 0 and len(edges.parent) <= most


def test_snapshots_are_counted_on_their_stem():
    """Fault: a snapshot that was dropped is counted on the wrong edge, or not any more once its edge was split or
    folded; one that was let go because nobody waits for it counts as dropped."""
    tree = TraceTree()
    tokens = array(range(100))
    told = [KeptSnapshot(bytes([position]), position, 10 * position, True) for position in (16, 32, 48)]
    tree.kept(tokens[:48], told, 1.0)
    tree.answered(tokens, 0, "none")
    tree.answered(array([*range(40), 7, 7]), 32, "memory")
    tree.removed(bytes([32]), True, 2.5)
    tree.removed(bytes([48]), False, 3.0)
    tree.removed(b"unknown", True, 3.0)
    tree.kept(array([*range(40), 7, 7, 7]), [KeptSnapshot(b"x", 43, 5, False)], 4.0)
    edges = edge_columns(tree.root, shown)
    columns = (edges.begin, edges.end, edges.snapshots, edges.snapshot_bytes, edges.dropped, edges.dropped_s)
    assert sorted(zip(*columns, strict=True)) == [
        (0, 0, 0, 0, 0, None),
        (0, 40, 2, 480, 1, 2.5),
        (40, 42, 1, 5, 1, 4.0),
        (40, 100, 1, 480, 0, None),
    ]
    small = TraceTree(max_edges=1)
    small.kept(tokens[:48], told, 1.0)
    small.answered(tokens, 0, "none")
    small.answered(array([*range(40), 7, 7]), 32, "memory")
    small.removed(bytes([16]), True, 5.0)
    edges = edge_columns(small.root, shown)
    assert (sum(edges.snapshots), sum(edges.snapshot_bytes), sum(edges.dropped)) == (3, 960, 1)
    assert max(at_s for at_s in edges.dropped_s if at_s is not None) == 5.0


def test_an_eviction_is_counted_however_often_its_edge_was_folded():
    """Fault: a snapshot that is evicted after its branch went into a branch that went too counts nowhere, or twice."""
    tree = TraceTree(max_edges=3)
    tree.kept(array([1, 2, 3, 4]), [KeptSnapshot(b"k", 4, 7, True)], 0.0)
    for end in (2, 3):
        tree.answered(array([1, 2, 3, 4][:end]), 0, "none")
    for number in range(20, 30):
        tree.answered(array([number]), 0, "none")
    assert [len(edge.snapshots) for edge in edges_below(tree.root)][0] == 1, "all of it was folded into the root"
    tree.removed(b"k", True, 3.5)
    tree.removed(b"k", True, 4.5)
    [counts] = tree.root.snapshots.values()
    assert (counts.count, counts.size_bytes, counts.dropped, counts.dropped_s) == (1, 7, 1, 3.5)


def test_what_goes_first_has_saved_the_fewest_tokens():
    """Fault: a branch that saved much goes before one that saved nothing, or one that is in use before an old one."""
    for edge, key in [
        (Edge(bytes(12), None, 3, memory=2, disk=3, last_use=7), (False, 15, 7)),
        (Edge(bytes(12), None, 3, last_use=8, folded=TokenCounts(9, 4, 5, 6)), (True, 9, 8)),
    ]:
        assert _fold_order(edge, 7) == key


def test_snapshots_of_two_places_add_up():
    """Fault: the places of a folded branch are lost, or the last eviction is another one."""
    for one, other, dropped_s in [
        (None, None, None),
        (2.5, None, 2.5),
        (None, 2.5, 2.5),
        (1.5, 2.5, 2.5),
        (2.5, 1.5, 2.5),
        (None, 0.0, 0.0),
    ]:
        counts = SnapshotCounts(2, 30, 1, one)
        counts.add(SnapshotCounts(5, 7, 3, other))
        assert (counts.count, counts.size_bytes, counts.dropped, counts.dropped_s) == (7, 37, 4, dropped_s)


def test_a_place_is_shared_once_there_are_as_many_as_may_be():
    """Fault: the bound on places is off by one, or places that were folded away still count."""
    tree = TraceTree(max_positions=3, max_edges=2)

    def keep(prompt, *positions):
        told = [KeptSnapshot(f"{prompt}{position}".encode(), position, 1, True) for position in positions]
        tree.kept(array(prompt), told, 0.0)
        return [sorted((at, counts.count) for at, counts in edge.snapshots.items()) for edge in edges_below(tree.root)]

    assert keep([1, 1, 1, 1], 2) == [[], [(2, 1)]]
    assert keep([1, 1, 1, 1], 1, 4) == [[], [(1, 1), (2, 1), (4, 1)]]
    assert keep([1, 1, 1, 1], 2) == [[], [(1, 1), (2, 2), (4, 1)]]
    assert [len(places) for places in keep([1, 1, 1, 1], 3)] == [0, 3]
    assert keep([2, 2], 2)[2] == [(2, 1)], "an edge has one place at least"
    assert keep([3, 3]) == [[(0, 6)], []], "the others were folded into the root"
    assert keep([3, 3], 1) == [[(0, 6)], [(1, 1)]]
    assert keep([3, 3], 2) == [[(0, 6)], [(1, 1), (2, 1)]]


def test_the_places_of_snapshots_are_bounded():
    """Fault: --policy all with a small block keeps one object for every token of the run."""
    tree = TraceTree(max_positions=10)
    for number in range(20):
        positions = range(1, 101)
        told = [KeptSnapshot(f"{number}/{position}".encode(), position, 1, True) for position in positions]
        tree.kept(array([number] * 100), told, 0.0)
        tree.answered(array([number] * 100), 0, "none")
    edges = edge_columns(tree.root, shown)
    assert sum(edges.snapshots) == 2000
    assert sum(len(edge.snapshots) for edge in tree.root.children.values()) <= 10 + 20


def test_a_text_is_asked_for_once_and_follows_its_stem():
    """Fault: each write decodes every edge again, or an edge that was split or grew goes on with its old text."""
    asked = []

    def decode(token_ids):
        asked.append(tuple(token_ids))
        return "\ufffd" + shown(token_ids)

    tree = TraceTree()
    tree.answered(array([1, 2, 3, 4]), 0, "none")
    assert edge_columns(tree.root, decode).text == ["", "1 2 3 4"]
    tree.answered(array([1, 2, 9]), 1, "memory")
    rows = edge_columns(tree.root, decode)
    assert sorted(rows.text) == ["", "1 2", "3 4", "9"]
    edge_columns(tree.root, decode)
    assert len(asked) == 4 == len(set(asked))
    tree.answered(array([555] * 500), 0, "none")
    assert max(map(len, edge_columns(tree.root, decode).text)) == 80 and len(asked[-1]) == 32


def test_a_trace_waits_for_one_failed_text_at_most():
    """Fault: a tokenizer that takes seconds to fail does so for each row, or for the same row in each trace."""
    asked = []

    def decode(token_ids):
        asked.append(token_ids)
        if len(asked) < 3:
            raise RequestError("out_of_memory", "it needs too much memory")
        return shown(token_ids)

    tree = TraceTree()
    for first in range(1, 5):
        tree.answered(array([first, 9]), 0, "none")
    expected = (["", "", "", "", ""], ["", "", "", "", ""], ["", "", "", "3 9", "4 9"])
    for texts, calls in zip(expected, (1, 2, 4), strict=True):
        assert edge_columns(tree.root, decode).text == texts
        assert len(asked) == calls


def test_rows_are_whole_columns():
    """Fault: a column is shorter than the others, or a child comes before its parent."""
    tree = TraceTree()
    for prompt, cached, source in requests_of(random.randrange(10**6)):
        tree.answered(array(prompt), cached, source)
    edges = edge_columns(tree.root, shown)
    assert len({len(getattr(edges, field.name)) for field in fields(EdgeColumns)}) == 1
    assert edges.parent[0] == -1 and all(0 <= parent < row for row, parent in enumerate(edges.parent) if row)
