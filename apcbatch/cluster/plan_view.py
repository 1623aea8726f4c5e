"""Pack a group of requests as a unit for one worker, with each request's plan rewritten for that worker alone.

Invariants:
- A request resumes at the state in the run's plan if the unit makes that state or imports it.
- A snapshot without readers is not kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from apcbatch.cluster.tasks import Group, Item, State
from apcbatch.cluster.wire import Import, Key, Piece, Unit
from apcbatch.plan.footprint import Footprint
from apcbatch.types import Request, RequestPlan


@dataclass(slots=True, eq=False)
class Assignment:
    """A unit assigned to a worker.

    items: its requests, by number. exports: states not yet received from the worker. imports: states sent with the
    unit. import_bytes: total size of the imports in the worker's snapshot pool. left: number of unanswered requests.
    """

    unit: int
    group: Group
    items: dict[int, Item]
    exports: dict[Key, State]
    imports: dict[Key, State]
    import_bytes: int
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = len(self.items)


def pack(number: int, group: Group, footprint: Footprint, to_wire: Callable[[Request], Any]) -> tuple[Unit, Assignment]:
    """Pack a group as the unit `number`. Every state that the group needs must be held or be made by the group itself.

    to_wire: encodes a request.
    """
    items, members = group.items, set(group.items)
    made: dict[State, int] = {}  # index of the request that makes each state
    reads = [Counter[int]() for _ in items]  # by request: position -> readers of its snapshot there
    imports: dict[State, list[int]] = {}  # indexes of their readers
    for index, item in enumerate(items):
        state = item.resume
        if state in made:
            reads[made[state]][state.position] += 1
        elif state is not None:
            imports.setdefault(state, []).append(index)
        made |= {state: index for state in item.keeps.values() if state.maker is item}
    exports: dict[Key, State] = {}
    for state, index in made.items():
        is_read_elsewhere = state.future_readers > 0 or not state.readers <= members
        if state.handle is None and is_read_elsewhere and exports.setdefault(state.key, state) is state:
            reads[index][state.position] += 1
    plans = _plans(items, reads, imports, footprint)
    pieces = [Piece(item.number, to_wire(item.request), plan) for item, plan in zip(items, plans, strict=True)]
    wire_imports: dict[Key, Import] = {}
    for state, readers in imports.items():
        others = wire_imports[state.key].readers if state.key in wire_imports else ()  # of a State with the same key
        wire_imports[state.key] = Import(state.position, tuple(sorted((*others, *readers))))
    return Unit(number, tuple(pieces), frozenset(exports), wire_imports), Assignment(
        number,
        group,
        {item.number: item for item in items},
        exports,
        {state.key: state for state in imports},
        sum(footprint.pool_bytes(one.position) for one in wire_imports.values()),
    )


def _plans(
    items: list[Item], reads: list[Counter[int]], imports: Collection[State], footprint: Footprint
) -> Iterator[RequestPlan | None]:
    """Yield the plan of each request within the unit; None for a request without a plan.

    reads: by request, position -> readers of its snapshot there. imports: states sent with the unit.
    """
    readers_left = Counter(item.resume for item in items)
    live_bytes = sum(footprint.pool_bytes(state.position) for state in imports)
    for item, counts in zip(items, reads, strict=True):
        plan = item.plan
        if plan is None:
            yield None
            continue
        keep = tuple(sorted(counts))
        keep_bytes = sum(map(footprint.pool_bytes, keep))
        is_as_planned = item.resume_at == plan.resume_at
        yield replace(
            plan,
            resume_at=item.resume_at,
            keep=keep,
            reads=tuple(counts[position] for position in keep),
            live_bytes=min(live_bytes, plan.live_bytes) if is_as_planned else live_bytes,
            keep_bytes=min(keep_bytes, plan.keep_bytes) if is_as_planned else keep_bytes,
        )
        live_bytes += keep_bytes
        readers_left[item.resume] -= 1
        if item.resume is not None and not readers_left[item.resume]:
            live_bytes -= footprint.pool_bytes(item.resume.position)


def without_import(plans: list[RequestPlan | None], missing: Import) -> None:
    """Rewrite the plans of a unit whose import is missing: the first reader of the import computes the state from token
    0 and keeps it for the other readers.

    plans: by the request's index in the unit; changed in place.
    """
    first, *others = missing.readers
    plan = plans[first]
    assert plan is not None, "a reader has a plan"
    reads = dict(zip(plan.keep, plan.reads, strict=True)) | ({missing.position: len(others)} if others else {})
    keep = tuple(sorted(reads))
    plans[first] = replace(plan, resume_at=0, keep=keep, reads=tuple(reads[position] for position in keep))
