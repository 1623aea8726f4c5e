"""Forecasts of the oracle's datasets, with what they say of each request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from apcbatch.plan.planner import Planner
from apcbatch.tuning.forecast import Forecast, Forecaster, Served
from apcbatch.types import Policy
from tests.plan.plan_oracle import Dataset


@dataclass
class Seen:
    """What a forecaster says of each request, by policy and block size, in running order."""

    requests: dict[tuple[Policy, int], list[Served]] = field(default_factory=dict)

    def add(self, policy: Policy, block_size: int, served: Served) -> None:
        self.requests.setdefault((policy, block_size), []).append(served)

    def of(self, policy: Policy, block_size: int) -> list[Served]:
        """The requests in the order of the input. Under `planned` they are the same at every block size."""
        [found] = (one for (name, size), one in self.requests.items() if name == policy and size == block_size)
        return sorted(found, key=lambda served: served.index)

    def resume_at(self, policy: Policy, block_size: int) -> list[int]:
        return [served.resume_at for served in self.of(policy, block_size)]


def forecast(
    data: Dataset,
    block_sizes: Iterable[int],
    planner: Planner,
    resumable: Sequence[int] = (),
    window_tokens: int = 1 << 40,
) -> tuple[Forecast, Seen]:
    """The forecast of a dataset. resumable: by request; none: all but the last token."""
    seen = Seen()
    forecaster = Forecaster(planner, block_sizes, window_tokens, seen.add)
    for index, (prompt, conversation) in enumerate(zip(data.prompts, data.conversations, strict=True)):
        most = resumable[index] if resumable else len(prompt) - 1
        forecaster.add(np.array(prompt, np.int32), conversation, most)
    return forecaster.finish(), seen
