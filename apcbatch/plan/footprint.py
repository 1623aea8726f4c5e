"""Bytes of live snapshots: states, and the KV pages that snapshots of one path share.

Example with pages of 64 tokens: a request keeps snapshots at 100 and 200. They take 2 states and 4 pages, as the first
2 pages belong to both. Another request resumes from 100 and keeps a snapshot at 180. It shares the 1 full page before
100 and fills 2 pages of its own, so the three snapshots take 3 states and 6 pages.

Invariant: a page is counted once, however many snapshots refer to it, as in the pool. A request shares the full pages
of the snapshot that it resumed from and fills its own pages after them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from apcbatch.layout import PAGE_TOKENS, StateLayout


@dataclass(frozen=True)
class Footprint:
    """Sizes of snapshots in bytes. state_bytes: recurrent states and convolution tails of one snapshot. kv_token_bytes:
    KV of one token, 0 for a model without attention, in pages of page_tokens."""

    state_bytes: int
    kv_token_bytes: int = 0
    page_tokens: int = PAGE_TOKENS

    def __post_init__(self) -> None:
        if self.state_bytes < 1 or self.kv_token_bytes < 0 or self.page_tokens < 1:
            raise ValueError(f"{self} has no weight; expected a state of at least 1 byte and pages of 1 token")

    @classmethod
    def of(cls, layout: StateLayout) -> Footprint:
        return cls(layout.slot_bytes, layout.token_bytes)

    def snapshot_bytes(self, tokens: int) -> int:
        """Return the bytes of a snapshot with the KV of `tokens` tokens, those since its nearest kept ancestor."""
        return self.state_bytes + self.kv_token_bytes * tokens

    def pool_bytes(self, position: int) -> int:
        """Return the bytes of a snapshot at a position that shares no page with another one."""
        return self.state_bytes + -(-position // self.page_tokens) * self.page_bytes

    @property
    def page_bytes(self) -> int:
        return self.kv_token_bytes * self.page_tokens


@dataclass(slots=True, eq=False)
class PageRun:
    """The KV pages that one request fills: from number `first` on; the pages before it belong to `parent`.

    held: end -> number of references to the pages from `first` up to page number `end`, exclusive. top: the highest key
    of `held`; `first` if `held` is empty.
    """

    parent: PageRun | None
    first: int
    top: int
    held: Counter[int] = field(default_factory=Counter)


class PageLedger:
    """Count of live snapshots and their pages."""

    def __init__(self, footprint: Footprint) -> None:
        self._footprint = footprint
        self.num_live = 0
        self._num_pages = 0

    @property
    def live_bytes(self) -> int:
        return self.num_live * self._footprint.state_bytes + self._num_pages * self._footprint.page_bytes

    def begin(self, parent: PageRun | None, resume_at: int) -> PageRun:
        """Return the pages of a request that resumes at a position. parent: the pages of the request that kept this
        snapshot; None if the new request shares no page (it resumes from nothing, or from the store)."""
        first = resume_at // self._footprint.page_tokens if parent is not None else 0
        return PageRun(parent, first, first)

    def hold(self, run: PageRun, position: int) -> None:
        """Count a snapshot at a position; the request of these pages computed it."""
        self.num_live += 1
        if self._footprint.kv_token_bytes:
            self._add_reference(run, -(-position // self._footprint.page_tokens))

    def release(self, run: PageRun, position: int) -> None:
        """Undo `hold`."""
        self.num_live -= 1
        if self._footprint.kv_token_bytes:
            self._remove_reference(run, -(-position // self._footprint.page_tokens))

    def _add_reference(self, run: PageRun, pages: int) -> None:
        """Count one more reference; the first one to a run of pages also refers to its parent's pages."""
        while True:
            idle = not run.held
            run.held[pages] += 1
            self._num_pages += max(0, pages - run.top)
            run.top = max(run.top, pages)
            if not idle or run.parent is None or not run.first:
                return
            run, pages = run.parent, run.first

    def _remove_reference(self, run: PageRun, pages: int) -> None:
        while True:
            run.held[pages] -= 1
            if not run.held[pages]:
                del run.held[pages]
                top = max(run.held, default=run.first)
                self._num_pages -= run.top - top
                run.top = top
            if run.held or run.parent is None or not run.first:
                return
            run, pages = run.parent, run.first
