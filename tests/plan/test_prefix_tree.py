"""The prefix tree holds every distinct token once, for any requests in any order."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

from apcbatch.plan.prefix_tree import PrefixTree, common_prefixes
from apcbatch.plan.tree_shape import TreeShape
from apcbatch.prefix import prefix_key
from tests.plan.plan_oracle import Dataset, common, dataset, node_at


def distinct_prefixes(data: Dataset) -> set[tuple[int, ...]]:
    return {prompt[:end] for prompt in data.prompts for end in range(1, len(prompt) + 1)}


def test_every_distinct_token_is_held_once(data: Dataset) -> None:
    """Catches tokens counted twice or lost where an edge is split, and a path that leads to another
    prompt."""
    tree = data.tree()
    assert tree.unique_tokens == len(distinct_prefixes(data)), data.where
    for index, prompt in enumerate(data.prompts):
        assert tuple(tree.path_tokens(tree.end_node[index]).tolist()) == prompt, (data.where, index)


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_each_boundary_has_its_key_once(data: Dataset, block_size: int) -> None:
    """Catches a key that is not the one of the same prefix elsewhere, and a boundary named twice or at a
    wrong node."""
    tree, fingerprint = data.tree(), b"model"
    expected = {
        prefix_key(fingerprint, prefix, len(prefix))
        for prefix in distinct_prefixes(data)
        if len(prefix) % block_size == 0
    }
    found = list(tree.keys(fingerprint, block_size))
    assert {key for _, _, key in found} == expected, data.where
    assert len(found) == len(expected), data.where
    for node, position, key in found:
        passed = (i for i in range(tree.num_requests) if position <= tree.end[tree.end_node[i]])
        index = next(i for i in passed if node_at(tree, i, position) == node)
        assert prefix_key(fingerprint, data.prompts[index], position) == key, data.where


def test_arrays_are_released() -> None:
    """Catches memory that grows with the prompts' tokens instead of the distinct ones: views keep whole
    arrays."""
    tree = PrefixTree()
    first = np.arange(1000, dtype=np.int32)
    watch = weakref.ref(first)
    tree.add(first, 0)
    tree.add(np.append(first[:900], np.int32(7)), 1)
    del first
    assert watch() is None
    assert tree.unique_tokens == 1001


def test_views_of_one_array_make_a_chain() -> None:
    """Catches a walk from the root for every turn, or one that recurses: ten thousand turns are one long chain. Catches
    a buffer that is copied for every turn, too."""
    tokens = np.random.default_rng(0).integers(0, 50, 30_000).astype(np.int32)
    tree = PrefixTree()
    sizes = set()
    for turn in range(1, 10_001):
        tree.add(tokens[: 3 * turn], 0)
        sizes.add(len(tree._tokens))
    assert sizes == {4096, 8192, 16_384, 32_768}
    shape = TreeShape(tree)
    assert (tree.unique_tokens, tree.num_nodes) == (30_000, 10_001)
    assert shape.order("short first") == list(range(10_000))
    assert shape.conversations_below[1] == 1


def test_a_request_without_tokens_is_refused() -> None:
    """Catches a request that ends at the root and would be planned with a length of 0."""
    with pytest.raises(ValueError, match="without tokens"):
        PrefixTree().add(np.empty(0, np.int32), 0)


def test_the_shape_counts_what_is_below(data: Dataset) -> None:
    """Catches counts that miss a request or count a conversation twice."""
    tree = data.tree()
    shape = TreeShape(tree)
    for index, prompt in enumerate(data.prompts):
        for end in range(1, len(prompt) + 1):
            node = node_at(tree, index, end)
            below = [i for i, other in enumerate(data.prompts) if other[:end] == prompt[:end]]
            if end == shape.end[node]:
                assert shape.requests_below[node] == len(below), data.where
                assert shape.first_below[node] == below[0], data.where
                assert shape.conversations_below[node] == len({data.conversations[i] for i in below}), data.where
        for other in range(len(data.prompts)):
            above = shape.node_above(shape.end_node[index], shape.length[other])
            assert (above == shape.end_node[other]) == (prompt[: shape.length[other]] == data.prompts[other])
    assert shape.last_prompts == sorted(
        max(i for i, c in enumerate(data.conversations) if c == wanted) for wanted in set(data.conversations)
    )


def test_depth_first_keeps_what_shares_a_prefix_together(data: Dataset) -> None:
    """Catches an order that leaves a subtree and comes back, or that takes a long prompt before its own
    prefix."""
    order = TreeShape(data.tree()).order("short first")
    assert sorted(order) == list(range(len(data.prompts)))
    for prefix in distinct_prefixes(data):
        ranks = [r for r, i in enumerate(order) if data.prompts[i][: len(prefix)] == prefix]
        assert ranks == list(range(ranks[0], ranks[0] + len(ranks))), (data.where, prefix)
        assert all(data.prompts[order[r]] == prefix for r in ranks[: data.prompts.count(prefix)]), data.where


def test_a_long_prompt_goes_first_in_its_part(data: Dataset) -> None:
    """Catches a request that is lost or runs twice, parts of one node that are not the order of short prompts, and a
    prefix whose prompts do not follow one another although it begins a part."""
    shape = TreeShape(data.tree())
    assert shape.order("long first", 1) == shape.order("short first")
    for most in (2, 3, 100):
        order = shape.order("long first", most)
        assert sorted(order) == list(range(len(data.prompts))), data.where
    for prefix in distinct_prefixes(data):
        ranks = [r for r, i in enumerate(order) if data.prompts[i][: len(prefix)] == prefix]
        assert ranks == list(range(ranks[0], ranks[0] + len(ranks))), (data.where, prefix)
    chain = dataset([1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [1, 2, 9])
    assert TreeShape(chain.tree()).order("long first", 100) == [3, 2, 1, 4, 0]
    assert TreeShape(chain.tree()).order("long first", 2) == [0, 2, 1, 4, 3]


def test_heavy_subtrees_come_last_and_ties_keep_the_files_order() -> None:
    """Catches a branch whose snapshot waits for the large subtree, and an order that depends on the tokens'
    values."""
    data = dataset([1, 9], [1, 9, 1], [1, 5], [1, 2], [1, 5])
    assert TreeShape(data.tree()).order("short first") == [3, 0, 1, 2, 4]


def test_each_is_the_first_with_so_many_tokens(data: Dataset) -> None:
    """Fault: a later request is named, a longer prefix is missed, or one that begins otherwise is taken."""
    tree = data.tree()
    for index, prompt in enumerate(data.prompts):
        expected: list[tuple[int, int]] = []
        for other in range(index):
            tokens = common(data.prompts[other], prompt)
            if tokens and all(tokens > before for before, _ in expected):
                expected.append((tokens, other))
        assert common_prefixes(tree, index) == expected, (data.where, index)
