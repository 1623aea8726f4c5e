"""Which prefixes this run has already computed, at token granularity: a bounded radix tree over token ids.

It answers one question: what is the longest prefix of this prompt that an earlier prefill has covered (the ideal), and
did it end because the histories fork there?

Invariant: an answer is exact or says that it is not. A branch may be dropped to stay
within bounds. A match that ends at such a cut, or on what has grown there since, is inexact if the dropped branch might
have matched further.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from apcbatch.prefix import TokenArray, common_length, last_boundary
from apcbatch.types import MissReason

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
    counted: int = 0  # the tokens of the edge, from its beginning, that are counted as unique
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
        self._leaves: list[tuple[int, int, _Node]] = []  # those used longest ago first, as of when they were entered
        self._num_entered = 0
        self._clock = 0
        self.unique_tokens = 0  # of those prompts and answers that were counted

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
        if self.num_tokens > self._max_tokens or self._num_nodes > self._max_nodes:
            self._prune()

    def count(self, tokens: TokenArray) -> None:
        """Count those of covered tokens that no prefix counted before has: those of a request that was answered."""
        node, _, on_edge = self._walk(tokens)
        while node.parent is not None and node.counted < on_edge:  # what is above a counted token is counted
            self.unique_tokens += on_edge - node.counted
            node.counted = on_edge
            node = node.parent
            on_edge = len(node.edge)

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
        counted = min(node.counted, at)
        upper = _Node(node.edge[:at].tobytes(), parent, last_use=node.last_use, counted=counted, regrown=node.regrown)
        node.edge_bytes, node.counted = node.edge[at:].tobytes(), node.counted - counted
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
            leaf = parent.children[first] = _Node(edge.tobytes(), parent, last_use=self._clock, regrown=regrown)
            self._num_nodes += 1
            self._enter(leaf)
        self.num_tokens += len(edge)

    def _prune(self) -> None:
        """Drop the least recently extended leaves until a tenth of both bounds is free."""
        while self._leaves and (self.num_tokens > 0.9 * self._max_tokens or self._num_nodes > 0.9 * self._max_nodes):
            last_use, _, leaf = heapq.heappop(self._leaves)
            parent = leaf.parent
            if leaf.children or parent is None:
                continue  # it is no leaf any more, or was dropped
            if leaf.last_use > last_use:
                self._enter(leaf)
                continue
            first = int(leaf.edge[0])
            del parent.children[first]
            parent.dropped.add(first)
            leaf.parent = None
            self.num_tokens -= len(leaf.edge)
            self._num_nodes -= 1
            if not parent.children and parent is not self._root:
                self._enter(parent)

    def _enter(self, leaf: _Node) -> None:
        """Note a leaf among those that may be dropped."""
        self._num_entered += 1
        heapq.heappush(self._leaves, (leaf.last_use, self._num_entered, leaf))


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
    """(reason, clause) if the cached tokens fall short of the ideal or nothing was there; (None, None) otherwise.

    resumable: the longest prefix that it may resume from: the rest is scored, and computed for that. stranded: the
    store has a longer snapshot, but not all of its KV. evicted: the snapshot at the last boundary up to the ideal was
    kept and has been dropped since.
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
