"""Pack a group of requests as a unit for one worker, with each request's plan rewritten for that worker alone.

Invariants:
- A request resumes at the state in the run's plan if the unit makes that state or imports it.
- The unit imports a state only if sending it is worth its time. Any other state that the requests need is computed once
  per unit, by its first reader.
- A snapshot without readers is not kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from apcbatch.cluster.runtime import WorkerFacts
from apcbatch.cluster.tasks import Group, Item, Rates, State
from apcbatch.cluster.wire import Export, Import, Key, Piece, Unit
from apcbatch.plan.footprint import Footprint
from apcbatch.types import Request, RequestPlan


@dataclass(slots=True, eq=False)
class Assignment:
    """A unit assigned to a worker.

    items: its requests, by number. exports: states not yet received from the worker. imports: states sent with the
    unit. import_bytes: total size of the imports in the worker's snapshot pool. left: number of unanswered requests.
    begun: time at which the unit became the worker's first one. expected_s: expected run time.
    """

    unit: int
    group: Group
    items: dict[int, Item]
    exports: dict[Key, State]
    imports: dict[Key, State]
    expected_s: float
    import_bytes: int
    left: int = field(init=False)
    begun: float = 0.0

    def __post_init__(self) -> None:
        self.left = len(self.items)


def pack(
    number: int,
    group: Group,
    facts: WorkerFacts,
    rates: Rates,
    to_wire: Callable[[Request], Any],
    send_slack_s: float,
) -> tuple[Unit, Assignment]:
    """Pack a group as the unit `number`.

    Every state that the group needs must be held or be made by the group itself. to_wire: encodes a request.
    send_slack_s: see ClusterSettings.
    """

    def is_worth_sending(state: State, ancestor: State | None) -> bool:
        tokens = state.position - (ancestor.position if ancestor is not None else 0)
        saved_s = rates.transfer_s(state.num_bytes) - tokens * rates.prefill_s
        return facts.node in state.nodes or saved_s < send_slack_s

    planner = _UnitPlanner(group, is_worth_sending)
    plans = planner.plans(facts.footprint)
    pieces = [Piece(item.number, to_wire(item.request), plan) for item, plan in zip(group.items, plans, strict=True)]
    imports = {state.key: state for state in planner.imports}
    unit = Unit(number, tuple(pieces), planner.wire_exports(), planner.wire_imports())
    return unit, Assignment(
        number,
        group,
        {item.number: item for item in group.items},
        dict(planner.exports),
        imports,
        rates.seconds(
            sum(item.prefill_tokens for item in group.items), sum(item.max_answer_tokens for item in group.items)
        ),
        sum(facts.footprint.pool_bytes(state.position) for state in imports.values()),
    )


@dataclass(slots=True)
class _PieceDraft:
    """A request's plan within the unit, before exports are counted as readers.

    source: state that the request resumes from. keeps: states that it makes, by position. reads: position -> number of
    requests of the unit that resume there.
    """

    resume_at: int
    source: State | None
    keeps: dict[int, State]
    reads: dict[int, int] = field(default_factory=dict)


class _UnitPlanner:
    """Decides for each request of a group where it resumes and which snapshots it keeps.

    imports: states to send -> indexes of their readers. exports: states that other units read, by key.
    """

    def __init__(self, group: Group, is_worth_sending: Callable[[State, State | None], bool]) -> None:
        """is_worth_sending: (state, nearest held ancestor) -> whether to send the state rather than compute it from the
        ancestor."""
        self._items, self._is_worth_sending = group.items, is_worth_sending
        self._drafts: list[_PieceDraft | None] = []
        self._made: dict[State, int] = {}  # index of the unit's request that makes each state
        self.imports: dict[State, list[int]] = {}
        for index, item in enumerate(group.items):
            draft = self._resume(index, item) if item.plan is not None else None
            self._drafts.append(draft)
            if draft is not None:
                draft.keeps |= {position: state for position, state in item.keeps.items() if state.maker is item}
                for state in draft.keeps.values():
                    self._made.setdefault(state, index)
        members = set(group.items)
        self.exports: dict[Key, State] = {}
        for state in self._made:
            if state.handle is None and (state.future_readers or not state.readers <= members):
                self.exports.setdefault(state.key, state)

    def wire_exports(self) -> dict[Key, Export]:
        """Return each export with the number of the request that makes it."""
        return {
            key: Export(self._items[self._made[state]].number, state.position) for key, state in self.exports.items()
        }

    def wire_imports(self) -> dict[Key, Import]:
        """Return each import with the indexes of its readers."""
        found: dict[Key, Import] = {}
        for state, readers in self.imports.items():
            others = found[state.key].readers if state.key in found else ()  # of a State with the same key
            found[state.key] = Import(state.position, tuple(sorted((*others, *readers))))
        return found

    def plans(self, footprint: Footprint) -> list[RequestPlan | None]:
        """Return the plan of each request within the unit; None for a request without a plan."""
        readers_left: dict[State, int] = {}
        for draft in self._drafts:
            if draft is not None and draft.source is not None:
                readers_left[draft.source] = readers_left.get(draft.source, 0) + 1
        live_bytes = sum(footprint.pool_bytes(state.position) for state in self.imports)
        plans: list[RequestPlan | None] = []
        for index, (item, draft) in enumerate(zip(self._items, self._drafts, strict=True)):
            plan = item.plan
            if plan is None or draft is None:
                plans.append(None)
                continue
            counts = {
                position: draft.reads.get(position, 0) + self._is_exported(draft.keeps[position], index)
                for position in sorted(draft.keeps)
            }
            reads = {position: count for position, count in counts.items() if count}
            keep_bytes = sum(footprint.pool_bytes(position) for position in reads)
            as_planned = draft.resume_at == plan.resume_at
            plans.append(
                RequestPlan(
                    draft.resume_at,
                    tuple(reads),
                    tuple(reads.values()),
                    plan.keep_for_later,
                    plan.ideal,
                    min(live_bytes, plan.live_bytes) if as_planned else live_bytes,
                    min(keep_bytes, plan.keep_bytes) if as_planned else keep_bytes,
                    plan.is_ideal_exact,
                )
            )
            live_bytes += keep_bytes
            if draft.source is not None:
                readers_left[draft.source] -= 1
                if not readers_left[draft.source]:
                    live_bytes -= footprint.pool_bytes(draft.source.position)
        return plans

    def _is_exported(self, state: State, index: int) -> bool:
        return self.exports.get(state.key) is state and self._made[state] == index

    def _resume(self, index: int, item: Item) -> _PieceDraft:
        """Decide where a request resumes: at a state made in this unit, at an import, or, without a state, where its
        plan says. If the request must compute its state again, see _recompute."""
        state = item.resume
        if state is None:
            if item.remakes is None:
                return _PieceDraft(item.plan.resume_at if item.plan else 0, None, {})
            return self._recompute(index, item.remakes, {})
        if state in self._made:
            maker = self._drafts[self._made[state]]
            assert maker is not None, "only a request with a plan makes a state"
            maker.reads[state.position] = maker.reads.get(state.position, 0) + 1
            return _PieceDraft(state.position, state, {})
        if state.handle is not None and self._is_sent(state):
            return self._import(index, state, {})
        return self._recompute(index, state, {state.position: state})

    def _recompute(self, index: int, state: State, keeps: dict[int, State]) -> _PieceDraft:
        """Plan to compute a state again from its nearest ancestor that is worth sending, else from token 0."""
        ancestor = state.nearest_held()
        while ancestor is not None and not self._is_sent(ancestor):
            ancestor = ancestor.nearest_held()
        return _PieceDraft(0, None, keeps) if ancestor is None else self._import(index, ancestor, keeps)

    def _is_sent(self, state: State) -> bool:
        return state in self.imports or self._is_worth_sending(state, state.nearest_held())

    def _import(self, index: int, state: State, keeps: dict[int, State]) -> _PieceDraft:
        self.imports.setdefault(state, []).append(index)
        return _PieceDraft(state.position, state, keeps)


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
