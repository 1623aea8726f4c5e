"""Which class of workers begins which root: each gets work by what it can do.

Must not know: units, workers. Invariant: a family, which is everything under one root, belongs to one class at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from apcbatch.cluster.items import Group, Item


class Shares:
    """capacities: by class, what its workers do in a second, in any unit; kept up to date by the driver."""

    def __init__(self) -> None:
        self.capacities: Mapping[str, float] = {}
        self._class_of: dict[int, str] = {}
        self._left_s: dict[int, float] = {}  # by family: estimated seconds of what is not done
        self._load_s: dict[str, float] = {}  # by class: of its families

    def class_of(self, group: Group) -> str | None:
        """The class that a group belongs to; None if it may begin anywhere."""
        return self._class_of.get(group.items[0].family)

    def may_have(self, group: Group, class_: str) -> bool:
        """Whether a group is for workers of a class: it belongs to it, or to none and no other class would be done with
        its families sooner."""
        if (owner := self.class_of(group)) is not None:
            return owner == class_
        if len(self.capacities) < 2:
            return True
        seconds = sum(self._left_s.get(family, 0.0) for family in {item.family for item in group.items})
        ends = {one: (self._load_s.get(one, 0.0) + seconds) / can for one, can in self.capacities.items()}
        return ends.get(class_, float("inf")) <= min(ends.values())

    def begin(self, group: Group, class_: str) -> None:
        """The families of a group belong to a class from now on."""
        for item in group.items:
            if item.family not in self._class_of:
                self._class_of[item.family] = class_
                self._add_load(class_, self._left_s.get(item.family, 0.0))

    def add(self, items: Iterable[Item]) -> None:
        """There is more to do."""
        for item in items:
            self._left_s[item.family] = self._left_s.get(item.family, 0.0) + item.seconds
            self._add_load(self._class_of.get(item.family), item.seconds)

    def done(self, item: Item) -> None:
        """A request has ended."""
        self._left_s[item.family] = self._left_s.get(item.family, 0.0) - item.seconds
        self._add_load(self._class_of.get(item.family), -item.seconds)

    def classes(self) -> set[str]:
        """Those that have begun anything."""
        return set(self._load_s)

    def forget_class(self, class_: str) -> set[int]:
        """No worker of a class is left: its families may begin anywhere. Returns them."""
        families = {family for family, of in self._class_of.items() if of == class_}
        for family in families:
            del self._class_of[family]
        self._load_s.pop(class_, None)
        return families

    def _add_load(self, class_: str | None, seconds: float) -> None:
        if class_ is not None:
            self._load_s[class_] = self._load_s.get(class_, 0.0) + seconds
