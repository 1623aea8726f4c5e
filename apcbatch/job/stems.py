"""Stems: the prefix tree of the requests that were answered, with what was restored and computed on each edge.

A bounded radix tree over token ids. It is cut where prompts fork, where one ends and where one was resumed, so that for
each request a stem is restored as a whole or computed as a whole, and counts at its end are all it needs:

    a prompt of 300 tokens, then one of 500 that resumes at 256 and shares all 300:
    0 .. 256    2 requests, restored once, computed once
    256 .. 300  2 requests, computed twice
    300 .. 500  1 request, computed once

Beyond its bounds, branches are folded into the stem that they grow from: what they saved goes on counting there. Must
not know: what tokens mean, files, when it is asked. Invariant: over all stems, restored and computed tokens are those
of all requests that were added, whatever was folded.
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
MAX_STEMS = 16_384
MAX_PLACES = 65_536  # positions at which snapshots are told apart
_ID_BYTES = 4
_SPARED = 4  # the last fourth of the requests that touched the tree keep their branches for a while


@dataclass(slots=True, eq=False)
class Place:
    """The snapshots that were kept at one position. dropped_s: when the last one went for lack of room. into: the place
    that counts for it since its stem was folded."""

    count: int = 0
    size_bytes: int = 0
    dropped: int = 0
    dropped_s: float | None = None
    into: Place | None = None

    def add(self, other: Place) -> None:
        """Add the counts of another place."""
        self.count += other.count
        self.size_bytes += other.size_bytes
        self.dropped += other.dropped
        if other.dropped_s is not None:
            self.dropped_s = max(other.dropped_s, self.dropped_s or 0.0)


@dataclass(slots=True, eq=False)
class Stem:
    """edge: its tokens, as bytes of int32. ends: requests that end at its end. memory, disk: those that were resumed
    there or in a folded branch, by the snapshot's source. hidden: requests of folded branches. folded_memory,
    folded_disk, folded_computed: their tokens beyond this stem. text: tokens and what they say, once that was asked."""

    edge: bytes
    parent: Stem | None
    end: int
    children: dict[bytes, Stem] = field(default_factory=dict)
    places: dict[int, Place] = field(default_factory=dict)
    ends: int = 0
    memory: int = 0
    disk: int = 0
    hidden: int = 0
    folded_memory: int = 0
    folded_disk: int = 0
    folded_computed: int = 0
    last_use: int = 0
    text: tuple[bytes, str] | None = None

    @property
    def length(self) -> int:
        """Tokens of its edge."""
        return len(self.edge) // _ID_BYTES

    @property
    def begin(self) -> int:
        """Where its edge begins, in tokens."""
        return self.end - self.length

    @property
    def is_open(self) -> bool:
        """Whether nothing is counted at its end, so that it may grow."""
        counted = self.ends or self.memory or self.disk or self.hidden
        return not (self.children or counted or self.parent is None)


class StemTree:
    """The stems of one run."""

    def __init__(self, max_tokens: int = MAX_TOKENS, max_stems: int = MAX_STEMS, max_places: int = MAX_PLACES) -> None:
        self.root = Stem(b"", None, 0)
        self._max_tokens, self._max_stems, self._max_places = max_tokens, max_stems, max_places
        self.num_tokens = self.num_stems = self._num_places = 0
        self._clock = 0
        self._held: dict[bytes, Place] = {}  # the snapshots in memory

    def answered(self, tokens: TokenArray, cached_tokens: int, source: CachedFrom) -> None:
        """Count a request. tokens: its prompt, (tokens,) int32; the first cached_tokens were restored from `source`."""
        node = self._cut(self._reach(tokens), len(tokens))
        node.ends += 1
        if cached_tokens:
            resumed = self._cut(node, cached_tokens)
            resumed.memory += source == "memory"
            resumed.disk += source == "disk"
        self._fold_some()

    def kept(self, tokens: TokenArray, snapshots: Sequence[KeptSnapshot], at_s: float) -> None:
        """Count snapshots that were kept of these tokens, ascending. at_s: when, in seconds."""
        node = self._reach(tokens)
        for snapshot in reversed(snapshots):
            node = _upwards(node, snapshot.position)
            place = self._place(node, snapshot.position)
            place.count += 1
            place.size_bytes += snapshot.size_bytes
            self._held[snapshot.key] = place
            if not snapshot.in_memory:
                self.let_go(snapshot.key, True, at_s)
        self._fold_some()

    def let_go(self, key: bytes, evicted: bool, at_s: float) -> None:
        """A snapshot has left the memory."""
        place = self._held.pop(key, None)
        if place is None or not evicted:
            return
        while place.into is not None:
            place = place.into
        place.dropped += 1
        place.dropped_s = at_s

    def _reach(self, tokens: TokenArray) -> Stem:
        """The stem in which a path ends, which is made where it is not there."""
        self._clock += 1
        data, node = tokens.tobytes(), self.root
        while node.end < len(tokens):
            at = _ID_BYTES * node.end
            child = node.children.get(data[at : at + _ID_BYTES])
            if child is None:
                node = self._grow(node, data[at:])
            elif data.startswith(child.edge, at):
                node = child
            else:
                rest = tokens[node.end :]
                common = common_length(np.frombuffer(child.edge, np.int32), rest)
                node = child if common == len(rest) else self._split(child, common)
            node.last_use = self._clock
        return node

    def _grow(self, node: Stem, edge: bytes) -> Stem:
        """Add the end of a path."""
        self.num_tokens += len(edge) // _ID_BYTES
        if node.is_open:
            node.edge += edge
            node.end += len(edge) // _ID_BYTES
            return node
        child = Stem(edge, node, node.end + len(edge) // _ID_BYTES)
        node.children[edge[:_ID_BYTES]] = child
        self.num_stems += 1
        return child

    def _cut(self, node: Stem, position: int) -> Stem:
        """The stem that ends at a position of a path, at least 1. node: one on the path that ends there or later."""
        node = _upwards(node, position)
        return node if node.end == position else self._split(node, position - node.begin)

    def _split(self, node: Stem, count: int) -> Stem:
        """Cut a stem after so many tokens; the upper one, which is new."""
        parent, at = node.parent, _ID_BYTES * count
        assert parent is not None, "the root has an empty edge and is never split"
        upper = Stem(node.edge[:at], parent, node.begin + count, last_use=node.last_use, text=node.text)
        upper.places = {position: place for position, place in node.places.items() if position <= upper.end}
        node.places = {position: place for position, place in node.places.items() if position > upper.end}
        node.edge, node.parent, node.text = node.edge[at:], upper, None
        parent.children[upper.edge[:_ID_BYTES]] = upper
        upper.children[node.edge[:_ID_BYTES]] = node
        self.num_stems += 1
        return upper

    def _place(self, node: Stem, position: int) -> Place:
        """Where a stem's snapshots at a position are counted: where there are too many positions, with others of it."""
        place = node.places.get(position)
        if place is None and node.places and self._num_places >= self._max_places:
            return next(reversed(node.places.values()))
        if place is None:
            place = node.places[position] = Place()
            self._num_places += 1
        return place

    def _fold_some(self) -> None:
        """Beyond a bound, fold leaves until a tenth of both is free: those that saved least go first, of these the ones
        that were used longest ago; what was used of late stays for now, since it may save yet."""
        if self.num_tokens <= self._max_tokens and self.num_stems <= self._max_stems:
            return
        late = self._clock - self._max_stems // _SPARED
        leaves = [(*_worth(node, late), index, node) for index, node in enumerate(self._leaves())]
        heapq.heapify(leaves)
        number = len(leaves)
        while leaves and (self.num_tokens > 0.9 * self._max_tokens or self.num_stems > 0.9 * self._max_stems):
            parent = self._fold(heapq.heappop(leaves)[-1])
            if not parent.children and parent.parent is not None:
                number += 1
                heapq.heappush(leaves, (*_worth(parent, late), number, parent))

    def _leaves(self) -> list[Stem]:
        return [node for node in stems_of(self.root) if not node.children and node.parent is not None]

    def _fold(self, leaf: Stem) -> Stem:
        """Count a leaf in its parent from now on, which is returned."""
        parent = leaf.parent
        assert parent is not None, "the root is not among the stems that may be folded"
        requests = leaf.ends + leaf.hidden
        parent.hidden += requests
        parent.memory += leaf.memory
        parent.disk += leaf.disk
        parent.folded_memory += leaf.folded_memory + leaf.length * leaf.memory
        parent.folded_disk += leaf.folded_disk + leaf.length * leaf.disk
        parent.folded_computed += leaf.folded_computed + leaf.length * (requests - leaf.memory - leaf.disk)
        for place in leaf.places.values():
            place.into = self._place(parent, parent.end)
            place.into.add(place)
        self._num_places -= len(leaf.places)
        del parent.children[leaf.edge[:_ID_BYTES]]
        self.num_tokens -= leaf.length
        self.num_stems -= 1
        return parent


def stems_of(root: Stem) -> list[Stem]:
    """All stems, parents before children, in the order in which they were first seen."""
    found, stack = [], [root]
    while stack:
        node = stack.pop()
        found.append(node)
        stack.extend(reversed(node.children.values()))
    return found


def _upwards(node: Stem, position: int) -> Stem:
    """The stem of a path whose edge holds a position, at least 1. node: one on the path that ends there or later."""
    while node.begin >= position:
        assert node.parent is not None
        node = node.parent
    return node


def _worth(leaf: Stem, late: int) -> tuple[bool, int, int]:
    """What a leaf is kept by: used of late, tokens that it saved, its last use."""
    saved = leaf.length * (leaf.memory + leaf.disk) + leaf.folded_memory + leaf.folded_disk
    return leaf.last_use > late, saved, leaf.last_use
