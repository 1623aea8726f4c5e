"""The tree of covered prefixes against plain Python over lists of tokens, and why a request got less than the ideal."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from apcbatch.engine.coverage import CoverageTree, Match, explain_miss
from tests.effort import table, tries
from tests.plan.plan_oracle import Prompt, common

# Few tokens and short prompts, so that most of them share something, end inside one another or repeat.
PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=9).map(tuple), max_size=14)
ANY_BOUNDS = st.tuples(st.integers(1, 40), st.integers(1, 12))


def array(prompt: Prompt) -> np.ndarray:
    return np.array(prompt, np.int32)


def expected(prompt: Prompt, covered: list[Prompt]) -> Match:
    """What the tree should answer, by definition."""
    length = max((common(prompt, other) for other in covered), default=0)
    goes_on = any(len(other) > length for other in covered if common(prompt, other) == length)
    return Match(length, length < len(prompt) and goes_on, True)


def check_counts(tree: CoverageTree) -> None:
    """The tree's counters against its nodes, and that each node hangs where its first token says."""
    nodes, stack = [], list(tree.root.children.values())
    while stack:
        nodes.append(stack.pop())
        stack += nodes[-1].children.values()
    assert tree.num_tokens == sum(len(node.edge) for node in nodes)
    assert tree.num_nodes == len(nodes)
    for node in nodes:
        assert len(node.edge) and node.parent.children[int(node.edge[0])] is node


@given(PROMPTS, PROMPTS)
@example([(0, 1, 2, 0), (0, 1), (0, 1, 2), (0, 1, 0)], [(0, 1), (0, 1, 2, 0, 0), (0, 1, 1), (1,)])
def test_matches_are_those_of_a_plain_search(covered: list[Prompt], asked: list[Prompt]) -> None:
    """Catches a tree that is put together wrong where an edge is cut in two: an ideal, a fork or the count of unique
    tokens that is not what was computed."""
    tree, at_once = CoverageTree(), CoverageTree()
    for number, prompt in enumerate(covered):
        tree.insert(array(prompt))
        at_once.insert(array(prompt), counts=number % 2 == 1)
        check_counts(tree)
        for other in covered[: number + 1]:
            assert tree.match(array(other)) == Match(len(other), False, True)
        if number % 2:  # the others are of requests that failed
            tree.count(array(prompt))
    counted = covered[1::2]
    assert at_once.unique_tokens == tree.unique_tokens == len({p[:n] for p in counted for n in range(1, len(p) + 1)})
    for prompt in covered:
        tree.count(array(prompt))
    for prompt in asked:
        assert tree.match(array(prompt)) == expected(prompt, covered), (covered, prompt)
    assert tree.unique_tokens == tree.num_tokens == len({p[:n] for p in covered for n in range(1, len(p) + 1)})


@given(PROMPTS, PROMPTS, ANY_BOUNDS)
def test_what_was_dropped_is_never_taken_for_new(
    covered: list[Prompt], asked: list[Prompt], bounds: tuple[int, int]
) -> None:
    """Fault: where a branch had been dropped and another history came along its beginning, the answer was called
    exact although the dropped one had gone further. Catches counters that drift from the nodes, too."""
    tree = CoverageTree(*bounds)
    for prompt in covered:
        tree.insert(array(prompt))
        check_counts(tree)
    for prompt in asked:
        found, right = tree.match(array(prompt)), expected(prompt, covered)
        assert found.length <= right.length
        assert found == right or not found.exact, (covered, prompt, bounds)


def lengths(tree: CoverageTree, prompts: list[Prompt]) -> list[int]:
    return [tree.match(array(prompt)).length for prompt in prompts]


def test_the_least_recently_extended_go_first_and_no_more_than_needed() -> None:
    """Catches the wrong branches being dropped, too many or too few: at the bound nothing goes, above it a tenth of it
    is made free, of tokens and of nodes."""
    eleven = [tuple(range(100 * number, 100 * number + 10)) for number in range(1, 12)]  # which share nothing
    for tree in (CoverageTree(max_tokens=100), CoverageTree(max_nodes=10)):
        for prompt in eleven[:10]:
            tree.insert(array(prompt))
        assert lengths(tree, eleven) == [10] * 10 + [0]
        tree.insert(array(eleven[0]))  # covered already: now the last one that was asked for
        tree.insert(array(eleven[10]))
        assert lengths(tree, eleven) == [10, 0, 0] + [10] * 8
        assert not tree.match(array(eleven[1])).exact
        assert tree.match(array((99,))) == Match(0, True, True)  # nothing that began so was dropped
        check_counts(tree)


