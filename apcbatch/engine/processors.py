"""What the settings of one answer do to its logits, before a token is chosen from them.

In this order: logit_bias is added; repetition_penalty divides or multiplies (Keskar et al., "CTRL", arXiv 1909.05858,
section 4.1); frequency_penalty and presence_penalty are taken off, as OpenAI's API defines them; then tokens are masked
with -infinity: those that would end the answer before min_tokens, those outside allowed_token_ids, those that the
constraint does not take.

Must not know: sequences, how a token is chosen. Invariant: a row depends on the model's logits, the prompt and the
answer so far alone. A token costs work in the distinct tokens that were there, and a pass over the vocabulary only for
a mask.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from apcbatch.errors import RequestError
from apcbatch.prefix import TokenArray, as_token_array
from apcbatch.types import Request

Logits = npt.NDArray[np.float32]
_LARGEST = np.finfo(np.float32).max


class Tally:
    """Distinct tokens and how often each one was counted: ids (n,) int64 and counts (n,) float32, in order of their
    first coming. Adding one costs the same however many there are."""

    def __init__(self, token_ids: TokenArray | None = None) -> None:
        first = np.empty(0, np.int64) if token_ids is None else np.unique(token_ids).astype(np.int64)
        self._ids, self._counts = first, np.ones(len(first), np.float32)
        self._places = {int(token): place for place, token in enumerate(first)}

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """The tokens."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """How often each of `ids` was counted."""
        return self._counts[: len(self._places)]

    def add(self, token: int) -> None:
        """Count a token once more."""
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids):
            room = max(64, len(self._ids))
            self._ids = np.concatenate((self._ids, np.empty(room, np.int64)))
            self._counts = np.concatenate((self._counts, np.zeros(room, np.float32)))
        self._ids[place] = token
        self._counts[place] += 1


class Processors:
    """The settings of one answer that change or mask logits, and what they know of it so far.

    ending_ids: the tokens that end an answer; those outside the vocabulary do nothing.
    """

    def __init__(self, request: Request, prompt: TokenArray, vocab_size: int, ending_ids: Collection[int]) -> None:
        self._request = request
        self._bias_ids = np.array(list(request.logit_bias), np.int64)
        with np.errstate(over="ignore"):  # below float32 is -infinity, which forbids a token
            self._bias = np.array(list(request.logit_bias.values()), np.float64).astype(np.float32)
        self._seen = Tally(prompt) if request.repetition_penalty != 1 else None
        self._answer = Tally() if request.presence_penalty or request.frequency_penalty else None
        self._ending_ids = np.array([one for one in ending_ids if 0 <= one < vocab_size], np.int64)
        self._allowed = None
        if request.allowed_token_ids is not None:
            self._allowed = as_token_array(request.allowed_token_ids).astype(np.int64)
        self._constraint = request.constraint() if request.constraint else None
        self._mask = np.zeros(-(-vocab_size // 32) if self._constraint else 0, np.int32)

    def apply(self, row: Logits, step: int) -> None:
        """Change a row of finite logits (vocabulary,) float32 in place; step: the number of tokens that the answer has.

        Raises RequestError if no token is left.
        """
        row[self._bias_ids] += self._bias
        if self._seen is not None:
            self._penalise_repetition(row, self._seen.ids)
        if self._answer is not None:
            ids, counts = self._answer.ids, self._answer.counts
            row[ids] -= np.float32(self._request.frequency_penalty) * counts
            row[ids] -= np.float32(self._request.presence_penalty)
        if step < self._request.min_tokens:
            row[self._ending_ids] = -np.inf
        if self._allowed is not None:
            _keep(row, self._allowed)
        if self._constraint is not None and self._constraint.fill(self._mask):
            forbidden = np.unpackbits((~self._mask).view(np.uint8), count=len(row), bitorder="little")
            np.copyto(row, -np.inf, where=forbidden.view(np.bool_))
        if row.max() == -np.inf:
            raise RequestError(
                "invalid_request",
                f"no token may come after {step} tokens of the answer: the request's settings forbid all of them "
                "together (logit_bias, allowed_token_ids, min_tokens, the form of the answer)",
            )

    def accept(self, token: int) -> bool:
        """Take the token that came; whether the answer is complete with it. Raises RequestError."""
        if self._seen is not None:
            self._seen.add(token)
        if self._answer is not None:
            self._answer.add(token)
        return self._constraint is not None and self._constraint.accept(token)

    def _penalise_repetition(self, row: Logits, ids: npt.NDArray[np.int64]) -> None:
        penalty = np.float32(self._request.repetition_penalty)
        logits = row[ids]
        with np.errstate(over="ignore"):
            logits = np.where(logits < 0, logits * penalty, logits / penalty)
        row[ids] = np.minimum(logits, _LARGEST)


def _keep(row: Logits, ids: npt.NDArray[np.int64]) -> None:
    """Mask every token of a row but these."""
    kept = row[ids]
    row.fill(-np.inf)
    row[ids] = kept
