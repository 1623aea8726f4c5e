"""What is chosen from a row of logits on the CPU: experts, the likeliest token, log-probabilities.

Must not know: models, sampling. Invariant: a row's result depends on that row alone.
"""

from __future__ import annotations

import torch

from apcbatch import _C
from apcbatch.kernels.arguments import num_threads, require_cpu
from apcbatch.kernels.row_arguments import (
    argmax_arguments,
    greedy_arguments,
    token_logprob_arguments,
    token_logprobs_arguments,
    topk_arguments,
)


def softmax_topk(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of each row and their softmax over the whole row, the lower index first on ties.

    logits: (t, n) float32, any row stride. Returns weights (t, k) float32, descending and not normalised
    again, and indices (t, k) int64. Raises ValueError.
    """
    require_cpu(logits, "logits")
    arguments, chosen = topk_arguments(logits, k)
    _C.softmax_topk(*arguments, num_threads())
    return chosen


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """The index of each row's largest logit, the lowest on ties, -1 for a row with NaN or infinity: logits (t, v)
    float32, any row stride -> (t,) int64. Raises ValueError."""
    require_cpu(logits, "logits")
    arguments, tokens = argmax_arguments(logits)
    _C.logprob(*arguments, num_threads())
    return tokens


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The index of each row's largest logit, the lowest on ties, and its log-probability; -1 and NaN for a row with NaN
    or infinity.

    logits: (t, v) float32, any row stride. Returns tokens (t,) int64 and logprobs (t,) float32: logit - max -
    log of the sum of exp(logit - max), summed in float64. Raises ValueError.
    """
    require_cpu(logits, "logits")
    arguments, tokens, logprobs = greedy_arguments(logits)
    _C.logprob(*arguments, num_threads())
    return tokens, logprobs


def token_logprob(logits: torch.Tensor, token: int) -> float:
    """The log-probability of one token: logits (v,) float32 contiguous, token in [0, v). The same bits as
    greedy gives for the likeliest token. Raises ValueError."""
    require_cpu(logits, "logits")
    arguments, _alive, logprobs = token_logprob_arguments(logits, token)
    _C.logprob(*arguments, 1)
    return float(logprobs)


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The log-probability of one token of each row: logits (t, v) float32, any row stride, tokens (t,) int64, each in
    [0, v) -> (t,) float32. The same bits as `token_logprob` gives for each row. Raises ValueError."""
    require_cpu(logits, "logits")
    arguments, logprobs = token_logprobs_arguments(logits, tokens)
    _C.logprob(*arguments, num_threads())
    return logprobs
