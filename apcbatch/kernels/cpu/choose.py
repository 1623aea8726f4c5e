"""What is chosen from a row of logits on the CPU: experts, the likeliest token, log-probabilities.

Must not know: models, sampling. Invariant: a row's result depends on that row alone.
"""

from __future__ import annotations

import torch

from apcbatch import _C
from apcbatch.kernels.arguments import num_threads, require_cpu, require_logits, require_token, require_tokens, view


def softmax_topk(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of each row and their softmax over the whole row, the lower index first on ties.

    logits: (t, n) float32, any row stride. Returns weights (t, k) float32, descending and not normalised
    again, and indices (t, k) int64. Raises ValueError.
    """
    require_cpu(logits, "logits")
    require_logits(logits)
    t, n = logits.shape
    if not 1 <= k <= n:
        raise ValueError(f"k must lie in 1 to {n}, the columns of logits; it is {k}")
    weights = torch.empty(t, k, dtype=torch.float32)
    indices = torch.empty(t, k, dtype=torch.int64)
    _C.softmax_topk(t, n, k, view(logits, "logits"), weights.data_ptr(), indices.data_ptr(), num_threads())
    return weights, indices


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """The index of each row's largest logit, the lowest on ties, -1 for a row with NaN or infinity: logits (t, v)
    float32, any row stride -> (t,) int64. Raises ValueError."""
    require_cpu(logits, "logits")
    require_logits(logits)
    t, v = logits.shape
    tokens = torch.empty(t, dtype=torch.int64)
    _C.logprob(t, v, view(logits, "logits"), True, tokens.data_ptr(), 0, num_threads())
    return tokens


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The index of each row's largest logit, the lowest on ties, and its log-probability; -1 and NaN for a row with NaN
    or infinity.

    logits: (t, v) float32, any row stride. Returns tokens (t,) int64 and logprobs (t,) float32: logit - max -
    log of the sum of exp(logit - max), summed in float64. Raises ValueError.
    """
    require_cpu(logits, "logits")
    require_logits(logits)
    t, v = logits.shape
    tokens = torch.empty(t, dtype=torch.int64)
    logprobs = torch.empty(t, dtype=torch.float32)
    _C.logprob(t, v, view(logits, "logits"), True, tokens.data_ptr(), logprobs.data_ptr(), num_threads())
    return tokens, logprobs


def token_logprob(logits: torch.Tensor, token: int) -> float:
    """The log-probability of one token: logits (v,) float32 contiguous, token in [0, v). The same bits as
    greedy gives for the likeliest token. Raises ValueError."""
    require_cpu(logits, "logits")
    require_token(token, logits)
    row = logits.unsqueeze(0)
    require_logits(row)
    tokens = torch.tensor([token])
    logprobs = torch.empty(1, dtype=torch.float32)
    _C.logprob(1, logits.numel(), view(row, "logits"), False, tokens.data_ptr(), logprobs.data_ptr(), 1)
    return float(logprobs)


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The log-probability of one token of each row: logits (t, v) float32, any row stride, tokens (t,) int64, each in
    [0, v) -> (t,) float32. The same bits as `token_logprob` gives for each row. Raises ValueError."""
    require_cpu(logits, "logits")
    require_logits(logits)
    t, v = logits.shape
    require_tokens(tokens, logits)
    logprobs = torch.empty(t, dtype=torch.float32)
    _C.logprob(t, v, view(logits, "logits"), False, tokens.data_ptr(), logprobs.data_ptr(), num_threads())
    return logprobs
