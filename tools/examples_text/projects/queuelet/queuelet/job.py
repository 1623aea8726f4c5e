"""One job: something to call, and what has happened to it so far."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

WAITING, DONE, FAILED, CANCELLED = "waiting", "done", "failed", "cancelled"


@dataclass
class Job:
    """A call with its arguments; failures counts the attempts that raised."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    state: str = WAITING
    failures: int = 0
    result: Any = None
    errors: list[str] = field(default_factory=list)

    def attempt(self) -> bool:
        """Call it once; True if it returned."""
        try:
            self.result = self.function(*self.arguments)
        except Exception as error:
            self.failures += 1
            self.errors.append(f"{type(error).__name__}: {error}")
            return False
        self.state = DONE
        return True
