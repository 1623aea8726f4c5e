"""Handle Ctrl-C, SIGTERM and SIGHUP (its terminal is closed): the first one lets running requests finish, the second
stops at once.

Invariant: a stop at any moment leaves no damage for clean-up code to repair, so the second signal ends the process
immediately.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType

from apcbatch.errors import EXIT_INTERRUPTED, EXIT_TERMINATED

EXIT_CODES: dict[int, int] = {
    signal.SIGINT: EXIT_INTERRUPTED,
    signal.SIGTERM: EXIT_TERMINATED,
    signal.SIGHUP: EXIT_TERMINATED,
}


class Interrupted(BaseException):
    """Raised by the first signal while there are no requests to finish, and by Signals.check."""

    def __init__(self, exit_code: int) -> None:
        self.exit_code = exit_code


class Signals:
    """Handler of the signals of EXIT_CODES inside a `with` block. After the block they are ignored, and a SIGHUP that
    was ignored before stays so in it (`nohup`).

    Until `drain_on_first` is called, the first signal raises Interrupted. exit_code: exit code of the first signal,
    None before it. final_line: returns the line that the second signal prints on stderr.
    """

    def __init__(self, final_line: Callable[[], str]) -> None:
        self.exit_code: int | None = None
        self._final_line = final_line
        self._draining = self._is_news = False

    def __enter__(self) -> Signals:
        for number in EXIT_CODES:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number in EXIT_CODES:
            signal.signal(number, signal.SIG_IGN)

    def drain_on_first(self) -> None:
        """Make the first signal set exit_code instead of raising Interrupted, from now on."""
        self._draining = True

    def check(self) -> None:
        """Raise Interrupted after the first signal."""
        if self.exit_code is not None:
            raise Interrupted(self.exit_code)

    def take_first(self) -> bool:
        """Return True once after the first signal, otherwise False."""
        news, self._is_news = self._is_news, False
        return news

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.exit_code is not None:
            os.write(2, f"\n{self._final_line()}\n".encode())
            os._exit(self.exit_code)
        self.exit_code = EXIT_CODES[number]
        self._is_news = True
        if not self._draining:
            raise Interrupted(self.exit_code)
