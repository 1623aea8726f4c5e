"""A group of requests as a unit for one worker: the plan as that worker alone sees it.

Must not know: how units are chosen, the seam. Invariants: a request resumes where the plan says wherever its state can
be had; a state that cannot be had is computed once, by the first request of the unit that needs it; a snapshot that
nobody reads is not kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from apcbatch.cluster.items import Group, Item, State
from apcbatch.plan.footprint import Footprint
from apcbatch.types import RequestPlan


@dataclass
class LocalPlan:
    """plans: of the group's requests. imports: what must come along. exports: what others read."""

    plans: list[RequestPlan | None] = field(default_factory=list)
    imports: dict[State, None] = field(default_factory=dict)  # in the order of their readers
    exports: set[State] = field(default_factory=set)


@dataclass(slots=True)
class _Piece:
    """resume_at, keeps: as the unit alone has them. reads: of each that it keeps, how many in the unit resume from it.
    source: where it resumes."""

    resume_at: int
    source: State | None
    keeps: dict[int, State]
    reads: dict[int, int] = field(default_factory=dict)


def localise(group: Group, footprint: Footprint, is_worth_sending: Callable[[State, State | None], bool]) -> LocalPlan:
    """The local plan of a group whose states are there or made by it.

    is_worth_sending: whether to send a state rather than to compute it again from the one above it, which may be None.
    """
    local, made, pieces = LocalPlan(), dict[State, int](), list[_Piece | None]()
    for index, item in enumerate(group.items):
        if item.plan is None:
            pieces.append(None)
            continue
        piece = _resumed(item, local, made, pieces, is_worth_sending)
        for position, state in item.keeps.items():
            if state.maker is item:
                piece.keeps[position] = state
        for state in piece.keeps.values():
            made.setdefault(state, index)
        pieces.append(piece)
    members = set(group.items)
    local.exports = {state for state in made if state.handle is None and (state.unseen or not state.readers <= members)}
    _write_plans(group, footprint, local, pieces)
    return local


def _resumed(
    item: Item,
    local: LocalPlan,
    made: dict[State, int],
    pieces: list[_Piece | None],
    is_worth_sending: Callable[[State, State | None], bool],
) -> _Piece:
    """Where a request resumes in its unit."""
    state = item.resume
    if state is None:
        if item.above is None:
            return _Piece(item.plan.resume_at if item.plan else 0, None, {})
        return _again(item.above, local, is_worth_sending, {})
    if state in made:
        maker = pieces[made[state]]
        assert maker is not None, "only a request with a plan makes a state"
        maker.reads[state.position] = maker.reads.get(state.position, 0) + 1
        return _Piece(state.position, state, {})
    if state in local.imports or (state.handle is not None and is_worth_sending(state, state.nearest_held())):
        local.imports[state] = None
        return _Piece(state.position, state, {})
    return _again(state, local, is_worth_sending, {state.position: state})


def _again(
    state: State,
    local: LocalPlan,
    is_worth_sending: Callable[[State, State | None], bool],
    keeps: dict[int, State],
) -> _Piece:
    """A request that computes a state again, from the nearest one above it that is worth sending."""
    above = state.nearest_held()
    while above is not None and above not in local.imports and not is_worth_sending(above, above.nearest_held()):
        above = above.nearest_held()
    if above is None:
        return _Piece(0, None, keeps)
    local.imports[above] = None
    return _Piece(above.position, above, keeps)


def _write_plans(group: Group, footprint: Footprint, local: LocalPlan, pieces: list[_Piece | None]) -> None:
    left: dict[State, int] = {}  # readers in the unit, of what is live
    for piece in pieces:
        if piece is not None and piece.source is not None:
            left[piece.source] = left.get(piece.source, 0) + 1
    live = sum(footprint.pool_bytes(state.position) for state in local.imports)
    for item, piece in zip(group.items, pieces, strict=True):
        if item.plan is None or piece is None:
            local.plans.append(None)
            continue
        kept = {
            position: state
            for position, state in sorted(piece.keeps.items())
            if piece.reads.get(position) or state in local.exports
        }
        keep_bytes = sum(footprint.pool_bytes(position) for position in kept)
        as_planned = piece.resume_at == item.plan.resume_at
        local.plans.append(
            replace(
                item.plan,
                resume_at=piece.resume_at,
                keep=tuple(kept),
                reads=tuple(piece.reads.get(position, 0) for position in kept),
                live_bytes=min(live, item.plan.live_bytes) if as_planned else live,
                keep_bytes=min(keep_bytes, item.plan.keep_bytes) if as_planned else keep_bytes,
            )
        )
        live += keep_bytes
        if piece.source is not None:
            left[piece.source] -= 1
            if not left[piece.source]:
                live -= footprint.pool_bytes(piece.source.position)
