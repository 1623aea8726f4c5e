"""Which prefixes this run has already computed, at token granularity: a bounded radix tree over token ids.

It answers one question: what is the longest prefix of this prompt that an earlier prefill has covered (the ideal), and
did it end because the histories fork there?

Must not know: snapshots, states. Invariant: an answer is exact or says that it is not. A branch may be dropped to stay
within bounds. A match that ends at such a cut, or on what has grown there since, is inexact if the dropped branch might
have matched further.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from apcbatch.prefix import TokenArray, common_length

MAX_TOKENS = 8_000_000
MAX_NODES = 16_384


@dataclass(frozen=True)
class Match:
    """How much of a prompt is covered. length: in tokens. forked: another history goes on from there with other tokens.
    exact: nothing that might have matched further was dropped."""

    length: int
    forked: bool
    exact: bool


@dataclass(slots=True, eq=False)
class _Node:
    # Bytes, not an array: the interpreter keeps small objects apart. An array's buffer would lie between the large
    # ones of the passes and keep their memory from being used again.
    edge_bytes: bytes
    parent: _Node | None
    children: dict[int, _Node] = field(default_factory=dict)
    last_use: int = 0
    dropped: set[int] = field(default_factory=set)  # the first tokens of branches that were below and are gone
    regrown: bool = False  # begins as a dropped branch did, which may have gone along with it, and on from there

    @property
    def edge(self) -> TokenArray:
        """The tokens from the parent to here, a read-only view."""
        return np.frombuffer(self.edge_bytes, np.int32)


class CoverageTree:
    """Covered prefixes. The least recently extended branches are dropped first."""

    def __init__(self, max_tokens: int = MAX_TOKENS, max_nodes: int = MAX_NODES) -> None:
        self._root = _Node(b"", None)
        self._max_tokens, self._max_nodes = max_tokens, max_nodes
        self.num_tokens = 0
        self._num_nodes = 0
        self._clock = 0
        self.unique_tokens = 0

    def match(self, tokens: TokenArray) -> Match:
        """The longest covered prefix of `tokens`."""
        node, length, on_edge = self._walk(tokens)
        if length == len(tokens):
            return Match(length, False, True)
        if on_edge < len(node.edge):
            return Match(length, True, not node.regrown)
        forked = bool(node.children or node.dropped)
        return Match(length, forked, not node.regrown and int(tokens[length]) not in node.dropped)

    def insert(self, tokens: TokenArray) -> None:
        """Mark `tokens` as covered, from the first one on."""
        self._clock += 1
        node, length, on_edge = self._walk(tokens, touch=True)
        rest = tokens[length:]
        if not len(rest):
            return
        if on_edge < len(node.edge):
            node = self._split(node, on_edge)
        self._add(node, rest)
        self.unique_tokens += len(rest)
        if self.num_tokens > self._max_tokens or self._num_nodes > self._max_nodes:
            self._prune()

    def _walk(self, tokens: TokenArray, touch: bool = False) -> tuple[_Node, int, int]:
        """The deepest node reached, the tokens matched, and how many of them lie on that node's edge."""
        node, length, on_edge = self._root, 0, 0
        whole = tokens.tobytes()
        while length < len(tokens) and 4 * on_edge == len(node.edge_bytes):
            child = node.children.get(int(tokens[length]))
            if child is None:
                break
            node = child
            if touch:
                node.last_use = self._clock
            if whole.startswith(node.edge_bytes, 4 * length):  # the most common case, at the speed of memory
                on_edge = len(node.edge_bytes) // 4
            else:
                on_edge = common_length(node.edge, tokens[length:])
            length += on_edge
        return node, length, on_edge

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut a node's edge in two and return the upper half."""
        parent = node.parent
        assert parent is not None, "the root has an empty edge and is never split"
        upper = _Node(node.edge[:at].tobytes(), parent, last_use=node.last_use, regrown=node.regrown)
        node.edge_bytes = node.edge[at:].tobytes()
        parent.children[int(upper.edge[0])] = upper
        upper.children[int(node.edge[0])] = node
        node.parent = upper
        self._num_nodes += 1
        return upper

    def _add(self, parent: _Node, edge: TokenArray) -> None:
        if parent is not self._root and not parent.children and not parent.dropped:
            parent.edge_bytes += edge.tobytes()  # a leaf that goes on: no new node
        else:
            first = int(edge[0])
            regrown = parent.regrown or first in parent.dropped
            parent.children[first] = _Node(edge.tobytes(), parent, last_use=self._clock, regrown=regrown)
            self._num_nodes += 1
        self.num_tokens += len(edge)

    def _prune(self) -> None:
        """Drop the least recently extended leaves until a tenth of both bounds is free."""
        leaves = [node for node in self._nodes() if not node.children]
        leaves.sort(key=lambda node: node.last_use)
        for leaf in leaves:
            if self.num_tokens <= 0.9 * self._max_tokens and self._num_nodes <= 0.9 * self._max_nodes:
                break
            assert leaf.parent is not None, "the root is not among the nodes that may be dropped"
            first = int(leaf.edge[0])
            del leaf.parent.children[first]
            leaf.parent.dropped.add(first)
            self.num_tokens -= len(leaf.edge)
            self._num_nodes -= 1

    def _nodes(self) -> list[_Node]:
        found, stack = [], list(self._root.children.values())
        while stack:
            node = stack.pop()
            found.append(node)
            stack.extend(node.children.values())
        return found
