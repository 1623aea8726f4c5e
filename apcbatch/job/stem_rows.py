"""The rows of a trace's stems: the tree in columns, at most as many as a file may have.

Stems that only snapshots or resumed requests have cut are put together again; so a row ends where prompts fork or end.
Must not know: files, the engine. Invariant: restored and computed tokens of all rows are those of the tree, whatever
was folded to stay within the number of rows.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from apcbatch.errors import RequestError
from apcbatch.job.segment import MOST_STEMS, ROOT_PARENT, Stems
from apcbatch.job.stems import Place, Stem, stems_of

MOST_CHARACTERS = 80
_HEAD_BYTES = 4 * 32  # the tokens that are decoded for it
_DECIMALS = 3

Decode = Callable[[Sequence[int]], str]


@dataclass(slots=True, eq=False)
class _Row:
    """first: the stem that its edge begins with; head: its first tokens, as bytes. num_children: rows that have it as
    their parent."""

    first: Stem
    parent: _Row | None
    begin: int
    end: int
    requests: int
    head: bytes = b""
    memory: int = 0
    disk: int = 0
    computed: int = 0
    hidden: int = 0
    num_children: int = 0
    is_folded: bool = False
    number: int = 0

    @property
    def restored(self) -> int:
        return self.memory + self.disk


def stem_rows(root: Stem, decode: Decode, most: int = MOST_STEMS) -> Stems:
    """The stems below and with the root. decode: the text of token ids, special tokens as text; it is asked once for a
    stem, and only for one that is among the rows."""
    rows, places = _rows(root)
    _fold(rows, places, most)
    shown = [row for row in rows if not row.is_folded]
    stems = Stems(*([] for _ in fields(Stems)))
    for number, row in enumerate(shown):
        row.number = number
        place = places[row]
        stems.parent.append(ROOT_PARENT if row.parent is None else row.parent.number)
        stems.begin.append(row.begin)
        stems.end.append(row.end)
        stems.requests.append(row.requests)
        stems.restored.append(row.restored)
        stems.computed.append(row.computed)
        stems.memory.append(row.memory)
        stems.disk.append(row.disk)
        stems.snapshots.append(place.count)
        stems.snapshot_bytes.append(place.size_bytes)
        stems.dropped.append(place.dropped)
        stems.dropped_s.append(None if place.dropped_s is None else round(place.dropped_s, _DECIMALS))
        stems.text.append(_text(row, decode))
        stems.hidden.append(row.hidden)
    return stems


def _rows(root: Stem) -> tuple[list[_Row], dict[_Row, Place]]:
    """A row for each stem that requests go through, and its snapshots; those of other stems are its own as well."""
    nodes = stems_of(root)
    through = {node: [node.ends + node.hidden, node.memory, node.disk] for node in nodes}
    forks = dict.fromkeys(nodes, 0)  # children that requests go through
    for node in reversed(nodes):
        if node.parent is not None and through[node][0]:
            above = through[node.parent]
            for index, count in enumerate(through[node]):
                above[index] += count
            forks[node.parent] += 1
    row_of: dict[Stem, _Row] = {}
    rows: list[_Row] = []
    places: dict[_Row, Place] = {}
    for node in nodes:
        requests, memory, disk = through[node]
        parent = None if node.parent is None else row_of[node.parent]
        above_node = node.parent
        if parent is None or (requests and not _goes_on(above_node, forks)):
            row = _Row(node, parent, node.begin, node.end, requests)
            rows.append(row)
            places[row] = Place()
            if parent is not None:
                parent.num_children += 1
        else:
            row = parent
            row.end = node.end if requests else row.end
        if requests and len(row.head) < _HEAD_BYTES:
            row.head += node.edge[: _HEAD_BYTES - len(row.head)]
        row_of[node] = row
        row.memory += node.length * memory + node.folded_memory
        row.disk += node.length * disk + node.folded_disk
        row.computed += node.length * (requests - memory - disk) + node.folded_computed
        row.hidden += node.hidden
        for place in node.places.values():
            places[row].add(place)
    return rows, places


def _goes_on(node: Stem | None, forks: dict[Stem, int]) -> bool:
    """Whether all requests of a stem go on into the same one."""
    return node is not None and node.parent is not None and forks[node] == 1 and not (node.ends or node.hidden)


def _fold(rows: list[_Row], places: dict[_Row, Place], most: int) -> None:
    """Fold leaves into their parents until the rows are few enough: those that saved least, then the smallest."""
    leaves = [(row.restored, row.computed, index) for index, row in enumerate(rows) if not row.num_children]
    heapq.heapify(leaves)
    index_of = {row: index for index, row in enumerate(rows)}
    for _ in range(len(rows) - most):
        row = rows[heapq.heappop(leaves)[-1]]
        parent = row.parent
        assert parent is not None, "the root is the last row that is left"
        row.is_folded = True
        parent.hidden += row.requests
        parent.memory += row.memory
        parent.disk += row.disk
        parent.computed += row.computed
        parent.num_children -= 1
        places[parent].add(places[row])
        if not parent.num_children:
            heapq.heappush(leaves, (parent.restored, parent.computed, index_of[parent]))


def _text(row: _Row, decode: Decode) -> str:
    """The first words of a row, without what is left of a character that begins in the one above."""
    known = row.first.text
    if known is None or known[0] != row.head:
        token_ids = np.frombuffer(row.head, np.int32).tolist()
        try:
            text = decode(token_ids).lstrip("\ufffd")[:MOST_CHARACTERS] if token_ids else ""
        except RequestError:  # the tokenizer cannot make it
            return ""
        known = row.first.text = (row.head, text)
    return known[1]
