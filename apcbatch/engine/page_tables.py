"""KV pages of live sequences, from admission to their end.

A sequence is admitted with the pages of its prompt and of RESERVED_TOKENS new tokens. Later ones are allocated as its
answer grows.

Invariant: a partly filled page has one sequence, which alone writes to it. So a snapshot's full pages are shared, and
its last page is copied.
"""

from __future__ import annotations

import numpy as np

from apcbatch.engine.pool import NO_PAGES, PageArray, PagePool, Snapshot, SnapshotPool
from apcbatch.engine.sequence import Sequence
from apcbatch.layout import PAGE_TOKENS
from apcbatch.model.pipeline_arena import Arena

RESERVED_TOKENS = 128  # new tokens whose pages a sequence gets when it is admitted


class PageTables:
    """Page tables of sequences. A model without attention has no pages, and every count is 0."""

    def __init__(self, pages: PagePool, pool: SnapshotPool, arena: Arena, has_kv: bool) -> None:
        self._pages, self._pool, self._arena, self._has_kv = pages, pool, arena, has_kv

    def fits(self, sequence: Sequence) -> bool:
        """Return whether a sequence can run to its end if it runs alone."""
        return self._with_copies(sequence, sequence.limit) <= self._pages.num_pages

    def needed_to_start(self, sequence: Sequence) -> int:
        """Return the pages that must be free to admit a sequence."""
        return self._with_copies(sequence, _reserved_end(sequence))

    def needed_by_fork(self, sequence: Sequence) -> int:
        """Return the pages that must be free to begin an answer besides its prompt's full pages, which all answers
        share."""
        return self.needed(_reserved_end(sequence)) - self.needed(sequence.num_prompt // PAGE_TOKENS * PAGE_TOKENS)

    def _with_copies(self, sequence: Sequence, end: int) -> int:
        """Return the pages of a sequence's first `end` tokens, and of copies: of the last page of a snapshot that it
        starts from and, with several answers, of the prompt's last page for one answer."""
        copied = sequence.will_fork and self.needed(sequence.num_prompt) > sequence.num_prompt // PAGE_TOKENS
        return self.needed(end) + copied + self._has_kv

    def free(self, needed: int, awaited: bool) -> bool:
        """Drop snapshots until `needed` pages are free, awaited ones only if `awaited`. Return False if that is
        impossible; if there are fewer pages in all, nothing is dropped."""
        if needed > self._pages.num_pages:
            return False
        while self._pages.num_free < needed:
            if not self._pool.drop_one(awaited):
                return False
        return True

    def free_for_running(self, needed: int, alone: bool) -> bool:
        """Free `needed` pages for running sequences, as `free` does. alone: whether nothing runs, so that awaited
        snapshots may be dropped too. Otherwise return False as well if running sequences would hold more than the
        pool's size in pages that no snapshot has."""
        own = self._pages.num_pages - self._pages.num_free - self._pool.num_pages
        return (alone or own + needed <= self._pages.num_pages // 2 + 1) and self.free(needed, awaited=alone)

    def missing(self, sequence: Sequence, end: int) -> int:
        """Return how many pages a sequence lacks for its tokens up to `end`."""
        return max(0, self.needed(end) - len(sequence.pages))

    def extend(self, sequence: Sequence, end: int) -> None:
        """Allocate the pages that a sequence lacks for its tokens up to `end`."""
        missing = self.missing(sequence, end)
        if missing:
            added = [self._pages.allocate() for _ in range(missing)]
            sequence.pages = np.concatenate([sequence.pages, np.array(added, np.int64)])

    def reserve(self, sequence: Sequence) -> None:
        """Allocate the pages that a sequence is admitted with."""
        self.extend(sequence, _reserved_end(sequence))

    def trim(self, state: Snapshot) -> None:
        """Free the pages of a state beyond its tokens."""
        count = self.needed(state.position)
        self._pages.release(state.pages[count:])
        state.pages = state.pages[:count]

    def adopt(self, sequence: Sequence, snapshot: Snapshot) -> None:
        """Start a sequence on a snapshot's pages: references to the full ones, and a copy of a partly filled last
        one."""
        if not len(snapshot.pages):
            return
        pages: PageArray = snapshot.pages.copy()
        full = snapshot.position // PAGE_TOKENS
        self._pages.share(pages[:full])
        if full < len(pages):
            pages[full] = self._pages.allocate()
            self._arena.copy_page(int(snapshot.pages[full]), int(pages[full]))
        sequence.pages = pages

    def covering(self, sequence: Sequence, position: int) -> PageArray:
        """Return the pages of a sequence's first `position` tokens."""
        return sequence.pages[: self.needed(position)]

    def release(self, holder: Sequence | Snapshot) -> None:
        """Drop the page references of a sequence that does not run any more, or of a state that no fork starts from."""
        self._pages.release(holder.pages)
        holder.pages = NO_PAGES

    def needed(self, tokens: int) -> int:
        """Return the number of pages for a number of tokens."""
        return -(-tokens // PAGE_TOKENS) if self._has_kv else 0


def _reserved_end(sequence: Sequence) -> int:
    """Return the tokens whose pages a sequence is admitted with."""
    return min(sequence.limit, sequence.num_tokens + RESERVED_TOKENS)
