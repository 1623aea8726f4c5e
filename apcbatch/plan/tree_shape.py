"""Shape of a finished prefix tree: children, subtree counts and the order of requests, for all block sizes."""

from __future__ import annotations

from array import array
from functools import cached_property
from typing import Literal

from apcbatch.plan.prefix_tree import ROOT, PrefixTree

Order = Literal["short first", "long first", "file"]
ORDERS: tuple[Order, ...] = ("short first", "long first", "file")


class TreeShape:
    """Finished prefix tree as arrays. parent, begin, end: by node. end_node, length, conversation, resumable: by
    request. upward: all nodes except the root, descendants first. requests_below: number of requests that end at a node
    or below it; first_below: the first of them."""

    def __init__(self, tree: PrefixTree) -> None:
        self.parent, self.end = tree.parent, tree.end
        self.begin = array("i", map(self.end.__getitem__, self.parent))
        self.end_node, self.conversation, self.resumable = tree.end_node, tree.conversation, tree.resumable
        self.length = array("i", map(self.end.__getitem__, self.end_node))
        self.prompt_tokens = sum(self.length)
        self.unique_tokens = tree.unique_tokens
        # A node ends after its parent does.
        self.upward = array("i", sorted(range(1, self.num_nodes), key=self.end.__getitem__, reverse=True))
        self.requests_below, self.first_below = self._count_requests()

    @property
    def num_nodes(self) -> int:
        return len(self.parent)

    @property
    def num_requests(self) -> int:
        return len(self.end_node)

    def order(self, order: Order, most_waiting: int = 1) -> list[int]:
        """Return the request indexes in running order: `file` as they were added, the others depth first.

        `short first`: the requests that end at a node, then its subtrees by ascending number of requests, on ties in
        file order. So a branch's snapshot is released as soon as its largest subtree begins, and at most log2(requests)
        snapshots of a path wait for other subtrees.

        `long first`: the path from a node through its largest subtrees is cut into parts of `most_waiting` nodes. Of a
        part the last node goes first: its request computes the whole part at once, in large passes, and the others find
        their snapshots. At most `most_waiting` snapshots of a path wait for that, besides those of `short first`, which
        is this order with parts of one node.
        """
        if order == "file":
            return list(range(self.num_requests))
        first, following = array("i", [-1]) * self.num_nodes, array("i", [-1]) * self.num_requests
        for index in reversed(range(self.num_requests)):
            node = self.end_node[index]
            first[node], following[index] = index, first[node]
        found: list[int] = []
        # (node, n > 0): visit the path that begins at the node, in parts of n nodes. (node, 0): add its requests.
        stack = [(ROOT, 1 if order == "short first" else most_waiting)]
        while stack:
            node, most = stack.pop()
            if most == 0:
                index = first[node]
                while index >= 0:
                    found.append(index)
                    index = following[index]
                continue
            part = [node]
            while len(part) < most and (below := self.children.get(part[-1])):
                part.append(below[-1])
            if below := self.children.get(part[-1]):
                stack.append((below[-1], most))
            for waiting, node in enumerate(part):
                smaller = self.children.get(node, ())[:-1]
                stack += [(child, max(1, most - waiting)) for child in reversed(smaller)]
                stack.append((node, 0))
        return found

    @cached_property
    def children(self) -> dict[int, list[int]]:
        """Children of each inner node, the largest subtree last."""
        children: dict[int, list[int]] = {}
        for node in range(1, self.num_nodes):
            children.setdefault(self.parent[node], []).append(node)
        for siblings in children.values():
            siblings.sort(key=lambda node: (self.requests_below[node], self.first_below[node]))
        return children

    @cached_property
    def conversations_below(self) -> array[int]:
        """Number of distinct conversations with a prompt that ends at each node or below it."""
        count = array("i", [0]) * self.num_nodes
        seen_by: list[int | None] = [None] * self.num_nodes
        for index in sorted(range(self.num_requests), key=self.conversation.__getitem__):
            node, conversation = self.end_node[index], self.conversation[index]
            while seen_by[node] != conversation:
                seen_by[node] = conversation
                count[node] += 1
                node = self.parent[node]
        return count

    @cached_property
    def last_prompts(self) -> list[int]:
        """Return the last request of each conversation, ascending."""
        return sorted({conversation: index for index, conversation in enumerate(self.conversation)}.values())

    def node_above(self, node: int, position: int) -> int:
        """Return the node on the path to `node` whose edge holds the position; the root for 0."""
        while self.begin[node] >= position and node != ROOT:
            node = self.parent[node]
        return node

    def _count_requests(self) -> tuple[array[int], array[int]]:
        below, first = array("i", [0]) * self.num_nodes, array("i", [self.num_requests]) * self.num_nodes
        for index, node in enumerate(self.end_node):
            below[node] += 1
            first[node] = min(first[node], index)
        for node in self.upward:
            parent = self.parent[node]
            below[parent] += below[node]
            first[parent] = min(first[parent], first[node])
        return below, first
