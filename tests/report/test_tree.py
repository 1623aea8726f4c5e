"""The prefix tree of a run's prompts: its sums are those of the requests, folded or not."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np

from apcbatch.errors import RequestError
from apcbatch.report.tree import RunTree
from tests.effort import tries

SUMS = ("restored", "computed", "memory", "disk")
Drawn = list[tuple[list[int], int, str]]


def drawn(draw: random.Random) -> Drawn:
    """(prompt, cached tokens, source) of requests that share beginnings; equal prompts and parts of others too."""
    prompts: list[list[int]] = [[]]
    requests = []
    for _ in range(draw.randint(1, 40)):
        prefix = draw.choice(prompts)
        prompt = prefix[: draw.randint(0, len(prefix))] + [draw.randrange(3) for _ in range(draw.randint(0, 9))] or [1]
        prompts.append(prompt)
        cached = draw.randint(0, len(prompt) - 1)
        requests.append((prompt, cached, draw.choice(["memory", "disk"]) if cached else "none"))
    return requests


def columns_of(requests: Drawn, **options: Any) -> dict[str, Any]:
    tree = RunTree()
    for prompt, cached, source in requests:
        tree.add(np.array(prompt, np.int32), cached, source)
    return tree.columns(lambda tokens: "".join(map(str, tokens)), **options)


def by_brute_force(requests: Drawn) -> dict[tuple[int, ...], list[int]]:
    """Edge, as all tokens up to its end, -> [begin, requests, restored, computed, memory, disk], by each token."""
    prompts = {tuple(prompt) for prompt, _, _ in requests}
    paths = {prompt[:end] for prompt in prompts for end in range(1, len(prompt) + 1)}
    forks = Counter(path[:-1] for path in paths)
    ends = {path for path in paths if path in prompts or forks[path] > 1}
    edges = {}
    for end in ends:
        begin = max(n for n in range(len(end)) if n == 0 or end[:n] in ends)
        row = edges[end] = [begin, 0, 0, 0, 0, 0]
        for prompt, cached, source in requests:
            if tuple(prompt[: len(end)]) == end:
                restored = max(0, min(cached, len(end)) - begin)
                row[1] += 1
                row[2] += restored
                row[3] += len(end) - begin - restored
                row[4] += restored * (source == "memory")
                row[5] += restored * (source == "disk")
    return edges


def test_each_edge_is_as_counted_token_by_token() -> None:
    """Fault: an edge that is another, or has another's tokens; a part of an edge that is restored as a whole."""
    for _ in range(tries(300)):
        requests = drawn(random.Random(random.randrange(1 << 40)))
        found, expected = columns_of(requests), by_brute_force(requests)
        assert found["note"] is None and found["hidden"] == [0] * len(found["parent"])
        assert (found["parent"][0], found["end"][0], found["requests"][0]) == (-1, 0, len(requests))
        paths: list[tuple[int, ...]] = [()]
        for row in range(1, len(found["parent"])):
            parent = found["parent"][row]
            assert parent < row and found["begin"][row] == found["end"][parent] == len(paths[parent])
            edge = tuple(map(int, found["text"][row]))
            paths.append(paths[parent] + edge)
            counts = [found[name][row] for name in ("begin", "requests", *SUMS)]
            assert counts == expected[paths[-1]], requests
        assert set(paths[1:]) == expected.keys() and len(paths) == len(expected) + 1


def test_sums_stay_whatever_is_folded() -> None:
    """Fault: what a folded edge restored is lost or counted twice; more rows than a page shows; an edge that saves much
    is folded before one that saves little."""
    for _ in range(tries(100)):
        requests = drawn(random.Random(random.randrange(1 << 40)))
        whole = columns_of(requests)
        most = random.randint(1, len(whole["parent"]))
        found = columns_of(requests, max_rows=most)
        num_folded = len(whole["parent"]) - most
        assert len(found["parent"]) == most and found["requests"][0] == len(requests)
        assert {name: sum(found[name]) for name in SUMS} == {name: sum(whole[name]) for name in SUMS}
        assert all(parent < row for row, parent in enumerate(found["parent"]))
        said = f"{num_folded} edges that save least are counted in the edges above them"
        assert found["note"] == (said if num_folded else None)
        assert bool(sum(found["hidden"])) == bool(num_folded)
    prompts: Drawn = [([1, 1, number], cached, "memory") for number, cached in ((2, 0), (3, 2), (4, 2))]
    prompts += [([2, number, 5], cached, "disk") for number, cached in ((6, 2), (7, 1))]
    folded = columns_of(prompts, max_rows=4)
    assert folded["text"] == ["", "2", "11", "65"] and folded["hidden"] == [0, 1, 3, 0]


def test_a_full_tree_says_what_it_left_out() -> None:
    """Fault: a tree of any size, or one that lacks prompts without a word."""
    tree = RunTree(max_tokens=5)
    for first in range(4):
        tree.add(np.array([first, 1, 1], np.int32), 0, "none")
    found = tree.columns(str)
    assert found["requests"][0] == 2 and sum(found["computed"]) == 6
    assert found["note"] == "the prompts of the last 2 requests are not in the tree, which is full"


def test_words_begin_with_a_whole_character_and_are_not_asked_for_again() -> None:
    """Fault: a row begins with half a character or has a page of text, or a tokenizer that fails takes seconds a
    row."""
    tree, asked = RunTree(), []
    for prompt in ([1, *range(2, 50)], [1, 9], [1, 8], [1, 7]):
        tree.add(np.array(prompt, np.int32), 0, "none")

    def decode(tokens: Any) -> str:
        asked.append(list(tokens))
        if len(asked) == 3:
            raise RequestError("internal", "no text")
        return "\ufffd\ufffd" + "x" * 100

    assert tree.columns(decode)["text"] == ["", "x" * 80, "x" * 80, "", "", ""]
    assert len(asked) == 3 and asked[0] == [1]
    whole = tree.columns(lambda tokens: str(list(tokens)))
    assert whole["text"][-1] == str(list(range(2, 34)))[:80]
