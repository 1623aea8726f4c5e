"""Which earlier requests share the beginning of a prompt, and how much of it.

Must not know: text, files, what is kept.
"""

from __future__ import annotations

from apcbatch.plan.prefix_tree import ROOT, PrefixTree


def first_sharers(tree: PrefixTree, index: int) -> list[tuple[int, int]]:
    """(tokens, request) for each part of a request's prompt that an earlier one has too, from the shortest to the
    longest: the request is the first one whose prompt begins with these tokens."""
    first: dict[int, int] = {}  # by node
    for other in range(index):
        node = tree.end_node[other]
        while node != ROOT and node not in first:
            first[node] = other
            node = tree.parent[node]
    tokens: dict[int, int] = {}  # by request, the most
    node = tree.end_node[index]
    while node != ROOT:
        if node in first:
            tokens.setdefault(first[node], tree.end[node])
        node = tree.parent[node]
    return sorted((count, request) for request, count in tokens.items())
