"""What the model says of tokens that are there already: log-probabilities, ranks, what it would rather take.

Must not know: sequences, slots. Invariants: a token's numbers depend on its own row alone, so neither on where a prompt
is cut nor on batch mates; a log-probability has the bits that it has where the token is generated. Memory: logits of
SLICE_BYTES at a time, of one row at least, however many tokens are scored, and a fourth of that beside them.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from apcbatch.kernels.ops import Backend
from apcbatch.model.finite import finite_rows
from apcbatch.prefix import TokenArray
from apcbatch.types import Scores

SLICE_BYTES = 64 << 20


class Head(Protocol):
    """The last part of a model; see CausalLM."""

    @property
    def backend(self) -> Backend: ...

    def head(self, normed: torch.Tensor) -> torch.Tensor: ...


def score_rows(model: Head, hidden: torch.Tensor, targets: TokenArray, begin: int, num_top: int) -> Scores | None:
    """The scores of the tokens `targets` (s,), each of which comes after a row of hidden (s, h); None if a logit is NaN
    or infinite.

    begin: the position of the first target. num_top: how many of the likeliest tokens are given with each.
    """
    scores = Scores(begin)
    tokens = torch.from_numpy(targets.astype(np.int64)).to(hidden.device)
    first = 0
    rows_at_a_time = 1  # until the vocabulary is known
    while first < len(tokens):
        part = slice(first, first + rows_at_a_time)
        logits = model.head(hidden[part])
        if not bool(finite_rows(logits).all()):
            return None
        scores.logprobs += model.backend.token_logprobs(logits, tokens[part]).tolist()
        scores.ranks += _ranks(logits, tokens[part])
        if num_top:
            scores.top += likeliest(model.backend, logits, num_top)
        first += len(logits)
        rows_at_a_time = max(1, SLICE_BYTES // (logits.shape[1] * logits.element_size()))
    return scores


def likeliest(ops: Backend, logits: torch.Tensor, count: int) -> list[list[tuple[int, float]]]:
    """For each row of logits (r, vocabulary) float32 its `count` likeliest tokens, best first, the lower id first on
    ties, with their log-probabilities; all tokens of a vocabulary that has no more."""
    count = min(count, logits.shape[1])
    least = logits.topk(count, dim=1).values[:, -1:]
    rows, ids = (logits >= least).nonzero(as_tuple=True)  # ascending; more than `count` of a row if the last ones tie
    order = np.lexsort((ids.cpu().numpy(), -logits[rows, ids].cpu().numpy(), rows.cpu().numpy()))
    firsts = np.searchsorted(rows.cpu().numpy(), np.arange(len(logits)))
    chosen = ids.cpu().numpy()[order][firsts[:, None] + np.arange(count)]
    columns = torch.from_numpy(chosen).to(logits.device)
    logprobs = [ops.token_logprobs(logits, columns[:, place].contiguous()).tolist() for place in range(count)]
    return [
        list(zip(row, values, strict=True))
        for row, values in zip(chosen.tolist(), zip(*logprobs, strict=True), strict=True)
    ]


def _ranks(logits: torch.Tensor, tokens: torch.Tensor) -> list[int]:
    """The place of each row's token among all, from 1, the lower id first on ties."""
    own = logits.gather(1, tokens[:, None])
    ranks = 1 + (logits > own).sum(1)
    equal = (logits == own).sum(1)
    for row in (equal > 1).nonzero().flatten().tolist():
        ranks[row] += (logits[row, : tokens[row]] == own[row]).sum()
    found: list[int] = ranks.tolist()
    return found
