"""Shares: each class of workers begins as much as it can do, and a family stays with its class."""

from __future__ import annotations

import random

import pytest

from apcbatch.cluster.items import Group, Item
from apcbatch.cluster.shares import Shares
from apcbatch.types import Request


def group(family: int, seconds: list[float]) -> Group:
    items = []
    for index, one in enumerate(seconds):
        item = Item(1000 * family + index, Request("", [1]), family)
        item.seconds = one
        items.append(item)
    return Group(items)


@pytest.mark.parametrize("seed", range(8))
def test_classes_get_work_by_what_they_can_do(seed: int) -> None:
    """Catches a slow class that is given as much as a fast one, or nothing."""
    source, shares = random.Random(seed), Shares()
    shares.capacities = {"cpu": 1.0, "gpu": source.uniform(2, 6)}
    given = dict.fromkeys(shares.capacities, 0.0)
    groups = [group(family, [source.uniform(0.5, 2) for _ in range(3)]) for family in range(200)]
    for one in groups:
        shares.add(one.items)
    for one in groups:
        takers = [class_ for class_ in source.sample(["cpu", "gpu"], 2) if shares.may_have(one, class_)]
        assert takers, "a group that nobody may begin"
        shares.begin(one, takers[0])
        given[takers[0]] += one.seconds
    assert given["gpu"] / given["cpu"] == pytest.approx(shares.capacities["gpu"], rel=0.1)


def test_a_family_stays_with_its_class() -> None:
    """Catches states that would have to cross classes, also for requests that come later."""
    shares = Shares()
    shares.capacities = {"cpu": 1.0, "gpu": 1.0}
    first, later = group(7, [1.0]), group(7, [1.0])
    shares.add(first.items)
    shares.begin(first, "cpu")
    shares.add(later.items)
    assert shares.may_have(later, "cpu") and not shares.may_have(later, "gpu")
    shares.begin(later, "gpu")
    assert shares.class_of(later) == "cpu"


def test_what_is_done_makes_room() -> None:
    """Catches work that counts after it is done: the class that has ended its share begins the next."""
    shares = Shares()
    shares.capacities = {"a": 1.0, "b": 1.0}
    one, two, next_ = group(1, [5.0]), group(2, [4.0]), group(3, [1.0])
    for each, class_ in ((one, "a"), (two, "b")):
        shares.add(each.items)
        shares.begin(each, class_)
    shares.add(next_.items)
    assert not shares.may_have(next_, "a") and shares.may_have(next_, "b")
    shares.done(one.items[0])
    assert shares.may_have(next_, "a") and not shares.may_have(next_, "b")


def test_a_class_that_is_gone_leaves_its_families() -> None:
    """Catches families that wait for workers of a class of which none is left."""
    shares = Shares()
    shares.capacities = {"a": 1.0, "b": 1.0}
    one, other = group(1, [1.0]), group(2, [1.0])
    for each, class_ in ((one, "a"), (other, "b")):
        shares.add(each.items)
        shares.begin(each, class_)
    assert shares.classes() == {"a", "b"} and shares.forget_class("a") == {1}
    shares.capacities = {"b": 1.0}
    assert shares.class_of(one) is None and shares.may_have(one, "b") and shares.classes() == {"b"}


def test_one_class_alone_begins_everything() -> None:
    """Catches a lone class that waits for one that is not there."""
    shares = Shares()
    shares.capacities = {"only": 2.0}
    assert shares.may_have(group(1, [100.0]), "only")