def test_what_grows_again_is_inexact_down_to_its_leaves() -> None:
    """Catches an ideal called exact on a branch, or on a fork of it, that begins like one that was dropped."""
    tree = CoverageTree()
    tree.root.dropped = {5}
    for prompt in ((5, 1), (6, 1), (5, 2, 3), (6, 2)):
        tree.insert(array(prompt))
    asked = [(5, 1, 9), (5, 2, 9), (5, 9), (5, 2, 3, 9), (6, 1, 9), (6, 9), (7,)]
    assert [tree.match(array(prompt)).exact for prompt in asked] == [False, False, False, False, True, True, True]
    assert tree.num_nodes == 6
    check_counts(tree)


def test_a_branch_that_grew_again_does_not_stop_the_dropping() -> None:
    """Catches a bound on nodes that is not kept once the oldest candidate is no leaf any more."""
    tree = CoverageTree(max_nodes=10)
    others = [(number,) for number in range(50, 59)]
    for prompt in [(1, 1), (1, 2), *others[:8]]:
        tree.insert(array(prompt))
    assert lengths(tree, [(1, 1), (1, 2), *others]) == [1, 1] + [1] * 8 + [0]
    for prompt in [(1, 3), others[8]]:
        tree.insert(array(prompt))
    assert lengths(tree, [(1, 3), *others]) == [2, 0, 0] + [1] * 7
    check_counts(tree)


def test_what_goes_on_is_one_node() -> None:
    """Catches a growing conversation that takes a node for each turn, so that the bound on nodes comes too soon, and
    one whose growth does not keep it alive."""
    tree = CoverageTree(max_nodes=3)
    for end in (3, 6, 9):
        tree.insert(array(tuple(range(end))))
    assert tree.num_nodes == 1
    for prompt in [(50,), (51,), tuple(range(10)), (52,)]:
        tree.insert(array(prompt))
    assert lengths(tree, [tuple(range(10)), (50,), (51,), (52,)]) == [10, 0, 0, 1]


def test_the_least_recently_extended_branches_go_first() -> None:
    """Catches a bound that is not kept, counters that drift, and an old branch that outlives a younger one."""
    tree = CoverageTree(max_tokens=400, max_nodes=40)
    used: dict[int, int] = {}
    for turn in range(tries(3000)):
        conversation = min(random.randrange(60), random.randrange(60))
        used[conversation] = turn
        tree.insert(array((conversation, *(random.randrange(3) for _ in range(random.randrange(1, 20))))))
        assert tree.num_tokens <= 400 and tree.num_nodes <= 40
        check_counts(tree)
        there = {first for first in used if lengths(tree, [(first,)]) == [1]}
        gone = used.keys() - there
        assert conversation in there
        assert not gone or max(used[one] for one in gone) < min(used[one] for one in there)


FORK, END = Match(0, True, True), Match(0, False, True)
SCORED = "disabled (from token {} on the prompt is scored, and computed for that)"


@table("cached, ideal, match, facts, reason, clause", [
    (0, 0, FORK, {}, "cold", "cold"),
    (16, 16, FORK, {}, None, None),
    (32, 20, FORK, {}, None, None),
    (0, 15, FORK, {}, "diverged", "diverged at token 15 (first boundary 16)"),
    (0, 15, END, {}, "shorter_than_block", "shorter_than_block (minimum 16)"),
    (0, 15, END, {"stranded": True, "evicted": True}, "shorter_than_block", "shorter_than_block (minimum 16)"),
    (16, 17, FORK, {}, "below_grid", "below_grid (ideal 17, boundary 16)"),
    (16, 17, FORK, {"resumable": 17}, "below_grid", "below_grid (ideal 17, boundary 16)"),
    (16, 17, FORK, {"resumable": 20}, "below_grid", "below_grid (ideal 17, boundary 16)"),
    (40, 47, FORK, {"stranded": True}, "below_grid", "below_grid (ideal 47, boundary 32)"),
    (15, 17, FORK, {}, "diverged", "diverged at token 17 (no snapshot is kept at 16)"),
    (0, 16, FORK, {"evicted": True}, "evicted", "evicted (the snapshot at 16 was dropped)"),
    (16, 33, END, {"stranded": True, "evicted": True}, "stranded", "stranded (the KV up to 32 is incomplete)"),
    (0, 40, FORK, {"resumable": 0}, "disabled", SCORED.format(1)),
    (16, 40, END, {"resumable": 20, "evicted": True}, "disabled", SCORED.format(21)),
    (0, 40, END, {"resumable": 20, "evicted": True}, "evicted", "evicted (the snapshot at 32 was dropped)"),
    (0, 0, FORK, {"disabled": True}, "disabled", "disabled (the policy keeps nothing)"),
    (16, 16, FORK, {"disabled": True}, "disabled", "disabled (the policy keeps nothing)"),
])  # fmt: skip
def test_each_miss_has_its_reason(
    cached: int, ideal: int, match: Match, facts: dict[str, bool], reason: str | None, clause: str | None
) -> None:
    """Catches a reason that is given for another's facts, and a clause with another's number."""
    told = {"resumable": 1000, "disabled": False, "stranded": False, "evicted": False, **facts}
    assert explain_miss(cached, ideal, match, 16, **told) == (reason, clause)
