"""The next token of each row of logits.

Must not know: sequences. Invariants: a row's token and log-probability depend on that row alone and, if the temperature
is above 0, on (seed, random stream, answer, step): never on batch mates or on the order of steps.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import numpy.typing as npt
import torch

from apcbatch.kernels.ops import Backend
from apcbatch.model.fetch import Fetch
from apcbatch.types import Request

NOT_FINITE = -1  # in place of a token, from the ops
# Two float32 logits that differ are 2**-149 apart or more: from here down, all weight is on the largest.
_COLDEST = 1e-200


def request_key(request: Request, answer: int = 0) -> int:
    """The 128-bit key of the random stream of one of a request's answers."""
    name = request.id if request.random_stream is None else request.random_stream
    if answer:
        name = f"{name}\x00{answer}"
    digest = hashlib.sha256(f"{request.seed}\x00{name}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:16], "little")


class Choice:
    """What was chosen from rows of logits. tokens: (r,) int64, where the logits are; logprobs: (r,) float32 or None.
    On a device they may still be on their way, and the host's copies with them."""

    def __init__(self, tokens: torch.Tensor, logprobs: torch.Tensor | None) -> None:
        self.tokens = tokens
        self._copies = [None if part is None else Fetch(part) for part in (tokens, logprobs)]

    def read(self) -> tuple[list[int], list[float] | None]:
        """Wait for them."""
        tokens, logprobs = (None if part is None else part.read().tolist() for part in self._copies)
        assert tokens is not None
        return tokens, logprobs


def greedy(ops: Backend, logits: torch.Tensor, with_logprobs: bool) -> Choice:
    """The likeliest token (the lowest id on ties) of each row of logits (r, vocabulary) float32, and its float32
    log-probability. The token is NOT_FINITE if a logit of the row is NaN or infinite. Log-probabilities take a second
    look at every logit."""
    tokens, logprobs = ops.greedy(logits) if with_logprobs else (ops.argmax(logits), None)
    return Choice(tokens, logprobs)


def draw(
    row: npt.NDArray[np.float32], temperature: float, top_k: int, min_p: float, top_p: float, key: int, step: int
) -> int:
    """One token drawn from a row of logits (vocabulary,) float32; one of -infinity never comes.

    The draw is the inverse of the cumulative distribution over descending probability at one Philox number keyed by
    the request and the step. The distribution is that of the top_k largest logits, the lowest ids on ties (0 or -1:
    all); of these those with at least min_p times the best one's probability (Nguyen et al., arXiv 2407.01082,
    equation 2); of these the fewest that have the probability top_p (Holtzman et al., "nucleus sampling", arXiv
    1904.09751, section 3.1). Any temperature above 0 will do: a very low one draws among the largest logits alone, a
    very high one among all alike.
    """
    ids = _largest(row, top_k) if 0 < top_k < len(row) else None
    scaled = (row if ids is None else row[ids]).astype(np.float64) / max(temperature, _COLDEST)
    probabilities = np.exp(scaled - scaled.max())
    places = np.flatnonzero(probabilities >= min_p if min_p > 0 else probabilities > 0)  # the best one has 1
    probabilities = probabilities[places]
    ids = places if ids is None else ids[places]
    ascending = np.sort(probabilities)
    cumulative = np.cumsum(ascending[::-1])
    kept = int(np.searchsorted(cumulative, top_p * cumulative[-1])) + 1
    cumulative = cumulative[:kept]
    uniform = np.random.Generator(np.random.Philox(key=key, counter=step)).random()
    choice = min(int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right")), len(cumulative) - 1)
    value = ascending[-1 - choice]
    num_larger = len(ascending) - int(np.searchsorted(ascending, value, side="right"))
    return int(ids[np.flatnonzero(probabilities == value)[choice - num_larger]])


def _largest(row: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.intp]:
    """The ids of the `count` largest logits of a row, ascending; of equal ones those with the lowest ids."""
    least = np.partition(row, len(row) - count)[len(row) - count]
    above = np.flatnonzero(row > least)
    equal = np.flatnonzero(row == least)[: count - len(above)]
    return np.sort(np.concatenate((above, equal)))


def top_logprobs(row: npt.NDArray[np.float32], count: int) -> list[tuple[int, float]]:
    """The likeliest tokens of a row of logits (vocabulary,) float32, the lowest id first on ties, and their float32
    log-probabilities; all of them if there are no more than count."""
    ids = _largest(row, min(count, len(row)))
    ids = ids[np.argsort(-row[ids], kind="stable")]
    shifted = row.astype(np.float64) - float(row[ids[0]])
    logprobs = (shifted[ids] - math.log(np.exp(shifted).sum())).astype(np.float32)
    return list(zip(ids.tolist(), logprobs.tolist(), strict=True))
