"""A plan cut into units by plain Python: runs of the plan's order, with what crosses them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from apcbatch.cluster.wire import Import, Key, Piece, Unit, encode_request
from apcbatch.plan.planner import Plan
from apcbatch.prefix import prefix_key
from apcbatch.types import Request


def cut(requests: Sequence[Request], plan: Plan, fingerprint: bytes, source: random.Random) -> list[Unit]:
    """The units of a plan; requests by index. Each unit has 1 to 4 requests."""

    def key_at(index: int, position: int) -> Key:
        return prefix_key(fingerprint, requests[index].token_ids, position)

    groups: list[list[int]] = []
    left = list(plan.order)
    while left:
        count = source.randint(1, 4)
        groups.append(left[:count])
        left = left[count:]
    group_of = {index: number for number, group in enumerate(groups) for index in group}
    units = []
    for number, group in enumerate(groups):
        pieces, exports, imports = [], set(), {}
        for place, index in enumerate(group):
            todo, leader, reads = plan.requests[index], plan.leaders[index], []
            if leader is not None and group_of[leader] != number:
                key = key_at(index, todo.resume_at)
                readers = imports[key].readers if key in imports else ()
                imports[key] = Import(todo.resume_at, (*readers, place))
            for position in todo.keep:
                readers = [
                    other for other in plan.order
                    if plan.leaders[other] == index and plan.requests[other].resume_at == position
                ]  # fmt: skip
                here = [other for other in readers if group_of[other] == number]
                if len(here) < len(readers):
                    exports.add(key_at(index, position))
                reads.append(len(here) + (len(here) < len(readers)))
            pieces.append(Piece(index, encode_request(requests[index]), replace(todo, reads=tuple(reads))))
        units.append(Unit(number, tuple(pieces), frozenset(exports), imports))
    return units
