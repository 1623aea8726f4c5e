"""Work that waits for a disk, beside a run: one piece at a time.

Must not know: what the work is. A disk that is busy, with the snapshots of a store say, takes a second for what an idle
one does in a millisecond, and the run has better things to do. Invariant: what a piece raises is raised to whoever
began it, at once if it ends at once.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread

PATIENCE_S = 0.02


class Beside:
    """At most one piece of work under way."""

    def __init__(self) -> None:
        self._thread: Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a piece is under way."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, work: Callable[[], None]) -> None:
        """Finish the piece before, begin this one and give it a moment; raises what either raised."""
        self.finish()
        self._thread = Thread(target=self._run, args=(work,), name="apcbatch-disk", daemon=True)
        self._thread.start()
        self._thread.join(PATIENCE_S)
        if not self.is_busy:
            self.finish()

    def finish(self) -> None:
        """Wait for the piece under way, if there is one; raises what it raised, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # whoever began it gets it
            self._error = error
