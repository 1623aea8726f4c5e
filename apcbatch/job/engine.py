"""What the jobs need of an engine. Tests put a stand-in in its place, and nothing here imports torch.

Must not know: how an engine is made (see opening.py), what it does inside. `apcbatch.Engine` documents each member.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

from apcbatch.engine.observer import Observer
from apcbatch.engine.serving import Steppable
from apcbatch.plan.footprint import Footprint
from apcbatch.types import Request, Result

if TYPE_CHECKING:
    from apcbatch.cluster.settings import ClusterCounters
    from apcbatch.engine.counters import Counters


class JobEngine(Steppable, Protocol):
    """An engine as run, tune-block-size and bench use it."""

    dtype: str
    device: str
    fingerprint: str
    key_fingerprint: bytes
    footprint: Footprint
    context_length: int | None
    vocab_size: int

    @property
    def counters(self) -> Counters | ClusterCounters:
        """What it has done so far."""

    def observe(self, observer: Observer) -> None:
        """Tell somebody from now on what it does."""

    def run(self, requests: Iterable[Request]) -> Iterator[Result]:
        """Answer requests, pulled one by one; results come as they finish."""

    def can_run(self, request: Request) -> bool:
        """Whether `submit` would take a request."""

    def held(self, keys: Collection[bytes]) -> set[bytes]:
        """Those of the prefix keys whose snapshot is in memory or in the store."""

    def drop_waiting(self) -> None:
        """Drop the requests that have not begun."""

    def abort(self) -> None:
        """Drop every request that is not finished."""

    def flush(self) -> None:
        """Wait until everything that was kept is on disk."""

    def close(self) -> None:
        """Let go of the store."""
