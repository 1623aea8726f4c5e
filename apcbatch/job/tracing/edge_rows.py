"""Convert the prefix tree of a run into the columns of its trace, with a bounded number of rows.

The tree also splits an edge where a request resumes, and where the tokens of a snapshot leave the prompts. Such edges
are joined again, so that a row ends where prompts fork or end. Invariant: restored and computed tokens, summed over all
rows, equal the tree's sums, even if rows were folded.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from apcbatch.errors import RequestError
from apcbatch.job.tracing.edges import Edge, SnapshotCounts, TokenCounts, edges_below
from apcbatch.job.tracing.segment import MAX_EDGE_ROWS, ROOT_PARENT, EdgeColumns

MAX_CHARACTERS = 80
_HEAD_BYTES = 4 * 32  # the first 32 tokens, which are decoded for a row's text
_DECIMALS = 3

Decode = Callable[[Sequence[int]], str]


@dataclass(slots=True, eq=False)
class _Row:
    """Edge of the trace, made of one or more successive edges of the tree.

    first: the first edge. requests: those whose prompts contain the row. head: first tokens of the row, as bytes of
    int32. counts: restored and computed tokens of the row, and requests and tokens of branches folded into it.
    num_children: rows that have it as their parent. number: its index in the trace.
    """

    first: Edge
    parent: _Row | None
    begin: int
    end: int
    requests: int
    head: bytes = b""
    counts: TokenCounts = field(default_factory=TokenCounts)
    snapshots: SnapshotCounts = field(default_factory=SnapshotCounts)
    num_children: int = 0
    is_folded: bool = False
    number: int = 0


def edge_columns(root: Edge, decode: Decode, max_rows: int = MAX_EDGE_ROWS) -> EdgeColumns:
    """Return the edges of the tree as columns, the root first. decode: returns the text of token ids, special tokens as
    text; called for a row only if its first edge has no text of the same tokens yet, until a call raises
    RequestError."""
    rows = _rows(root)
    _fold(rows, max_rows)
    rows = [row for row in rows if not row.is_folded]
    for number, row in enumerate(rows):
        row.number = number
    texts = _texts(rows, decode)
    return EdgeColumns(*(list(column) for column in zip(*map(_fields, rows, texts), strict=True)))


def _fields(row: _Row, text: str) -> tuple[Any, ...]:
    """Return the values of a row, in the order of EdgeColumns."""
    counts, kept = row.counts, row.snapshots
    return (
        ROOT_PARENT if row.parent is None else row.parent.number,
        row.begin,
        row.end,
        row.requests,
        counts.restored,
        counts.computed,
        counts.memory,
        counts.disk,
        kept.count,
        kept.size_bytes,
        kept.dropped,
        None if kept.dropped_s is None else round(kept.dropped_s, _DECIMALS),
        text,
        counts.requests,
    )


def _rows(root: Edge) -> list[_Row]:
    """Return a row for each edge, or chain of edges, that requests pass. The counts of edges that no request passes are
    added to the row above."""
    edges = edges_below(root)
    passed = {edge: [edge.ends + edge.folded.requests, edge.memory, edge.disk] for edge in edges}
    forks = dict.fromkeys(edges, 0)  # number of children that requests pass
    for edge in reversed(edges):
        if edge.parent is not None and passed[edge][0]:
            above = passed[edge.parent]
            for index, count in enumerate(passed[edge]):
                above[index] += count
            forks[edge.parent] += 1
    row_of: dict[Edge, _Row] = {}
    rows: list[_Row] = []
    for edge in edges:
        requests, memory, disk = passed[edge]
        parent = None if edge.parent is None else row_of[edge.parent]
        if parent is None or (requests and not _continues(edge.parent, forks)):
            row = _Row(edge, parent, edge.begin, edge.end, requests)
            rows.append(row)
            if parent is not None:
                parent.num_children += 1
        else:
            row = parent
            row.end = edge.end if requests else row.end
        if requests and len(row.head) < _HEAD_BYTES:
            row.head += edge.tokens[: _HEAD_BYTES - len(row.head)]
        row_of[edge] = row
        row.counts.add(edge.folded)
        length = edge.length
        row.counts.add_tokens(length * memory, length * disk, length * (requests - memory - disk))
        for kept in edge.snapshots.values():
            row.snapshots.add(kept)
    return rows


def _continues(edge: Edge | None, forks: dict[Edge, int]) -> bool:
    """Return whether all requests that pass an edge continue into the same child; False for the root, which keeps a
    row of its own."""
    if edge is None or edge.parent is None:
        return False
    return forks[edge] == 1 and not (edge.ends or edge.folded.requests)


def _fold(rows: list[_Row], max_rows: int) -> None:
    """Fold leaves into their parents until max_rows are left: first those with the fewest restored tokens, on ties
    those with the fewest computed tokens."""
    index_of = {row: index for index, row in enumerate(rows)}
    leaves = [(row.counts.restored, row.counts.computed, index_of[row]) for row in rows if not row.num_children]
    heapq.heapify(leaves)
    for _ in range(len(rows) - max_rows):
        row = rows[heapq.heappop(leaves)[-1]]
        parent = row.parent
        assert parent is not None, "the root is the last row that is left"
        row.is_folded = True
        parent.counts.requests += row.requests
        parent.counts.add_tokens(row.counts.memory, row.counts.disk, row.counts.computed)
        parent.snapshots.add(row.snapshots)
        parent.num_children -= 1
        if not parent.num_children:
            heapq.heappush(leaves, (parent.counts.restored, parent.counts.computed, index_of[parent]))


def _texts(rows: list[_Row], decode: Decode) -> list[str]:
    """Return the first words of each row, without a partial character at the beginning, since that begins in the row
    above. A row that the tokenizer cannot decode has no words and is not tried again. The rows after it are decoded
    for the next trace, since a failed attempt may take seconds."""
    texts, can_decode = [], True
    for row in rows:
        head, text = row.first.text or (None, "")
        if head != row.head:
            text = ""
            if can_decode and row.head:
                try:
                    text = decode(np.frombuffer(row.head, np.int32).tolist()).lstrip("\ufffd")[:MAX_CHARACTERS]
                except RequestError:
                    can_decode = False
                row.first.text = (row.head, text)
        texts.append(text)
    return texts
