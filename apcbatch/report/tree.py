"""Merge the prefix trees of all processes that ran on one OUT.

Invariants: parents come before children, and row 0 is the empty prefix; the sums of tokens and snapshots over the rows
are those over the segments. Edges are equal if they have equal parents, positions and first words; counts of equal
edges are added. An edge that a later process split at another position stays a separate row.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

from apcbatch.job.tracing.segment import MAX_EDGE_ROWS, Segment

ADDED = ("requests", "restored", "computed", "memory", "disk", "snapshots", "snapshot_bytes", "dropped", "hidden")
COLUMNS = ("parent", "begin", "end", *ADDED, "dropped_s", "text")


def merge_edges(segments: Sequence[Segment]) -> dict[str, Any] | None:
    """Return the edges of all segments as columns, with a `note`; None without a segment. dropped_s: seconds since the
    begin of the first segment."""
    if not segments:
        return None
    rows: list[dict[str, Any]] = []
    places: dict[tuple[Any, ...], int] = {}
    for number, segment in enumerate(segments):
        _add(rows, places, segment, number, max(0.0, segment.begin - segments[0].begin))
    num_hidden = _fold(rows)
    note = None
    if num_hidden:
        note = f"{num_hidden:,} edges that save least are counted in the edges above them"
    return {**{name: [row[name] for row in rows] for name in COLUMNS}, "note": note}


def _add(
    rows: list[dict[str, Any]], places: dict[tuple[Any, ...], int], segment: Segment, number: int, later_s: float
) -> None:
    """Add the edges of a segment. later_s: seconds from the first segment's begin to this one's."""
    new_of: list[int] = []
    columns = [getattr(segment.edges, name) for name in COLUMNS]
    for old, values in enumerate(zip(*columns, strict=True)):
        given = dict(zip(COLUMNS, values, strict=True))
        parent = -1 if old == 0 else new_of[given["parent"]]
        dropped_s = None if given["dropped_s"] is None else given["dropped_s"] + later_s
        # Edges without words cannot be compared, so they are never merged.
        own = () if given["text"] or old == 0 else (number, old)
        key = (parent, given["begin"], given["end"], given["text"], *own)
        place = places.get(key)
        if place is None:
            places[key] = len(rows)
            new_of.append(len(rows))
            rows.append(given | {"parent": parent, "dropped_s": dropped_s})
            continue
        new_of.append(place)
        row = rows[place]
        for name in ADDED:
            row[name] += given[name]
        row["dropped_s"] = max((s for s in (row["dropped_s"], dropped_s) if s is not None), default=None)


def _fold(rows: list[dict[str, Any]]) -> int:
    """Fold the leaves with the fewest restored tokens into their parents until at most MAX_EDGE_ROWS are left, renumber
    the rows, and return the number of leaves folded."""
    if len(rows) <= MAX_EDGE_ROWS:
        return 0
    num_children = [0] * len(rows)
    for row in rows[1:]:
        num_children[row["parent"]] += 1
    saved = [row["restored"] for row in rows]
    gone: set[int] = set()
    leaves = [(saved[n], n) for n in range(1, len(rows)) if not num_children[n]]
    heapq.heapify(leaves)
    while len(rows) - len(gone) > MAX_EDGE_ROWS:
        _, leaf = heapq.heappop(leaves)
        gone.add(leaf)
        row = rows[leaf]
        above = rows[row["parent"]]
        for name in ADDED:
            if name not in ("requests", "hidden"):
                above[name] += row[name]
        above["hidden"] += row["requests"]
        num_children[row["parent"]] -= 1
        if not num_children[row["parent"]] and row["parent"]:
            heapq.heappush(leaves, (saved[row["parent"]], row["parent"]))
    left = [old for old in range(len(rows)) if old not in gone]
    new_of = {old: new for new, old in enumerate(left)} | {-1: -1}
    rows[:] = [rows[old] | {"parent": new_of[rows[old]["parent"]]} for old in left]
    return len(gone)
