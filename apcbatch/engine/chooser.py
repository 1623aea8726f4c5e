"""How the tokens of one answer are chosen, and what ends it, where that takes more than the likeliest token and the
model's own stop tokens.

Must not know: sequences, passes, text. Invariant: what is chosen depends on the row of logits, the request and the
answer so far alone.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from apcbatch.engine.processors import Logits, Processors
from apcbatch.engine.sampler import draw
from apcbatch.prefix import TokenArray
from apcbatch.types import Request


class Chooser:
    """Chooses the tokens of one answer. key: of its random stream. eos_token_ids: the model's own stop tokens."""

    def __init__(
        self, request: Request, prompt: TokenArray, vocab_size: int, eos_token_ids: Collection[int], key: int
    ) -> None:
        self._request, self._key = request, key
        self._stop_ids = frozenset(int(token) for token in request.stop_token_ids)
        self._eos_ids = frozenset() if request.ignore_eos else frozenset(eos_token_ids)
        self._ending = request.ending() if request.ending else None
        ending_ids = self._stop_ids | self._eos_ids
        self._processors = Processors(request, prompt, vocab_size, ending_ids) if request.changes_logits else None

    def choose(self, row: Logits, step: int) -> int:
        """The answer's next token, after `step` tokens, from a row of the model's logits (vocabulary,) float32, which
        is left as it is. Greedy: the largest logit, the lowest id on ties. Raises RequestError if none may come."""
        request = self._request
        if self._processors is not None:
            row = row.copy()
            self._processors.apply(row, step)
        if request.temperature == 0:
            return int(np.argmax(row))
        return draw(row, request.temperature, request.top_k, request.min_p, request.top_p, self._key, step)

    def ends_with(self, token: int, step: int) -> tuple[bool, int | str | None]:
        """Take the token that came after `step` tokens: whether the answer ends with it, and its stop_reason. Raises
        RequestError."""
        complete = self._processors is not None and self._processors.accept(token)
        if token in self._eos_ids:
            return True, None
        if token in self._stop_ids:
            return True, token
        reason = self._ending.accept(token, step >= self._request.min_tokens) if self._ending is not None else None
        return complete or reason is not None, reason
