"""Track the prefixes that this run has computed, at token granularity, in a bounded radix tree over token ids.

The tree gives the ideal of a prompt: its longest prefix that an earlier prefill has covered, and whether another
history forks off where that prefix ends.

Invariant: a match is exact, or says that it is not. Branches are dropped to stay within bounds. A match that ends where
a branch was dropped, or on an edge added there later, is inexact if the dropped branch might have matched further.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from apcbatch.prefix import TokenArray, common_length, last_boundary
from apcbatch.types import CachedFrom, MissReason

MAX_TOKENS = 8_000_000
MAX_NODES = 1 << 18  # of about 250 bytes besides their tokens


@dataclass(frozen=True)
class Match:
    """Longest covered prefix of a prompt. length: its tokens. forked: another history continues from there with other
    tokens. exact: no branch was dropped that might have matched further."""

    length: int
    forked: bool
    exact: bool


@dataclass(slots=True, eq=False)
class Node:
    """Node with the edge from its parent. marks: what a forecast notes of the edge (tuning/forecast.py)."""

    # Bytes, not an array: Python allocates small objects apart. An array's buffer would lie between the large buffers
    # of the passes and fragment their memory.
    edge_bytes: bytes
    parent: Node | None
    children: dict[int, Node] = field(default_factory=lambda: NO_CHILDREN)
    last_use: int = 0
    counted: int = 0  # leading tokens of the edge that are counted as unique
    dropped: set[int] | range | None = None  # first tokens of dropped branches below this node
    regrown: bool = False  # begins like a dropped branch, which may have matched further
    marks: array[int] | None = None

    @property
    def edge(self) -> TokenArray:
        """Return the tokens from the parent to this node, as a read-only view."""
        return np.frombuffer(self.edge_bytes, np.int32)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens on the edge."""
        return len(self.edge_bytes) // 4


ANY_TOKEN = range(1 << 31)  # `dropped` of a node whose dropped branches are not counted any more
NO_CHILDREN: dict[int, Node] = {}  # those of every leaf; a node that gets children gets a dict of its own


