"""A unit that a worker is at: what is still to come of it, and what it took.

Must not know: engines, tensors, other units.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from apcbatch.cluster.unit import Key, Message, Unit
from apcbatch.cluster.unit_plan import Maker
from apcbatch.types import Result


class OpenUnit:
    """exports: those that are not told yet. said: messages that nobody has taken. num_left: requests without an answer.
    seconds: of the engine, as far as they were spent on answers; prefill_tokens, decode_tokens: that these took."""

    def __init__(self, unit: Unit, makers: Mapping[Key, Maker]) -> None:
        self.unit, self.makers = unit, makers
        self.exports = set(makers)
        self.said: deque[Message] = deque()
        self.num_left = len(unit.pieces)
        self.seconds = 0.0
        self.prefill_tokens = self.decode_tokens = 0

    def count(self, result: Result) -> None:
        """A request has ended."""
        self.num_left -= 1
        if result.error is None:
            self.seconds += (result.prefill_ms + result.decode_ms) / 1e3
            self.prefill_tokens += result.computed_tokens
            self.decode_tokens += sum(max(0, len(answer.token_ids) - 1) for answer in result.answers)
