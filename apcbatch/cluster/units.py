"""Cutting the forest of requests into groups that are short enough to be shared evenly, and no shorter.

Must not know: workers, states that are there. Invariants: every request is in exactly one group; a group's requests
that resume from another group's all resume from the snapshots of one request, so the groups make a forest too; a group
is longer than the quantum only if it is one request. The quantum shrinks with the work that is left, so that the groups
that go last are the smallest.

An example with a quantum of 10 s: a stem of 4 s that three conversations of 6, 3 and 3 s go on from. Together they take
16 s, so they are parted: the stem alone, and under it two groups, of 6 + 3 and 3 s.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from apcbatch.cluster.items import Group, Item
from apcbatch.cluster.rates import Rates

GROUPS_PER_SHARE = 8  # of the work that is left, over a worker's fair share of it
LEAST_GROUP_S = 0.5
MOST_SHARES = 2  # a group is at most so many fair shares


@dataclass(frozen=True)
class Quantum:
    """How long a group may be. num_workers: among which the work is shared."""

    num_workers: int
    least_s: float = LEAST_GROUP_S

    def of(self, left_s: float) -> float:
        """The most seconds of a group if so many seconds of work are left."""
        share = left_s / self.num_workers
        return min(max(share / GROUPS_PER_SHARE, self.least_s), MOST_SHARES * share)


def estimate(items: Iterable[Item], rates: Rates) -> None:
    """Set how long each request takes."""
    for item in items:
        item.seconds = rates.seconds(item.prefill_tokens, item.most_answer_tokens)
        item.below_s = max(item.below_s, item.seconds)


class Cutter:
    """Cuts one lot of requests."""

    def __init__(self, items: list[Item], quantum: Quantum, other_s: float = 0.0) -> None:
        """items: in the plan's order, estimated. other_s: work that is waiting already."""
        self._items, self._quantum = items, quantum
        self._left_s = other_s + sum(item.seconds for item in items)
        self._groups: list[Group] = []

    def cut(self) -> list[Group]:
        """The groups, in the plan's order of their first requests."""
        here = {item.number for item in self._items}
        below: dict[int, list[tuple[float, list[Item]]]] = {}  # by maker: clusters that may join it
        roots: dict[int, list[tuple[float, list[Item]]]] = {}  # by the origin of what they resume from
        for item in reversed(self._items):
            cluster = self._join(item, below.pop(item.number, []))
            state = item.resume
            if state is not None and state.maker is not None and state.maker.number in here:
                below.setdefault(state.maker.number, []).append(cluster)
            else:
                roots.setdefault(-1 if state is None else state.origin, []).append(cluster)
        for clusters in roots.values():
            self._close(clusters)
        return sorted(self._groups, key=lambda group: group.number)

    def _join(self, item: Item, clusters: list[tuple[float, list[Item]]]) -> tuple[float, list[Item]]:
        """A request with everything below it if that is short enough; else alone, and what is below it is closed."""
        total = item.seconds + sum(seconds for seconds, _ in clusters)
        if clusters and total > self._quantum.of(self._left_s):
            self._close(clusters)
            return item.seconds, [item]
        joined = max((members for _, members in clusters), key=len, default=[])
        for _, members in clusters:
            if members is not joined:
                joined += members
        joined.append(item)
        return total, joined

    def _close(self, clusters: list[tuple[float, list[Item]]]) -> None:
        """Put clusters under one request, or under none, into groups; the largest first."""
        bag: list[Item] = []
        bag_s = 0.0
        for seconds, members in sorted(clusters, key=lambda cluster: -cluster[0]):
            if bag and bag_s + seconds > self._quantum.of(self._left_s):
                self._end(bag)
                bag, bag_s = [], 0.0
            bag += members
            bag_s += seconds
        if bag:
            self._end(bag)

    def _end(self, members: list[Item]) -> None:
        members.sort(key=lambda item: item.number)
        for item in reversed(members):  # readers come before their makers
            _lengthen(item, item.below_s)
        group = Group(members)
        for item in members:
            if item.resume is not None and item.resume.maker is not None and item.resume.maker.group is not group:
                _lengthen(item, group.priority)  # it begins with the whole group
        self._groups.append(group)
        self._left_s -= group.seconds


def _lengthen(item: Item, below_s: float) -> None:
    """The path from a request's maker on is at least as long as this one from itself."""
    maker = item.resume.maker if item.resume is not None else None
    if maker is not None:
        maker.below_s = max(maker.below_s, maker.seconds + below_s)
