"""Tally: what one worker of a run has done, for the summary.

Must not know: units, the seam, who prints it. Only what came back counts: a lost worker's unfinished work is in no sum.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from apcbatch.types import Result

LOST, LET_GO = "lost", "let_go"


@dataclass(slots=True)
class Tally:
    """node, device: empty until it is ready. units: that it ended. requests: that it answered, errors among them.
    prefill_tokens, decode_tokens: computed for answers. cached_tokens: restored for them. busy_s: of its engine, spent
    on them. ending: LOST, LET_GO, or None for one that stayed."""

    id: int
    node: str = ""
    device: str = ""
    units: int = 0
    requests: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    cached_tokens: int = 0
    busy_s: float = 0.0
    ending: str | None = None

    def answered(self, result: Result) -> None:
        """It has answered a request."""
        self.requests += 1
        if result.error is None:
            self.prefill_tokens += result.computed_tokens
            self.decode_tokens += sum(max(0, len(answer.token_ids) - 1) for answer in result.answers)
            self.cached_tokens += result.cached_tokens
            self.busy_s += (result.prefill_ms + result.decode_ms) / 1e3

    def summary(self) -> dict[str, Any]:
        """As the summary has it. tokens_per_s: computed tokens over the seconds that they took, None for none."""
        tokens = self.prefill_tokens + self.decode_tokens
        return asdict(self) | {"tokens_per_s": tokens / self.busy_s if self.busy_s else None}
