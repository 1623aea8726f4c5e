"""The prefix tree: a radix tree over the token ids of all known requests, built while they stream in.

Invariants: a request ends at a node's end, so a node's edge is on a request's path as a whole or not at all. Tokens of
a prefix that requests share are held once; the tokens of all edges are in one buffer. Of the arrays given to `add`,
only the latest is held.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np

from apcbatch.prefix import PrefixHasher, TokenArray, boundaries_in, common_length

ROOT = 0
FIRST_TOKENS = 4096


class PrefixTree:
    """Radix tree. Requests are numbered 0, 1, .. in order of `add`; nodes in order of creation, from 0 for the root. A
    node's edge holds the tokens from `begin` to `end`. parent, end: by node. end_node, conversation, resumable: by
    request. unique_tokens: distinct tokens of all requests."""

    def __init__(self) -> None:
        self.parent = array("i", [ROOT])
        self.end = array("i", [0])
        self.end_node = array("i")
        self.conversation = array("q")
        self.resumable = array("i")
        self.unique_tokens = 0
        self._offset = array("i", [0])  # where a node's tokens begin in _tokens
        self._tokens: TokenArray = np.empty(FIRST_TOKENS, np.int32)
        self._children: dict[int, int] = {}  # node and first token of the edge -> child
        self._latest: TokenArray = np.empty(0, np.int32)
        self._latest_node = ROOT

    @property
    def num_requests(self) -> int:
        return len(self.end_node)

    @property
    def num_nodes(self) -> int:
        """Number of nodes, the root included."""
        return len(self.parent)

    def begin(self, node: int) -> int:
        """Return the position at which a node's edge begins."""
        return self.end[self.parent[node]]

    def add(self, tokens: TokenArray, conversation: int, resumable: int | None = None) -> int:
        """Insert a request's prompt, (tokens,) int32, at least one token, and return the request's index. conversation:
        any number, the same for all requests of one conversation. resumable: the longest prefix that it may resume
        from; None for all but its last token."""
        if not len(tokens):
            raise ValueError("a request without tokens cannot be planned; expected at least one")
        node, position = self._descend(tokens, *self._common_with_latest(tokens))
        if position < self.end[node]:
            node = self._split(node, position)
        if position < len(tokens):
            node = self._append(node, tokens[position:])
        self._latest, self._latest_node = tokens, node
        self.end_node.append(node)
        self.conversation.append(conversation)
        self.resumable.append(len(tokens) - 1 if resumable is None else resumable)
        return self.num_requests - 1

    def finish(self) -> None:
        """Free what only `add` needs; call it after the last request."""
        self._children.clear()

    def edge_tokens(self, node: int) -> TokenArray:
        """Return the tokens of a node's edge, as a view."""
        offset = self._offset[node]
        return self._tokens[offset : offset + self.end[node] - self.begin(node)]

    def path_tokens(self, node: int) -> TokenArray:
        """Return all tokens up to a node's end, (tokens,) int32; those of a request's end node are its prompt."""
        tokens = np.empty(self.end[node], np.int32)
        while node != ROOT:
            parent, offset = self.parent[node], self._offset[node]
            begin, end = self.end[parent], self.end[node]
            tokens[begin:end] = self._tokens[offset : offset + end - begin]
            node = parent
        return tokens

    def keys(self, fingerprint: bytes, block_size: int) -> Iterator[tuple[int, int, bytes]]:
        """Yield (node, position, prefix key) of every boundary of the tree, once each, ascending on each edge."""
        for node in range(1, self.num_nodes):
            boundaries = boundaries_in(self.begin(node), self.end[node], block_size)
            if boundaries:
                hasher = PrefixHasher(fingerprint, self.path_tokens(node))
                for position, key in hasher.keys_at(boundaries):
                    yield node, position, key

    def _common_with_latest(self, tokens: TokenArray) -> tuple[int, int]:
        """Return the deepest node that this request's path shares with the latest request's path, and the number of
        tokens that they share."""
        position = common_length(self._latest, tokens)
        node = self._latest_node
        while node != ROOT and self.end[parent := self.parent[node]] >= position:
            node = parent
        return node, position

    def _descend(self, tokens: TokenArray, node: int, position: int) -> tuple[int, int]:
        """Descend the tree along the tokens. Return the last node on their path, and the number of tokens that match.

        node, position: where to begin; the tokens before `position` are known to match the path to `node`.
        """
        while position == self.end[node] and position < len(tokens):
            child = self._children.get(_child_key(node, tokens[position]))
            if child is None:
                break
            node = child
            position += common_length(self.edge_tokens(node), tokens[position:])
        return node, position

    def _split(self, node: int, position: int) -> int:
        """Cut a node's edge at a position and return the new upper node; the lower one keeps its number."""
        parent, begin = self.parent[node], self.begin(node)
        upper = self._new_node(parent, position, self._offset[node])
        self._children[_child_key(parent, self._tokens[self._offset[node]])] = upper
        self._offset[node] += position - begin
        self.parent[node] = upper
        self._children[_child_key(upper, self._tokens[self._offset[node]])] = node
        return upper

    def _append(self, parent: int, edge: TokenArray) -> int:
        first, last = self.unique_tokens, self.unique_tokens + len(edge)
        if last > len(self._tokens):
            grown = np.empty(max(last, 2 * len(self._tokens)), np.int32)
            grown[:first] = self._tokens[:first]
            self._tokens = grown
        self._tokens[first:last] = edge
        self.unique_tokens = last
        node = self._new_node(parent, self.end[parent] + len(edge), first)
        self._children[_child_key(parent, edge[0])] = node
        return node

    def _new_node(self, parent: int, end: int, offset: int) -> int:
        self.parent.append(parent)
        self.end.append(end)
        self._offset.append(offset)
        return self.num_nodes - 1


def _child_key(node: int, token: int | np.integer) -> int:
    return (node << 32) + int(token)


def common_prefixes(tree: PrefixTree, index: int) -> list[tuple[int, int]]:
    """Return (tokens, earlier request) pairs, ascending by tokens: the length of a prefix that a request's prompt
    shares with earlier prompts, and the first request that has this prefix. Of several prefixes with the same first
    request, only the longest is returned."""
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
