"""Top-k, argmax and log-probabilities of rows of logits, on a CUDA device.

Arguments and results: apcbatch.kernels.cpu.logits. Invariant: a row's result depends on that row alone.
"""

from __future__ import annotations

import torch

from apcbatch.kernels.cuda.extension import current_stream, extension
from apcbatch.kernels.row_arguments import (
    LogprobArguments,
    argmax_arguments,
    greedy_arguments,
    token_logprob_arguments,
    token_logprobs_arguments,
    topk_arguments,
)


def softmax_topk(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See apcbatch.kernels.cpu.logits. Takes at most 1,024 columns."""
    (*sizes, (address, stride, _), weights, indices), chosen = topk_arguments(logits, k, extension().MOST_CHOICES)
    with torch.cuda.device(logits.device):
        extension().softmax_topk(*sizes, address, stride, weights, indices, current_stream())
    return chosen


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See apcbatch.kernels.cpu.logits. The sum is float32. The token is -1 for a row with NaN or infinity."""
    arguments, tokens, logprobs = greedy_arguments(logits)
    _launch(logits.device, arguments)
    return tokens, logprobs


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """See apcbatch.kernels.cpu.logits."""
    arguments, tokens = argmax_arguments(logits)
    _launch(logits.device, arguments)
    return tokens


def token_logprob(logits: torch.Tensor, token: int) -> float:
    """See apcbatch.kernels.cpu.logits."""
    arguments, _alive, logprobs = token_logprob_arguments(logits, token)
    _launch(logits.device, arguments)
    return float(logprobs)


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """See apcbatch.kernels.cpu.logits. The tokens must be on the logits' device."""
    arguments, logprobs = token_logprobs_arguments(logits, tokens)
    _launch(logits.device, arguments)
    return logprobs


def _launch(device: torch.device, arguments: LogprobArguments) -> None:
    t, v, (address, stride, _), *results = arguments
    with torch.cuda.device(device):
        extension().logprob(t, v, address, stride, *results, current_stream())
