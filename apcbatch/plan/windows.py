"""Cut the requests of an input into windows, each with the first requests after it.

A window has whole lines, and ends with the line that reaches its limit: FIRST_TOKENS for the first window, so that an
engine begins soon, and the bound for each later one. It is complete once the lines after it, which tell what it should
hand on, have reached AHEAD_TOKENS. Tokens that requests share count once, and each request counts as REQUEST_TOKENS
more. Invariant: where a window ends depends on the requests and the bound alone.

Example with a bound of 100, if a request counted as 10: lines of one request with 60, 60 and 60 tokens, of which the
first 40 are shared by all. The first line counts 70, the second 20 + 10: the window has both. The third begins the next
window, in which it counts 70.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from apcbatch.plan.prefix_tree import PrefixTree
from apcbatch.prefix import TokenArray

T = TypeVar("T")

REQUEST_TOKENS = 128  # a short request takes 1.8 KB while its window is planned, and each further token 20 bytes
FIRST_TOKENS = 1 << 14
AHEAD_TOKENS = 1 << 16


@dataclass(frozen=True)
class Window(Generic[T]):
    """A window and what is known of the next one. tree: the prompts of all requests. items: by request. num_requests:
    requests of the window; the others are ahead."""

    tree: PrefixTree
    items: list[T]
    num_requests: int


class Windows(Generic[T]):
    """Cuts requests into windows. max_tokens: bound of a window. has_small_first: the first one ends at FIRST_TOKENS.
    is_complete: `take` returns a window that does not depend on further requests."""

    def __init__(self, max_tokens: int, has_small_first: bool = True) -> None:
        self._max_tokens = max_tokens
        self._limit = min(FIRST_TOKENS, max_tokens) if has_small_first else max_tokens
        self._begin()

    def _begin(self) -> None:
        self._tree, self._items = PrefixTree(), list[T]()
        self._num_requests: int | None = None  # of the window; None until it ends
        self._line = 0  # the latest one
        self._ahead_from = 0  # what the window itself counts
        self.is_complete = False

    def __len__(self) -> int:
        """Return the number of requests that are in no window yet."""
        return len(self._items)

    def add(self, item: T, line: int, tokens: TokenArray, resumable: int) -> None:
        """Add a request. line: its input line, ascending. tokens: its prompt, (tokens,) int32. resumable: as in
        PrefixTree.add."""
        if line != self._line:
            self._line, cost = line, self._tree.unique_tokens + REQUEST_TOKENS * len(self._items)
            if self._num_requests is None and cost >= self._limit:
                self._num_requests, self._ahead_from = len(self._items), cost
            elif self._num_requests is not None and cost - self._ahead_from >= min(AHEAD_TOKENS, self._max_tokens):
                self.is_complete = True
        self._tree.add(tokens, line, resumable)
        self._items.append(item)

    def take(self) -> Window[T]:
        """Return the next window: the first one that is complete, or what is left at the end of the input."""
        tree, items = self._tree, self._items
        window = Window(tree, items, len(items) if self._num_requests is None else self._num_requests)
        tree.finish()
        self._limit = self._max_tokens
        self._begin()
        for index in range(window.num_requests, len(items)):
            tokens = tree.path_tokens(tree.end_node[index])
            self.add(items[index], tree.conversation[index], tokens, tree.resumable[index])
        return window
