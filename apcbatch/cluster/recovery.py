"""What becomes of the requests of a worker that has ended: who may be to blame, who is given up, who goes on.

Must not know: workers, the seam, where groups wait. Invariants: a request that was not at work is not blamed; one that
was goes on with nothing beside it; only what ends a second worker so is given up. So a request that ends workers ends
two, and no other is given up with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from apcbatch.cluster.items import Group, Item
from apcbatch.errors import RequestError
from apcbatch.types import Result

MOST_DEATHS = 2


@dataclass
class Verdict:
    """guilty: requests that are given up. groups: what is to be done again."""

    guilty: list[Item] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)


def judge(units: Iterable[list[Item]], at_work: Collection[int] | None) -> Verdict:
    """What to do with the unfinished requests of a worker that has ended. units: each in the plan's order. at_work: the
    numbers of those that its engine was at; None if that is not known, and then it may have been any."""
    verdict, suspects = Verdict(), list[Item]()
    for items in units:
        blamed = [item for item in items if at_work is None or item.number in at_work]
        suspects += blamed
        others = [] if at_work is None else [item for item in items if item.number not in at_work]
        if others:
            verdict.groups.append(Group(others))
    for item in suspects:
        item.deaths += 1
        if len(suspects) == 1 and item.deaths >= MOST_DEATHS:
            verdict.guilty.append(item)
        else:
            verdict.groups.append(Group([item], is_alone=True))
    return verdict


def worker_lost(item: Item, reason: str) -> Result:
    """The result of a request that is given up. reason: how the last worker ended."""
    message = (
        f"{item.deaths} workers ended while they were at this request, the last one with nothing beside it ({reason}); "
        "the other requests go on. Give the workers more memory and --retry-errors, or leave it out"
    )
    request = item.request
    return Result(id=request.id, prompt_tokens=len(request.token_ids), error=RequestError("worker_lost", message))
