"""What a plan keeps for requests of this run: each snapshot with its owner and its readers, and where
requests resume.

Must not know: tokens, policies. The exact plan when memory is no limit; see rationing.py for the other case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from apcbatch.plan.footprint import Footprint, Ledger, Segment
from apcbatch.plan.reach import NOWHERE, Held, Owners, Place, Reach
from apcbatch.plan.tree_shape import TreeShape


@dataclass(slots=True, eq=False)
class Kept:
    """One snapshot from the request that computes it to the last one that resumes from it.

    owner: the request that computes it. readers: those that resume from it, in the order of the work.
    """

    place: Place
    owner: int
    readers: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Keeping:
    """kept: every snapshot that is read, each at least once. source: by request, the place it resumes from.
    from_kept: by request, the snapshot of `kept` that it resumes from; None for nothing, or a position that
    was held before."""

    kept: list[Kept]
    source: list[Place]
    from_kept: list[Kept | None]

    def kept_by(self) -> dict[int, list[Kept]]:
        """By owner, ascending."""
        by_owner: dict[int, list[Kept]] = {}
        for snapshot in sorted(self.kept, key=lambda snapshot: snapshot.place[1]):
            by_owner.setdefault(snapshot.owner, []).append(snapshot)
        return by_owner

    def owners(self, shape: TreeShape, order: Sequence[int]) -> Owners:
        """Who computes what first when requests resume where this says."""
        owners = Owners(shape)
        for index in order:
            owners.record(index, self.source[index][1])
        return owners

    @property
    def num_held_read(self) -> int:
        """Distinct places that were held before and are read."""
        pairs = zip(self.source, self.from_kept, strict=True)
        return len({place for place, kept in pairs if kept is None} - {NOWHERE})


def keep_all_read(reach: Reach, owners: Owners, order: Sequence[int], held: Held) -> Keeping:
    """Keep exactly what is resumed from under policy `all`."""
    found: dict[Place, Kept] = {}
    from_kept: list[Kept | None] = [None] * len(reach.source)
    for index in order:
        place = reach.source[index]
        owner = None if place[1] in held.get(place[0], ()) else owners.owner(place)
        if owner is not None:
            snapshot = found.setdefault(place, Kept(place, owner))
            snapshot.readers.append(index)
            from_kept[index] = snapshot
    return Keeping(list(found.values()), reach.source, from_kept)


@dataclass(slots=True)
class Live:
    """What is live with one request after the other: the most at a time, and by request the bytes when it begins
    and those that it adds. peak_* leave out what was held before; its bytes in the pool are part of what a request
    that resumes from it adds."""

    live_bytes: list[int]
    keep_bytes: list[int]
    peak_snapshots: int = 0
    peak_bytes: int = 0


def measure_live(keeping: Keeping, order: Sequence[int], footprint: Footprint) -> Live:
    """Play the plan through, one request after the other.

    A request's new snapshots are written while the one it resumed from is still there.
    """
    ledger, live = Ledger(footprint), Live([0] * len(keeping.source), [0] * len(keeping.source))
    kept_by = keeping.kept_by()
    segments: dict[int, Segment] = {}
    for index in order:
        start, resume_at = keeping.from_kept[index], keeping.source[index][1]
        own = kept_by.get(index, ())
        live.live_bytes[index] = ledger.live_bytes
        if own:
            parent = segments[start.owner] if start is not None else None
            segments[index] = ledger.begin(parent, resume_at)
        for snapshot in own:
            ledger.hold(segments[index], snapshot.place[1])
        live.keep_bytes[index] = ledger.live_bytes - live.live_bytes[index]
        live.peak_snapshots = max(live.peak_snapshots, ledger.num_live)
        live.peak_bytes = max(live.peak_bytes, ledger.live_bytes)
        if start is None and resume_at:
            live.keep_bytes[index] += footprint.pool_bytes(resume_at)
        elif start is not None and start.readers[-1] == index:
            ledger.release(segments[start.owner], start.place[1])
    return live
