"""What is chosen from a row of logits on a CUDA device: experts, the likeliest token, log-probabilities. The same
arguments and results as on the CPU (apcbatch.kernels.cpu.choose).

Must not know: models, sampling. Invariant: a row's result depends on that row alone.
"""

from __future__ import annotations

import torch

from apcbatch.kernels.arguments import require_logits, require_token, require_tokens, row_stride
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
    t, v = logits.shape
    tokens = torch.empty(t, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(t, dtype=torch.float32, device=logits.device)
    with torch.cuda.device(logits.device):
        extension().logprob(
            t,
            v,
            logits.data_ptr(),
            row_stride(logits, "logits"),
            True,
            tokens.data_ptr(),
            logprobs.data_ptr(),
            current_stream(),
        )
    return tokens, logprobs


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """See apcbatch.kernels.cpu.choose. -1 where a logit is NaN or infinite."""
    require_logits(logits)
    t, v = logits.shape
    tokens = torch.empty(t, dtype=torch.int64, device=logits.device)
    with torch.cuda.device(logits.device):
        extension().logprob(
            t, v, logits.data_ptr(), row_stride(logits, "logits"), True, tokens.data_ptr(), 0, current_stream()
        )
    return tokens


def token_logprob(logits: torch.Tensor, token: int) -> float:
    """See apcbatch.kernels.cpu.choose."""
    require_token(token, logits)
    row = logits.unsqueeze(0)
    require_logits(row)
    tokens = torch.tensor([token], device=logits.device)
    logprobs = torch.empty(1, dtype=torch.float32, device=logits.device)
    with torch.cuda.device(logits.device):
        extension().logprob(
            1,
            logits.numel(),
            row.data_ptr(),
            logits.numel(),
            False,
            tokens.data_ptr(),
            logprobs.data_ptr(),
            current_stream(),
        )
    return float(logprobs)


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """See apcbatch.kernels.cpu.choose; the tokens lie where the logits do."""
    require_logits(logits)
    t, v = logits.shape
    require_tokens(tokens, logits)
    logprobs = torch.empty(t, dtype=torch.float32, device=logits.device)
    with torch.cuda.device(logits.device):
        extension().logprob(
            t,
            v,
            logits.data_ptr(),
            row_stride(logits, "logits"),
            False,
            tokens.data_ptr(),
            logprobs.data_ptr(),
            current_stream(),
        )
    return logprobs
