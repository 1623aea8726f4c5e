"""A window: the part of the input that is read ahead and planned together.

Must not know: how a plan is made. Invariants: whether a request belongs to a window depends only on the requests before
it, so `plan` and `tune-block-size` see the same windows as `run`; the requests of one line stay together.
"""

from __future__ import annotations

from apcbatch.config import Config
from apcbatch.prefix import TokenArray, as_token_array
from apcbatch.types import Request

REQUEST_TOKENS = 256  # what a request counts for beside its tokens: it takes about 1 KiB, a token 4 bytes


class Window:
    """Takes requests until they come from --window conversations or hold --window-tokens tokens. Turns that share one
    array of tokens count it once."""

    def __init__(self, config: Config) -> None:
        self._max_lines, self._max_tokens = config.window, config.window_tokens
        self._num_lines = self._num_tokens = 0
        self._line = 0
        self._latest: TokenArray | None = None

    def takes(self, request: Request) -> bool:
        """Whether a request belongs to this window; if so, count it."""
        line = request.tag.ticket.line
        if line != self._line:
            if self._num_lines >= self._max_lines or self._num_tokens >= self._max_tokens:
                return False
            self._line, self._num_lines = line, self._num_lines + 1
        tokens = as_token_array(request.token_ids)
        whole = tokens if tokens.base is None else tokens.base
        if whole is not self._latest:
            self._latest = whole
            self._num_tokens += len(whole)
        self._num_tokens += REQUEST_TOKENS
        return True


def windows_note(num_windows: int, config: Config) -> str | None:
    """The sentence that tells the reader of a forecast about windows, if there is more than one: a forecast plans the
    whole input at once."""
    if num_windows < 2:
        return None
    return (
        f"`run` plans this input in {num_windows} windows, each of at most --window {config.window:,} conversations "
        f"and --window-tokens {config.window_tokens:,}; it finds what is predicted here with larger ones"
    )
