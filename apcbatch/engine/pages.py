"""KV pages and who refers to them: counts only.

Must not know: tensors, keys. A page is shared by sequences and snapshots; it is free when nobody refers to it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

PageArray = npt.NDArray[np.int64]
NO_PAGES: PageArray = np.empty(0, np.int64)


class PagePool:
    """Reference counts of `num_pages` pages."""

    def __init__(self, num_pages: int) -> None:
        self._refs = np.zeros(num_pages, np.int32)
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Pages that nobody refers to."""
        return len(self._free)

    def allocate(self) -> int:
        """A free page with one reference; IndexError where there is none (callers reserve first)."""
        page = self._free.pop()
        self._refs[page] = 1
        return page

    def share(self, pages: PageArray) -> None:
        """Add one reference to each page."""
        self._refs[pages] += 1

    def release(self, pages: PageArray) -> int:
        """Drop one reference to each page; returns how many became free."""
        self._refs[pages] -= 1
        freed = pages[self._refs[pages] == 0]
        self._free.extend(freed.tolist())
        return len(freed)