class CoverageTree:
    """Radix tree of covered prefixes, which drops the least recently extended branches first. num_tokens, num_nodes:
    below the root. has_forgotten: a branch was dropped, so that matches and unique_tokens may be bounds."""

    def __init__(self, max_tokens: int = MAX_TOKENS, max_nodes: int = MAX_NODES) -> None:
        self.root = Node(b"", None)
        self._max_tokens, self._max_nodes = max_tokens, max_nodes
        self.num_tokens = 0
        self.num_nodes = 0
        self._num_dropped = 0  # first tokens in all `dropped`
        self.has_forgotten = False
        self._clock = 0
        self.unique_tokens = 0  # unique tokens of the counted prompts and answers

    def match(self, tokens: TokenArray) -> Match:
        """Return the longest covered prefix of `tokens`."""
        node, length, on_edge = self._walk(tokens)
        if length == len(tokens):
            return Match(length, False, True)
        if on_edge < node.num_tokens:
            return Match(length, True, not node.regrown)
        forked = bool(node.children or node.dropped)
        return Match(length, forked, not node.regrown and int(tokens[length]) not in (node.dropped or ()))

    def insert(self, tokens: TokenArray, counts: bool = False) -> None:
        """Mark `tokens` as covered, from the first one on. counts: count them as well, as `count` does."""
        self._clock += 1
        node, length, on_edge = self._walk(tokens, touch=True)
        if length < len(tokens):
            if on_edge < node.num_tokens:
                node = self._split(node, on_edge)
            node = self._add(node, tokens[length:])
            on_edge = node.num_tokens
        if counts:
            self._count(node, on_edge)
        if self.num_tokens > self._max_tokens or self.num_nodes > self._max_nodes:
            self._prune()

    def count(self, tokens: TokenArray) -> None:
        """Count an answered request's tokens as unique, except those of prefixes that were counted before."""
        node, _, on_edge = self._walk(tokens)
        self._count(node, on_edge)

    def _count(self, node: Node, on_edge: int) -> None:
        while node.parent is not None and node.counted < on_edge:  # all tokens above a counted token are counted
            self.unique_tokens += on_edge - node.counted
            node.counted = on_edge
            node = node.parent
            on_edge = node.num_tokens

    def _walk(self, tokens: TokenArray, touch: bool = False) -> tuple[Node, int, int]:
        """Return the deepest node reached, the tokens matched, and how many of them lie on that node's edge."""
        node, length, on_edge = self.root, 0, 0
        whole = tokens.tobytes()
        while length < len(tokens) and on_edge == node.num_tokens:
            child = node.children.get(int(tokens[length]))
            if child is None:
                break
            node = child
            if touch:
                node.last_use = self._clock
            if whole.startswith(node.edge_bytes, 4 * length):  # the most common case, as one comparison of memory
                on_edge = node.num_tokens
            else:
                on_edge = common_length(node.edge, tokens[length:])
            length += on_edge
        return node, length, on_edge

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node's edge in two and return the upper half."""
        parent = node.parent
        assert parent is not None, "the root has an empty edge and is never split"
        counted = min(node.counted, at)
        below = {int(node.edge[at]): node}
        upper = Node(node.edge[:at].tobytes(), parent, below, node.last_use, counted, regrown=node.regrown)
        node.edge_bytes, node.counted = node.edge[at:].tobytes(), node.counted - counted
        parent.children[int(upper.edge[0])] = upper
        node.parent = upper
        self.num_nodes += 1
        return upper

    def _add(self, parent: Node, edge: TokenArray) -> Node:
        """Add tokens below a node, and return the node on whose edge they are."""
        self.num_tokens += len(edge)
        if parent is not self.root and not parent.children and not parent.dropped:
            parent.edge_bytes += edge.tobytes()  # extend the leaf: no new node
            return parent
        first = int(edge[0])
        regrown = parent.regrown or first in (parent.dropped or ())
        if not parent.children:
            parent.children = {}
        node = parent.children[first] = Node(edge.tobytes(), parent, last_use=self._clock, regrown=regrown)
        self.num_nodes += 1
        return node

    def _prune(self) -> None:
        """Drop the least recently extended leaves until a tenth of both bounds is free."""
        self.has_forgotten = True
        leaves = [(leaf.last_use, number, leaf) for number, leaf in enumerate(self._find_leaves())]
        heapq.heapify(leaves)
        count = len(leaves)
        while leaves and (self.num_tokens > 0.9 * self._max_tokens or self.num_nodes > 0.9 * self._max_nodes):
            leaf = heapq.heappop(leaves)[2]
            parent, first = leaf.parent, int(leaf.edge[0])
            assert parent is not None, "the root is no leaf"
            del parent.children[first]
            self._num_dropped -= len(leaf.dropped) if isinstance(leaf.dropped, set) else 0
            self._note_dropped(parent, first)
            self.num_tokens -= leaf.num_tokens
            self.num_nodes -= 1
            if not parent.children and parent is not self.root:
                count += 1
                heapq.heappush(leaves, (parent.last_use, count, parent))

    def _note_dropped(self, node: Node, first: int) -> None:
        """Note a dropped branch below a node. first: its first token."""
        dropped = set() if node.dropped is None else node.dropped
        if isinstance(dropped, set):
            self._num_dropped += first not in dropped
            dropped.add(first)
            if self._num_dropped > self._max_nodes:
                self._num_dropped -= len(dropped)
                dropped = ANY_TOKEN
            node.dropped = dropped

    def _find_leaves(self) -> Iterator[Node]:
        stack = [self.root]
        while stack:
            node = stack.pop()
            stack += node.children.values()
            if not node.children and node is not self.root:
                yield node


@dataclass(frozen=True)
class Reuse:
    """What a request resumed from, and why it was less than the ideal: fields of its Result."""

    cached_tokens: int = 0
    cached_from: CachedFrom = "none"
    ideal_cached_tokens: int | None = None
    ideal_is_bound: bool = False
    miss_reason: MissReason | None = None
    miss_detail: str | None = None


def explain_miss(
    cached: int,
    ideal: int,
    match: Match,
    block_size: int,
    *,
    resumable: int,
    disabled: bool,
    stranded: bool,
    evicted: bool,
) -> tuple[MissReason, str] | tuple[None, None]:
    """Return (reason, clause) if fewer tokens are cached than the ideal or nothing was covered, else (None, None).

    resumable: the longest prefix that the request may resume from; tokens after it are scored and must be computed.
    stranded: the store has a longer snapshot, but not all of its KV. evicted: the snapshot at the last boundary up to
    the ideal was kept and has been evicted since.
    """
    if disabled:
        return "disabled", "disabled (the policy keeps nothing)"
    if ideal == 0:
        return "cold", "cold"
    if cached >= ideal:
        return None, None
    if resumable < ideal and cached >= last_boundary(resumable, block_size):
        return "disabled", f"disabled (from token {resumable + 1} on the prompt is scored, and computed for that)"
    target = last_boundary(ideal, block_size)
    fork = f"diverged at token {ideal}"
    if target == 0:
        if match.forked:
            return "diverged", f"{fork} (first boundary {block_size})"
        return "shorter_than_block", f"shorter_than_block (minimum {block_size})"
    if cached >= target:
        return "below_grid", f"below_grid (ideal {ideal}, boundary {target})"
    if stranded:
        return "stranded", f"stranded (the KV up to {target} is incomplete)"
    if evicted:
        return "evicted", f"evicted (the snapshot at {target} was dropped)"
    return "diverged", f"{fork} (no snapshot is kept at {target})"
