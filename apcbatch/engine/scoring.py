"""Score given tokens: their log-probabilities, ranks, and the likeliest tokens at their positions.

Invariants: a token's score depends on its own row alone, not on other rows or on where the prefill is cut. A
log-probability has the same bits as when the token is generated. Memory: logits of SLICE_BYTES at a time, at least one
row, and a fourth of that for temporaries.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from apcbatch.engine.sampler import top_logprobs
from apcbatch.model.host_copies import finite_rows
from apcbatch.model.pipeline import Model
from apcbatch.prefix import TokenArray
from apcbatch.types import Scores

SLICE_BYTES = 64 << 20


def score_rows(model: Model, hidden: torch.Tensor, targets: TokenArray, begin: int, num_top: int) -> Scores | None:
    """Return the scores of the tokens `targets` (s,), each following a row of hidden (s, h); None if a logit is NaN or
    infinite.

    begin: position of the first target. num_top: number of likeliest tokens returned for each.
    """
    scores = Scores(begin)
    tokens = torch.from_numpy(targets.astype(np.int64)).to(hidden.device)
    first = 0
    rows_at_a_time = 1  # default until the vocabulary is known
    while first < len(tokens):
        part = slice(first, first + rows_at_a_time)
        logits = model.head(hidden[part])
        if not bool(finite_rows(logits).all()):
            return None
        logprobs = model.backend.token_logprobs(logits, tokens[part]).tolist()
        scores.logprobs += logprobs
        scores.ranks += _ranks(logits, tokens[part])
        if num_top:
            scores.top += _likeliest(logits, targets[part].tolist(), logprobs, num_top)
        first += len(logits)
        rows_at_a_time = max(1, SLICE_BYTES // (logits.shape[1] * logits.element_size()))
    return scores


def _likeliest(
    logits: torch.Tensor, targets: Sequence[int], logprobs: Sequence[float], count: int
) -> list[list[tuple[int, float]]]:
    """Return (token, log-probability) of the `count` likeliest tokens of each row of logits. If a row's target token is
    among them, use its entry of `logprobs`, so that both results have the same bits. targets, logprobs: target token of
    each row, and its log-probability."""
    found = []
    for row, target, logprob in zip(logits.cpu().numpy(), targets, logprobs, strict=True):
        likely = top_logprobs(row, count)
        found.append([(token, logprob if token == target else value) for token, value in likely])
    return found


def _ranks(logits: torch.Tensor, tokens: torch.Tensor) -> list[int]:
    """Return the rank of each row's token among all, from 1, the lower id first on ties."""
    own = logits.gather(1, tokens[:, None])
    ranks = 1 + (logits > own).sum(1)
    equal = (logits == own).sum(1)
    for row in (equal > 1).nonzero().flatten().tolist():
        ranks[row] += (logits[row, : tokens[row]] == own[row]).sum()
    found: list[int] = ranks.tolist()
    return found
