"""The next token of each row of logits.

Must not know: sequences. Invariants: a row's token and log-probability depend on that row alone and, if the temperature
is above 0, on (seed, request id, step): never on batch mates or on the order of steps.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch

from apcbatch.kernels.cpu.choose import token_logprob
from apcbatch.kernels.ops import Backend
from apcbatch.model.finite import finite_rows

NOT_FINITE = -1
# Two float32 logits that differ are 2**-149 apart or more: from here down, all weight is on the largest.
_COLDEST = 1e-200


def request_key(seed: int, request_id: str, answer: int = 0) -> int:
    """The 128-bit key of the random stream of one of a request's answers."""
    name = f"{request_id}\x00{answer}" if answer else request_id
    digest = hashlib.sha256(f"{seed}\x00{name}".encode()).digest()
    return int.from_bytes(digest[:16], "little")


class Choice:
    """What was chosen from rows of logits. tokens: (r,) int64, where the logits are; logprobs: (r,) float32 or None.
    On a device they may still be on their way, and the host's copies with them."""

    def __init__(self, tokens: torch.Tensor, logprobs: torch.Tensor | None) -> None:
        self.tokens = tokens
        self._copies = [None if part is None else part.to("cpu", non_blocking=True) for part in (tokens, logprobs)]
        self._copied = torch.cuda.Event() if tokens.is_cuda else None  # type: ignore[no-untyped-call]
        if self._copied is not None:
            self._copied.record()

    def read(self) -> tuple[list[int], list[float]]:
        """Wait for them. Log-probabilities that nobody asked for are NaN."""
        if self._copied is not None:
            self._copied.synchronize()
        tokens, logprobs = self._copies
        assert tokens is not None
        return tokens.tolist(), [math.nan] * len(tokens) if logprobs is None else logprobs.tolist()


def greedy(ops: Backend, logits: torch.Tensor, with_logprobs: bool) -> Choice:
    """The likeliest token (the lowest id on ties) of each row of logits (r, vocabulary) float32, and its float32
    log-probability. The token is NOT_FINITE if a logit of the row is NaN or infinite. Log-probabilities take a second
    look at every logit."""
    tokens, logprobs = ops.greedy(logits) if with_logprobs else (ops.argmax(logits), None)
    return Choice(_checked(tokens, logits), logprobs)


def _checked(tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """The tokens, with NOT_FINITE for each row that is not. One sum over all rows tells whether there is any; only then
    are the rows looked at one by one. The ops of a device look at each number anyway and mark the rows themselves."""
    if not logits.is_cuda and not math.isfinite(logits.sum().item()):
        return tokens.where(finite_rows(logits), NOT_FINITE)
    return tokens


def sample(row: torch.Tensor, temperature: float, top_p: float, key: int, step: int) -> tuple[int, float]:
    """One token drawn from a row of logits (vocabulary,) float32, and its float32 log-probability before temperature.

    The draw is the inverse of the cumulative distribution over descending probability, cut at top_p (Holtzman et al.,
    "nucleus sampling", arXiv 1904.09751, section 3.1), at one Philox number keyed by the request and the step. Any
    temperature above 0 will do: a very low one draws among the largest logits alone, a very high one among all alike.
    """
    row = row.cpu()
    scaled = row.numpy().astype(np.float64) / max(temperature, _COLDEST)
    probabilities = np.exp(scaled - scaled.max())
    order = np.argsort(-probabilities, kind="stable")
    cumulative = np.cumsum(probabilities[order])
    kept = int(np.searchsorted(cumulative, top_p * cumulative[-1])) + 1
    cumulative = cumulative[:kept]
    uniform = np.random.Generator(np.random.Philox(key=key, counter=step)).random()
    choice = min(int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right")), len(cumulative) - 1)
    token = int(order[choice])
    return token, float(token_logprob(row, token))
