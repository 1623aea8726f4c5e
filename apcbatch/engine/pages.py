"""KV pages and who refers to them: counts only.

Must not know: tensors, keys. A page is shared by sequences and snapshots; it is free when nobody refers to it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

PageArray = npt.NDArray[np.int64]
NO_PAGES: PageArray = np.empty(0, np.int64)


class PagePool:
    """Reference counts of `num_pages` pages. A page that was never used costs no memory."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._refs = np.zeros(num_pages, np.int32)
        self._freed: list[int] = []
        self._num_used = 0  # pages from here on were never allocated

    @property
    def num_free(self) -> int:
        """Pages that nobody refers to."""
        return len(self._freed) + self.num_pages - self._num_used

    def allocate(self) -> int:
        """A free page with one reference; IndexError if there is none (callers make sure that there is)."""
        if self._freed:
            page = self._freed.pop()
        elif self._num_used < self.num_pages:
            page, self._num_used = self._num_used, self._num_used + 1
        else:
            raise IndexError("no page is free")
        self._refs[page] = 1
        return page

    def share(self, pages: PageArray) -> None:
        """Add one reference to each page."""
        self._refs[pages] += 1

    def release(self, pages: PageArray) -> int:
        """Drop one reference to each page; returns how many became free."""
        self._refs[pages] -= 1
        freed = pages[self._refs[pages] == 0]
        self._freed.extend(freed.tolist())
        return len(freed)
