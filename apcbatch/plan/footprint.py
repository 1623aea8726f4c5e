"""What live snapshots weigh: states, and the KV pages that snapshots of one path share.

An example with pages of 64 tokens: a request keeps 100 and 200, which weigh 2 states and 4 pages, for the first two
pages are in both. Another one resumes from 100 and keeps 180: it shares the one full page and fills 2 more, so that
together they weigh 3 states and 6 pages.

Must not know: the tree, why a snapshot is kept. Invariant: a page is counted once, however many snapshots refer to it,
as in the pool: a request shares the full pages of the snapshot that it resumed from and has its own from there on.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from apcbatch.layout import PAGE_TOKENS, StateLayout


@dataclass(frozen=True)
class Footprint:
    """state_bytes: the recurrent states and convolution tails of one snapshot. kv_token_bytes: the KV of one
    token, 0 for a model without attention; kept in pages of page_tokens."""

    state_bytes: int
    kv_token_bytes: int = 0
    page_tokens: int = PAGE_TOKENS

    def __post_init__(self) -> None:
        if self.state_bytes < 1 or self.kv_token_bytes < 0 or self.page_tokens < 1:
            raise ValueError(f"{self} has no weight; expected a state of at least 1 byte and pages of 1 token")

    @classmethod
    def of(cls, layout: StateLayout) -> Footprint:
        """What the snapshots of a model with this layout weigh."""
        return cls(layout.slot_bytes, layout.token_bytes)

    def snapshot_bytes(self, tokens: int) -> int:
        """A snapshot that has the KV of so many tokens: those after its nearest kept ancestor."""
        return self.state_bytes + self.kv_token_bytes * tokens

    def pool_bytes(self, position: int) -> int:
        """A snapshot at a position that shares no page with another one."""
        return self.state_bytes + -(-position // self.page_tokens) * self.page_bytes

    @property
    def page_bytes(self) -> int:
        return self.kv_token_bytes * self.page_tokens


@dataclass(slots=True, eq=False)
class Segment:
    """The pages that one request fills: those from number `first` on; the ones before are its parent's.

    held: how often the pages up to a number are referred to. top: the highest of these numbers, `first` for
    none.
    """

    parent: Segment | None
    first: int
    top: int
    held: Counter[int] = field(default_factory=Counter)


class Ledger:
    """Counts the snapshots that are held now: num_live, live_bytes."""

    def __init__(self, footprint: Footprint) -> None:
        self._footprint = footprint
        self.num_live = 0
        self._num_pages = 0

    @property
    def live_bytes(self) -> int:
        return self.num_live * self._footprint.state_bytes + self._num_pages * self._footprint.page_bytes

    def begin(self, parent: Segment | None, resume_at: int) -> Segment:
        """The pages of a request that resumes at a position. parent: those of the request which kept that
        snapshot; None if the new request has all its pages for itself (it resumes from nothing, or from the
        store)."""
        first = resume_at // self._footprint.page_tokens if parent is not None else 0
        return Segment(parent, first, first)

    def hold(self, segment: Segment, position: int) -> None:
        """A snapshot at a position that the segment's request computed is live from now on."""
        self.num_live += 1
        if self._footprint.kv_token_bytes:
            self._refer(segment, -(-position // self._footprint.page_tokens))

    def release(self, segment: Segment, position: int) -> None:
        """Take back what `hold` did."""
        self.num_live -= 1
        if self._footprint.kv_token_bytes:
            self._let_go(segment, -(-position // self._footprint.page_tokens))

    def _refer(self, segment: Segment, pages: int) -> None:
        """A segment that anything refers to refers to its parent's pages once."""
        while True:
            idle = not segment.held
            segment.held[pages] += 1
            self._num_pages += max(0, pages - segment.top)
            segment.top = max(segment.top, pages)
            if not idle or segment.parent is None or not segment.first:
                return
            segment, pages = segment.parent, segment.first

    def _let_go(self, segment: Segment, pages: int) -> None:
        while True:
            segment.held[pages] -= 1
            if not segment.held[pages]:
                del segment.held[pages]
                top = max(segment.held, default=segment.first)
                self._num_pages -= segment.top - top
                segment.top = top
            if segment.held or segment.parent is None or not segment.first:
                return
            segment, pages = segment.parent, segment.first
