"""How far requests get when every boundary is kept, or the last of each prompt: the engine's rules, on the
tree.

Must not know: memory, why a position should be kept. Requests are taken one after the other: what one has
computed, all behind it in the order may resume from. Invariant: on a node's edge the positions computed so
far are those from some position to its end, because every request that comes by goes to the end of it.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from apcbatch.plan.prefix_tree import ROOT
from apcbatch.plan.tree_shape import TreeShape
from apcbatch.prefix import last_boundary

Place = tuple[int, int]  # a node and a position on its edge
Held = Mapping[int, Sequence[int]]  # by node: positions on its edge, ascending
NOWHERE: Place = (ROOT, 0)


def held_by_node(places: Iterable[Place]) -> dict[int, list[int]]:
    """Places by node, each node's ascending."""
    by_node: dict[int, list[int]] = {}
    for node, position in sorted(set(places)):
        by_node.setdefault(node, []).append(position)
    return by_node


def held_places(held: Held) -> Iterator[Place]:
    """The other way round: every held place."""
    return ((node, position) for node, positions in held.items() for position in positions)


@dataclass(slots=True)
class Reach:
    """source: by request, the place it resumes from. num_kept: the snapshots that were kept. num_kv_tokens:
    the tokens whose KV they hold, each from its nearest kept ancestor on."""

    source: list[Place]
    num_kept: int = 0
    num_kv_tokens: int = 0


class Owners:
    """Which request computed a place first."""

    def __init__(self, shape: TreeShape) -> None:
        self._shape = shape
        self._begin = list(shape.end)
        self._runs: dict[int, list[tuple[int, int]]] = {}  # by node: (begin, request), as they came

    def computed_from(self, node: int) -> int:
        """The position from which on a node's edge has been computed; its end where nothing has."""
        return self._begin[node]

    def record(self, index: int, resume_at: int) -> None:
        """Note that a request computes everything after the position it resumes at."""
        shape, node = self._shape, self._shape.end_node[index]
        while node != ROOT and shape.end[node] > resume_at:
            begin = max(shape.begin[node], resume_at)
            if begin < self._begin[node]:
                self._begin[node] = begin
                self._runs.setdefault(node, []).append((begin, index))
            elif begin == shape.begin[node]:
                return  # whoever computed this had all before it: computed, or held
            node = shape.parent[node]

    def owner(self, place: Place) -> int | None:
        """The first request that computed a place; None for none."""
        node, position = place
        return next((index for begin, index in self._runs.get(node, ()) if begin < position), None)


def find_ideals(shape: TreeShape, order: Sequence[int], held: Held) -> list[int]:
    """By request: the longest prefix that an earlier one of the order or a held position covers, at most
    length - 1."""
    covered = [False] * shape.num_nodes
    covered[ROOT] = True
    ideals = [0] * shape.num_requests
    for index in order:
        limit, node = shape.length[index] - 1, shape.end_node[index]
        below = _longest_held(shape, held, node, limit)
        while not covered[node]:
            covered[node] = True
            node = shape.parent[node]
        ideals[index] = max(min(shape.end[node], limit), below)
    return ideals


def reach_all(shape: TreeShape, order: Sequence[int], block_size: int, held: Held) -> tuple[Reach, Owners]:
    """Policy `all`: every boundary that is computed is kept."""
    owners, source = Owners(shape), [NOWHERE] * shape.num_requests
    for index in order:
        node, limit = shape.end_node[index], shape.length[index] - 1
        while node != ROOT:
            computed = last_boundary(min(shape.end[node], limit), block_size)
            best = _last_at_most(held.get(node, ()), limit)
            if computed > owners.computed_from(node):
                best = max(best, computed)
            if best:
                source[index] = (node, best)
                break
            node = shape.parent[node]
        owners.record(index, source[index][1])
    reach = Reach(source)
    for node in range(1, shape.num_nodes):
        reach.num_kept += shape.end[node] // block_size - owners.computed_from(node) // block_size
    reach.num_kv_tokens = reach.num_kept * block_size
    return reach, owners


def reach_last(shape: TreeShape, order: Sequence[int], block_size: int, held: Held) -> Reach:
    """Policy `last`: of each prompt the last boundary is kept, where it lies beyond what was resumed from."""
    reach = Reach([NOWHERE] * shape.num_requests)
    kept = {node: list(positions) for node, positions in held.items()}
    for index in order:
        end_node, length = shape.end_node[index], shape.length[index]
        node = end_node
        while node != ROOT:
            best = _last_at_most(kept.get(node, ()), length - 1)
            if best:
                reach.source[index] = (node, best)
                break
            node = shape.parent[node]
        resume_at, last = reach.source[index][1], last_boundary(length, block_size)
        positions = kept.setdefault(shape.node_above(end_node, last), [])
        if resume_at < last and last not in positions:
            insort(positions, last)
            reach.num_kept += 1
            reach.num_kv_tokens += last - resume_at
    return reach


def _longest_held(shape: TreeShape, held: Held, node: int, limit: int) -> int:
    """The longest held position on the path to a node, up to a limit."""
    while held and node != ROOT:
        best = _last_at_most(held.get(node, ()), limit)
        if best:
            return best
        node = shape.parent[node]
    return 0


def _last_at_most(ascending: Sequence[int], limit: int) -> int:
    """The largest of the numbers that is at most the limit; 0 for none."""
    place = bisect_right(ascending, limit)
    return ascending[place - 1] if place else 0
