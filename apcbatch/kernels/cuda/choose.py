"""What is chosen from a row of logits on a CUDA device: experts, the likeliest token, log-probabilities. The same
arguments and results as on the CPU (apcbatch.kernels.cpu.choose).

Must not know: models, sampling. Invariant: a row's result depends on that row alone.
"""

from __future__ import annotations

import torch

from apcbatch.kernels.arguments import address, require_logits, require_token, require_tokens, row_stride
from apcbatch.kernels.cuda.extension import current_stream, extension


def softmax_topk(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See apcbatch.kernels.cpu.choose; at most 1,024 columns."""
    require_logits(logits)
    t, n = logits.shape
    if not 1 <= k <= n <= extension().MOST_CHOICES:
        raise ValueError(f"k must lie in 1 to n, and n be {extension().MOST_CHOICES} at most; they are {k} and {n}")
    weights = torch.empty((t, k), dtype=torch.float32, device=logits.device)
    indices = torch.empty((t, k), dtype=torch.int64, device=logits.device)
    with torch.cuda.device(logits.device):
        extension().softmax_topk(
            t,
            n,
            k,
            logits.data_ptr(),
            row_stride(logits, "logits"),
            weights.data_ptr(),
            indices.data_ptr(),
            current_stream(),
        )
    return weights, indices


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See apcbatch.kernels.cpu.choose; the sum is float32. The token is -1 where a logit is NaN or infinite."""
    require_logits(logits)
    tokens, logprobs = _tokens_of(logits), _logprobs_of(logits)
    _logprob(logits, True, tokens, logprobs)
    return tokens, logprobs


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """See apcbatch.kernels.cpu.choose. -1 where a logit is NaN or infinite."""
    require_logits(logits)
    tokens = _tokens_of(logits)
    _logprob(logits, True, tokens, None)
    return tokens


def token_logprob(logits: torch.Tensor, token: int) -> float:
    """See apcbatch.kernels.cpu.choose."""
    require_token(token, logits)
    row = logits.unsqueeze(0)
    require_logits(row)
    logprobs = _logprobs_of(row)
    _logprob(row, False, torch.tensor([token], device=logits.device), logprobs)
    return float(logprobs)


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """See apcbatch.kernels.cpu.choose; the tokens lie where the logits do."""
    require_logits(logits)
    require_tokens(tokens, logits)
    logprobs = _logprobs_of(logits)
    _logprob(logits, False, tokens, logprobs)
    return logprobs


def _tokens_of(logits: torch.Tensor) -> torch.Tensor:
    return torch.empty(len(logits), dtype=torch.int64, device=logits.device)


def _logprobs_of(logits: torch.Tensor) -> torch.Tensor:
    return torch.empty(len(logits), dtype=torch.float32, device=logits.device)


def _logprob(logits: torch.Tensor, choose: bool, tokens: torch.Tensor, logprobs: torch.Tensor | None) -> None:
    """Writes the likeliest token of each row, where it is to choose, and the token's log-probability."""
    t, v = logits.shape
    with torch.cuda.device(logits.device):
        extension().logprob(
            t,
            v,
            logits.data_ptr(),
            row_stride(logits, "logits"),
            choose,
            tokens.data_ptr(),
            address(logprobs),
            current_stream(),
        )
