"""Top-k, argmax and log-probabilities of rows of logits, on the CPU.

Invariant: a row's result depends on that row alone.
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
    """Return the softmax weights over the whole row and the indices of each row's k largest logits.

    logits: (t, n) float32, any row stride. Returns weights (t, k) float32, descending, not normalised again, and
    indices (t, k) int64, the lower index first on ties. Raises ValueError.
    """
    require_cpu(logits, "logits")
    arguments, chosen = topk_arguments(logits, k)
    _C.softmax_topk(*arguments, num_threads())
    return chosen


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Return the index of each row's largest logit: the lowest on ties, -1 for a row with NaN or infinity.

    logits: (t, v) float32, any row stride. Returns (t,) int64. Raises ValueError.
    """
    require_cpu(logits, "logits")
    arguments, tokens = argmax_arguments(logits)
    _C.logprob(*arguments, num_threads())
    return tokens


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's likeliest token, the lowest index on ties, and its log-probability. A row with NaN or infinity
    gives -1 and NaN.

    logits: (t, v) float32, any row stride. Returns tokens (t,) int64 and logprobs (t,) float32: logit - max -
    log(sum of exp(logit - max)), with the sum in float64. Raises ValueError.
    """
    require_cpu(logits, "logits")
    arguments, tokens, logprobs = greedy_arguments(logits)
    _C.logprob(*arguments, num_threads())
    return tokens, logprobs


def token_logprob(logits: torch.Tensor, token: int) -> float:
    """Return the log-probability of one token, with the same bits that `greedy` gives for the likeliest token.

    logits: (v,) float32 contiguous. token: in [0, v). Raises ValueError.
    """
    require_cpu(logits, "logits")
    arguments, _alive, logprobs = token_logprob_arguments(logits, token)
    _C.logprob(*arguments, 1)
    return float(logprobs)


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of one token of each row, with the same bits as `token_logprob`.

    logits: (t, v) float32, any row stride. tokens: (t,) int64, each in [0, v). Returns (t,) float32. Raises ValueError.
    """
    require_cpu(logits, "logits")
    arguments, logprobs = token_logprobs_arguments(logits, tokens)
    _C.logprob(*arguments, num_threads())
    return logprobs
