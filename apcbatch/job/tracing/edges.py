"""Radix tree of the answered prompts, with the restored and computed tokens of each edge.

An edge over token ids is split where prompts fork, where a prompt ends and where a request resumed. So each request
restores or computes an edge as a whole, and counts at the edge's end are enough:

    a prompt of 300 tokens, then one of 500 that resumes at 256 and shares all 300:
    0 .. 256    2 requests, restored once, computed once
    256 .. 300  2 requests, computed twice
    300 .. 500  1 request, computed once

The tree is bounded: beyond its bounds, leaves are folded into their parents, which keep their counts. Invariant:
restored and computed tokens, summed over all edges, equal the sums over all counted requests, even after folding.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from apcbatch.engine.observer import KeptSnapshot
from apcbatch.prefix import TokenArray, common_length
from apcbatch.types import CachedFrom

MAX_TOKENS = 2_000_000
MAX_EDGES = 16_384
MAX_POSITIONS = 65_536  # positions that have snapshot counts of their own
_ID_BYTES = 4
_RECENT_DIVISOR = 4  # edges used in the latest MAX_EDGES / 4 operations are folded last


@dataclass(slots=True, eq=False)
class SnapshotCounts:
    """Counts of the snapshots kept at one position. dropped: snapshots evicted for lack of room. dropped_s: time of the
    last eviction, in seconds since the run began. merged_into: counts that replace these after their edge was
    folded."""

    count: int = 0
    size_bytes: int = 0
    dropped: int = 0
    dropped_s: float | None = None
    merged_into: SnapshotCounts | None = None

    def add(self, other: SnapshotCounts) -> None:
        """Add the counts of another position."""
        self.count += other.count
        self.size_bytes += other.size_bytes
        self.dropped += other.dropped
        if other.dropped_s is not None:
            self.dropped_s = max(other.dropped_s, self.dropped_s or 0.0)


@dataclass(slots=True, eq=False)
class TokenCounts:
    """Number of requests, and numbers of their prompt tokens: restored from memory, restored from disk, computed."""

    requests: int = 0
    memory: int = 0
    disk: int = 0
    computed: int = 0

    @property
    def restored(self) -> int:
        return self.memory + self.disk

    def add(self, other: TokenCounts) -> None:
        """Add the counts of another edge."""
        self.requests += other.requests
        self.add_tokens(other.memory, other.disk, other.computed)

    def add_tokens(self, memory: int, disk: int, computed: int) -> None:
        """Add tokens of requests that are counted already."""
        self.memory += memory
        self.disk += disk
        self.computed += computed


@dataclass(slots=True, eq=False)
class Edge:
    """Edge of the tree, and the node at its end.

    tokens: tokens on the edge, as bytes of int32. end: number of tokens from the root to its end. ends: requests whose
    prompts end there. memory, disk: requests that resumed there or in a folded branch, by the snapshot's source.
    folded: requests of folded branches, and their tokens beyond this edge. last_use: number of the last operation that
    used the edge. text: its first tokens and their text, once decoded.
    """

    tokens: bytes
    parent: Edge | None
    end: int
    children: dict[bytes, Edge] = field(default_factory=dict)
    snapshots: dict[int, SnapshotCounts] = field(default_factory=dict)  # by position
    ends: int = 0
    memory: int = 0
    disk: int = 0
    folded: TokenCounts = field(default_factory=TokenCounts)
    last_use: int = 0
    text: tuple[bytes, str] | None = None

    @property
    def length(self) -> int:
        """Number of tokens on the edge."""
        return len(self.tokens) // _ID_BYTES

    @property
    def begin(self) -> int:
        """Position where the edge begins, in tokens."""
        return self.end - self.length

    @property
    def can_grow(self) -> bool:
        """Whether tokens may be appended to the edge: nothing is counted at its end, and it is not the root."""
        counted = self.ends or self.memory or self.disk or self.folded.requests
        return not (self.children or counted or self.parent is None)


class TraceTree:
    """Bounded prefix tree of one run."""

    def __init__(
        self, max_tokens: int = MAX_TOKENS, max_edges: int = MAX_EDGES, max_positions: int = MAX_POSITIONS
    ) -> None:
        self.root = Edge(b"", None, 0)
        self._max_tokens, self._max_edges, self._max_positions = max_tokens, max_edges, max_positions
        self.num_tokens = self.num_edges = self._num_positions = 0
        self._clock = 0
        self._in_memory: dict[bytes, SnapshotCounts] = {}  # by the snapshot's key

    def answered(self, tokens: TokenArray, cached_tokens: int, source: CachedFrom) -> None:
        """Count a request. tokens: its prompt, (tokens,) int32. cached_tokens: number of tokens, from the first, that
        were restored from `source`."""
        edge = self._split_at(self._insert(tokens), len(tokens))
        edge.ends += 1
        if cached_tokens:
            resumed = self._split_at(edge, cached_tokens)
            resumed.memory += source == "memory"
            resumed.disk += source == "disk"
        self._fold_to_bounds()

    def kept(self, tokens: TokenArray, snapshots: Sequence[KeptSnapshot], at_s: float) -> None:
        """Count the snapshots kept along these tokens. A snapshot that is no longer in memory also counts as dropped.
        snapshots: by ascending position. at_s: seconds since the run began."""
        edge = self._insert(tokens)
        for snapshot in reversed(snapshots):
            edge = _edge_above(edge, snapshot.position)
            counts = self._counts_at(edge, snapshot.position)
            counts.count += 1
            counts.size_bytes += snapshot.size_bytes
            self._in_memory[snapshot.key] = counts
            if not snapshot.in_memory:
                self.removed(snapshot.key, True, at_s)
        self._fold_to_bounds()

    def removed(self, key: bytes, evicted: bool, at_s: float) -> None:
        """Forget a snapshot that has left the memory, and count it as dropped if it was evicted for lack of room. at_s:
        seconds since the run began."""
        counts = self._in_memory.pop(key, None)
        if counts is None or not evicted:
            return
        while counts.merged_into is not None:
            counts = counts.merged_into
        counts.dropped += 1
        counts.dropped_s = at_s

    def _insert(self, tokens: TokenArray) -> Edge:
        """Add the missing part of a path, and return the edge in which the path ends."""
        self._clock += 1
        data, edge = tokens.tobytes(), self.root
        while edge.end < len(tokens):
            at = _ID_BYTES * edge.end
            child = edge.children.get(data[at : at + _ID_BYTES])
            if child is None:
                edge = self._append(edge, data[at:])
            elif data.startswith(child.tokens, at):
                edge = child
            else:
                rest = tokens[edge.end :]
                common = common_length(np.frombuffer(child.tokens, np.int32), rest)
                edge = child if common == len(rest) else self._split(child, common)
            edge.last_use = self._clock
        return edge

    def _append(self, edge: Edge, tokens: bytes) -> Edge:
        """Append tokens to an edge if it can grow, otherwise add them as a child; return the edge that holds them."""
        count = len(tokens) // _ID_BYTES
        self.num_tokens += count
        if edge.can_grow:
            edge.tokens += tokens
            edge.end += count
            return edge
        child = Edge(tokens, edge, edge.end + count)
        edge.children[tokens[:_ID_BYTES]] = child
        self.num_edges += 1
        return child

    def _split_at(self, edge: Edge, position: int) -> Edge:
        """Return the edge of a path that ends at `position`, after splitting an edge if needed. edge: an edge of the
        path that ends there or later. position: at least 1."""
        edge = _edge_above(edge, position)
        return edge if edge.end == position else self._split(edge, position - edge.begin)

    def _split(self, edge: Edge, count: int) -> Edge:
        """Split an edge after `count` tokens, and return the upper part, which is a new edge."""
        parent, at = edge.parent, _ID_BYTES * count
        assert parent is not None, "the root has no tokens and is never split"
        upper = Edge(edge.tokens[:at], parent, edge.begin + count, last_use=edge.last_use, text=edge.text)
        upper.snapshots = {position: counts for position, counts in edge.snapshots.items() if position <= upper.end}
        edge.snapshots = {position: counts for position, counts in edge.snapshots.items() if position > upper.end}
        edge.tokens, edge.parent, edge.text = edge.tokens[at:], upper, None
        parent.children[upper.tokens[:_ID_BYTES]] = upper
        upper.children[edge.tokens[:_ID_BYTES]] = edge
        self.num_edges += 1
        return upper

    def _counts_at(self, edge: Edge, position: int) -> SnapshotCounts:
        """Return the snapshot counts of an edge at a position, and make them if they are new. At max_positions, a new
        position shares the counts of the edge's last position, if it has one."""
        counts = edge.snapshots.get(position)
        if counts is None and edge.snapshots and self._num_positions >= self._max_positions:
            return next(reversed(edge.snapshots.values()))
        if counts is None:
            counts = edge.snapshots[position] = SnapshotCounts()
            self._num_positions += 1
        return counts

    def _fold_to_bounds(self) -> None:
        """If a bound is exceeded, fold leaves until a tenth of both bounds is free: first those that saved the fewest
        tokens, on ties the least recently used. Recently used leaves are folded last, since they may still save
        tokens."""
        if self.num_tokens <= self._max_tokens and self.num_edges <= self._max_edges:
            return
        recent = self._clock - self._max_edges // _RECENT_DIVISOR
        found = [edge for edge in edges_below(self.root) if not edge.children and edge.parent is not None]
        leaves = [(*_fold_order(edge, recent), index, edge) for index, edge in enumerate(found)]
        heapq.heapify(leaves)
        number = len(leaves)
        while leaves and (self.num_tokens > 0.9 * self._max_tokens or self.num_edges > 0.9 * self._max_edges):
            parent = self._fold(heapq.heappop(leaves)[-1])
            if not parent.children and parent.parent is not None:
                number += 1
                heapq.heappush(leaves, (*_fold_order(parent, recent), number, parent))

    def _fold(self, leaf: Edge) -> Edge:
        """Add the counts of a leaf to its parent, drop the leaf and return the parent."""
        parent = leaf.parent
        assert parent is not None, "the root is never folded"
        requests = leaf.ends + leaf.folded.requests
        parent.memory += leaf.memory
        parent.disk += leaf.disk
        parent.folded.add(leaf.folded)
        parent.folded.requests += leaf.ends
        parent.folded.add_tokens(
            leaf.length * leaf.memory, leaf.length * leaf.disk, leaf.length * (requests - leaf.memory - leaf.disk)
        )
        for counts in leaf.snapshots.values():
            counts.merged_into = self._counts_at(parent, parent.end)
            counts.merged_into.add(counts)
        self._num_positions -= len(leaf.snapshots)
        del parent.children[leaf.tokens[:_ID_BYTES]]
        self.num_tokens -= leaf.length
        self.num_edges -= 1
        return parent


def edges_below(root: Edge) -> list[Edge]:
    """Return all edges depth first: parents before children, siblings in the order of their first use."""
    found, stack = [], [root]
    while stack:
        edge = stack.pop()
        found.append(edge)
        stack.extend(reversed(edge.children.values()))
    return found


def _edge_above(edge: Edge, position: int) -> Edge:
    """Return the edge of a path with begin < position <= end. edge: an edge of the path that ends there or later.
    position: at least 1."""
    while edge.begin >= position:
        assert edge.parent is not None
        edge = edge.parent
    return edge


def _fold_order(leaf: Edge, recent: int) -> tuple[bool, int, int]:
    """Return the sort key of a leaf for folding: whether it was used after operation `recent`, tokens that it saved,
    its last use."""
    saved = leaf.length * (leaf.memory + leaf.disk) + leaf.folded.restored
    return leaf.last_use > recent, saved, leaf.last_use
