"""How long to wait before trying again."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Backoff:
    """Waits that grow by a factor up to a ceiling, for a number of attempts; all in seconds."""

    attempts: int = 4
    first: float = 1.0
    factor: float = 2.0
    ceiling: float = 60.0

    def waits(self) -> Iterator[float]:
        """The waits between the attempts."""
        wait = self.first
        for _ in range(self.attempts):
            yield min(wait, self.ceiling)
            wait *= self.factor

    def after(self, failures: int) -> float | None:
        """The wait after this many failures; None when it is time to give up."""
        for number, wait in enumerate(self.waits(), start=1):
            if number == failures:
                return wait
        return None
