"""Sub-trees that go from one class of workers to another one that has nothing left to do.

Must not know: workers, units. Invariants: what goes has not begun, and all that resumes from what it makes goes with
it; the states above it are made anew, once, by the class that it goes to, for states never cross classes.

An example: forty conversations under one system prompt of 3,000 tokens, workers of one class for each. The first class
begins the prompt's family. The second has no other to begin, so it takes a share of the conversations that wait, and
computes the prompt a second time for all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set

from apcbatch.cluster.items import Group, Item, State
from apcbatch.cluster.placing import Placing
from apcbatch.cluster.states import States

WORTH = 10  # seconds of work that go for each second in which the states above are made anew


class Parting:
    """Parts what a Placing holds. states: which lie somewhere."""

    def __init__(self, placing: Placing, states: States) -> None:
        self._placing, self._states = placing, states
        self._num_families = 0

    def take_share(self, class_: str, pace_s: float, prefill_s: float) -> bool:
        """Give a class sub-trees of the one that would end last, as long as they are done sooner there; whether there
        were any. pace_s: what a worker of it takes for a typical mixture. prefill_s: seconds a token, in the unit of
        the items' seconds."""
        shares, queue = self._placing.queue.shares, self._placing.queue
        other = shares.last_to_end()
        if other is None or other == class_:
            return False
        taken: list[Group] = []
        trees: set[Item] = set()
        stems: set[State] = set()
        taken_s = 0.0
        for group, tree in self._trees(other):
            if trees.issuperset(tree):
                continue
            tree_s = sum(item.seconds for item in tree)
            above = stems.union(group.outside())
            above_s, path_s = prefill_s * _tokens(above), pace_s * group.priority
            if shares.is_sooner(class_, other, taken_s + above_s, tree_s, path_s):
                taken.append(group)
                trees, stems, taken_s = trees | tree, above, taken_s + tree_s
        if not taken or taken_s < WORTH * prefill_s * _tokens(stems):
            return False
        queue.remove(taken)
        self._move(trees, class_)
        groups = {item.group for item in trees if item.group is not None}
        for group in sorted(groups, key=lambda group: group.number):
            self._placing.place(group)
        return True

    def _trees(self, class_: str) -> list[tuple[Group, set[Item]]]:
        """The ready groups of a class that can go, each with its tree; those first that have much under a short
        beginning."""
        waiting = set(self._placing.waiting)
        trees = [(group, _tree(group, waiting)) for group in self._placing.queue.of_class(class_)]
        found = [(group, tree) for group, tree in trees if tree is not None]
        return sorted(found, key=lambda one: -sum(item.seconds for item in one[1]) / (1 + _tokens(one[0].outside())))

    def _move(self, trees: Collection[Item], class_: str) -> None:
        """Make a family of these trees, which begins in a class, with states of its own above them."""
        self._num_families += 1
        family = -self._num_families
        self._placing.queue.shares.move(trees, family, class_)
        inside = {state for item in trees for state in _made(item)}
        copies: dict[State, State] = {}
        for item in trees:
            item.family = family
            state = item.resume
            if state is not None and state not in inside:
                item.resume = self._copy(state, family, copies)
                item.resume.readers.add(item)
                state.readers.discard(item)
                self._states.release_unwanted(state)
            for made in _made(item):
                made.family, made.parent = family, item.resume

    def _copy(self, state: State, family: int, copies: dict[State, State]) -> State:
        """The same state and those above it, which nobody has made yet."""
        if state not in copies:
            parent = None if state.parent is None else self._copy(state.parent, family, copies)
            copies[state] = State(state.key, state.position, state.origin, family, 0, None, parent)
        return copies[state]


def _tree(group: Group, waiting: Set[Group]) -> set[Item] | None:
    """A ready group and everything that resumes from what it makes; None if some of that has begun, or makes a lost
    state again that others may read."""
    found, left = set[Item](), list(group.items)
    while left:
        item = left.pop()
        if item in found:
            continue
        if item.above is not None or not (item.group in (None, group) or item.group in waiting):
            return None
        found.add(item)
        for state in _made(item):
            left += state.readers
        left += item.group.items if item.group is not None else ()
    return found


def _tokens(states: Iterable[State]) -> int:
    """Tokens to compute for these states, each by a request that finds none of the others."""
    return sum(state.position for state in states)


def _made(item: Item) -> list[State]:
    return [state for state in item.keeps.values() if state.maker is item]
