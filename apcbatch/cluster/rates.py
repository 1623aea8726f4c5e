"""How fast workers are: prefill, decode, and the network, measured while they work.

Must not know: workers, units. The seconds of a unit are taken for prefill_tokens * x + decode_tokens * y; x and y are
the least squares over the units so far, old ones fading, held to a prior that fades too.
"""

from __future__ import annotations

FADING = 0.98  # the weight of a unit after the next one
PRIOR_PREFILL_TOKENS_PER_S = 1000.0
PRIOR_DECODE_TOKENS_PER_S = 200.0
PRIOR_BYTES_PER_S = 1e9
PRIOR_LATENCY_S = 2e-3
PRIOR_TOKENS = 256.0  # what the prior weighs, as if so many tokens had been measured
PRIOR_BYTES = 1e6  # and so many bytes sent
SMALLEST = 1e-9  # seconds a token


class Rates:
    """prefill_s, decode_s: seconds a token. answer_share: tokens of an answer over the most that it may have."""

    def __init__(self) -> None:
        self.prefill_s = 1 / PRIOR_PREFILL_TOKENS_PER_S
        self.decode_s = 1 / PRIOR_DECODE_TOKENS_PER_S
        self.answer_share = 1.0
        self.bytes_per_s, self.latency_s = PRIOR_BYTES_PER_S, PRIOR_LATENCY_S
        weight = PRIOR_TOKENS**2
        self._pp, self._pd, self._dd = weight, 0.0, weight
        self._ps, self._ds = weight * self.prefill_s, weight * self.decode_s
        self._sent_bytes, self._sent_s = PRIOR_BYTES, PRIOR_BYTES / PRIOR_BYTES_PER_S
        self._answered = self._might_answer = 0.0

    def seconds(self, prefill_tokens: int, most_answer_tokens: int) -> float:
        """What so much work is expected to take."""
        return prefill_tokens * self.prefill_s + most_answer_tokens * self.answer_share * self.decode_s

    def transfer_s(self, num_bytes: int) -> float:
        """What it takes to send a state to another node."""
        return self.latency_s + num_bytes / self.bytes_per_s

    def add_unit(self, seconds: float, prefill_tokens: int, decode_tokens: int) -> None:
        """Learn from a unit."""
        p, d = float(prefill_tokens), float(decode_tokens)
        self._pp, self._pd, self._dd = FADING * self._pp + p * p, FADING * self._pd + p * d, FADING * self._dd + d * d
        self._ps, self._ds = FADING * self._ps + p * seconds, FADING * self._ds + d * seconds
        determinant = self._pp * self._dd - self._pd * self._pd
        if determinant <= 1e-6 * self._pp * self._dd:
            scale = self._ps * self.prefill_s + self._ds * self.decode_s  # all units alike: keep the ratio
            told = self._pp * self.prefill_s**2 + 2 * self._pd * self.prefill_s * self.decode_s
            told += self._dd * self.decode_s**2
            if told > 0:
                self.prefill_s *= scale / told
                self.decode_s *= scale / told
            return
        self.prefill_s = max(SMALLEST, (self._dd * self._ps - self._pd * self._ds) / determinant)
        self.decode_s = max(SMALLEST, (self._pp * self._ds - self._pd * self._ps) / determinant)

    def add_answer(self, tokens: int, most: int) -> None:
        """Learn how long answers are."""
        self._answered, self._might_answer = self._answered + tokens, self._might_answer + most
        if self._might_answer:
            self.answer_share = self._answered / self._might_answer

    def add_transfer(self, num_bytes: float, seconds: float) -> None:
        """Learn how fast states come in."""
        if num_bytes > 0 and seconds > 0:
            self._sent_bytes, self._sent_s = FADING * self._sent_bytes + num_bytes, FADING * self._sent_s + seconds
            self.bytes_per_s = self._sent_bytes / self._sent_s
