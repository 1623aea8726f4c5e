"""The prefix tree of a run's prompts as columns, with restored and computed tokens, and a bounded number of rows.

Invariants: parents come before children, and row 0 is the empty prefix; restored and computed tokens, summed over all
rows, equal the sums over the requests that were added, even after folding.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from apcbatch.errors import RequestError
from apcbatch.plan.prefix_tree import ROOT, PrefixTree
from apcbatch.prefix import TokenArray

MOST_TOKENS = 1 << 25  # distinct tokens that the tree holds, 4 bytes each
MOST_ROWS = 4_096
HEAD_TOKENS = 32  # decoded for a row's text
MOST_CHARACTERS = 80
COLUMNS = ("parent", "begin", "end", "requests", "restored", "computed", "memory", "disk", "hidden")

Decode = Callable[[Sequence[int]], str]


class RunTree:
    """Prefix tree of answered prompts. max_tokens: distinct tokens at which it is full."""

    def __init__(self, max_tokens: int = MOST_TOKENS) -> None:
        self._tree, self._max_tokens = PrefixTree(), max_tokens
        self._cached = {"memory": array("i"), "disk": array("i")}  # by request: tokens restored from there
        self._num_left_out = 0

    def add(self, tokens: TokenArray, cached: int, source: str) -> None:
        """Add the prompt of an answered request, unless the tree is full. cached: number of tokens, from the first,
        that were restored from `source`."""
        if self._tree.unique_tokens >= self._max_tokens:
            self._num_left_out += 1
            return
        self._tree.add(tokens, 0)
        for name, column in self._cached.items():
            column.append(min(cached, len(tokens)) if name == source else 0)

    def columns(self, decode: Decode, max_rows: int = MOST_ROWS) -> dict[str, Any]:
        """Return the edges as columns, with a `note` on what was folded or left out. decode: returns the text of token
        ids; not called again after it has raised RequestError."""
        order = sorted(range(self._tree.num_nodes), key=self._tree.end.__getitem__)  # each node after its parent
        rows = self._rows(order)
        kept = _fold(rows, max_rows)
        texts = self._texts([order[row] for row in kept], decode)
        new_of = {-1: -1} | {row: new for new, row in enumerate(kept)}
        columns: dict[str, Any] = {name: [values[row] for row in kept] for name, values in rows.items()}
        columns["parent"] = [new_of[parent] for parent in columns["parent"]]
        notes = [f"{len(order) - len(kept):,} edges that save least are counted in the edges above them"] * (
            len(kept) < len(order)
        ) + [f"the prompts of the last {self._num_left_out:,} requests are not in the tree, which is full"] * (
            self._num_left_out > 0
        )
        return columns | {"text": texts, "note": "; ".join(notes) or None}

    def _rows(self, order: list[int]) -> dict[str, list[int]]:
        """Return the columns of all nodes, in this order.

        A request restores the nodes above the one in which it resumed as a whole, and of that one a part. So counts at
        the end of a prompt and where it resumed are enough; they are then added up from below.
        """
        tree = self._tree
        num_nodes = tree.num_nodes
        passed = [0] * num_nodes
        whole = {name: [0] * num_nodes for name in self._cached}  # requests that restored all of the node
        restored = {name: [0] * num_nodes for name in self._cached}
        for request, end_node in enumerate(tree.end_node):
            passed[end_node] += 1
            for name, cached in self._cached.items():
                if (left := cached[request]) == 0:
                    continue
                node = end_node
                while tree.begin(node) >= left:
                    node = tree.parent[node]
                restored[name][node] += left - tree.begin(node)
                whole[name][tree.parent[node]] += 1
        for node in reversed(order):
            if node != ROOT:
                parent = tree.parent[node]
                passed[parent] += passed[node]
                for name, counts in whole.items():
                    length = tree.end[node] - tree.begin(node)
                    restored[name][node] += counts[node] * length
                    counts[parent] += counts[node]
        row_of = {node: row for row, node in enumerate(order)}
        columns: dict[str, list[int]] = {name: [] for name in COLUMNS}
        for node in order:
            memory, disk = restored["memory"][node], restored["disk"][node]
            begin, end = tree.begin(node), tree.end[node]
            values = {
                "parent": -1 if node == ROOT else row_of[tree.parent[node]],
                "begin": begin,
                "end": end,
                "requests": passed[node],
                "restored": memory + disk,
                "computed": passed[node] * (end - begin) - memory - disk,
                "memory": memory,
                "disk": disk,
                "hidden": 0,
            }
            for name, value in values.items():
                columns[name].append(value)
        return columns

    def _texts(self, nodes: list[int], decode: Decode) -> list[str]:
        """Return the first words of each node, without a partial character at the beginning, since that begins in the
        node above."""
        texts, can_decode = [], True
        for node in nodes:
            head, text = self._tree.edge_tokens(node)[:HEAD_TOKENS], ""
            if can_decode and len(head):
                try:
                    text = decode(head.tolist()).lstrip("\ufffd")[:MOST_CHARACTERS]
                except RequestError:
                    can_decode = False
            texts.append(text)
        return texts


def _fold(rows: dict[str, list[int]], max_rows: int) -> list[int]:
    """Fold leaves into their parents until max_rows are left, first those with the fewest restored tokens, on ties
    those with the fewest computed ones; return the rows that are left, ascending."""
    parents = rows["parent"]
    num_children = [0] * len(parents)
    for parent in parents[1:]:
        num_children[parent] += 1
    is_left = [True] * len(parents)
    restored, computed = rows["restored"], rows["computed"]
    leaves = [(restored[row], computed[row], row) for row, count in enumerate(num_children) if not count]
    heapq.heapify(leaves)
    for _ in range(len(parents) - max_rows):
        row = heapq.heappop(leaves)[-1]
        parent, is_left[row] = parents[row], False
        for name in ("restored", "computed", "memory", "disk"):
            rows[name][parent] += rows[name][row]
        rows["hidden"][parent] += rows["requests"][row]
        num_children[parent] -= 1
        if not num_children[parent]:
            heapq.heappush(leaves, (restored[parent], computed[parent], parent))
    return [row for row, stays in enumerate(is_left) if stays]
