"""The answers of a pass: the next token of each sequence that is due one, and which chunks have numbers that broke.

Must not know: slots, pages, the order of requests.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from apcbatch.engine.runner import Chunk
from apcbatch.engine.sampler import NOT_FINITE, greedy, sample
from apcbatch.kernels.ops import Backend
from apcbatch.model.arena import StateArena


def extend_answers(
    ops: Backend, chunks: list[Chunk], logits: torch.Tensor, eos_token_ids: Collection[int], arena: StateArena
) -> list[Chunk]:
    """Give each sequence that is due a token its next one; returns the chunks whose numbers are not finite.

    logits: (chunks that sample, vocabulary) float32. A chunk without logits breaks if a state that it keeps is not
    finite. What is not finite stays so: the last state of a chunk tells for all of them.
    """
    broken = _sample(ops, [chunk for chunk in chunks if chunk.samples], logits, eos_token_ids)
    silent = (chunk for chunk in chunks if chunk.keep and not chunk.samples)
    return broken + [chunk for chunk in silent if not arena.is_finite(chunk.keep[-1].slot)]


def _sample(
    ops: Backend, chunks: list[Chunk], logits: torch.Tensor, eos_token_ids: Collection[int]
) -> list[Chunk]:
    tokens, logprobs = greedy(ops, logits, any(chunk.sequence.request.logprobs for chunk in chunks))
    broken = []
    for row, chunk in enumerate(chunks):
        sequence, token, logprob = chunk.sequence, tokens[row], logprobs[row]
        request, step = sequence.request, sequence.num_tokens - sequence.num_prompt
        if token == NOT_FINITE:
            broken.append(chunk)
            continue
        if request.temperature > 0:
            token, logprob = sample(
                logits[row], request.temperature, request.top_p, sequence.sampler_key, step
            )
        sequence.append(token, logprob)
        if token in eos_token_ids and not request.ignore_eos:
            sequence.finish_reason = "stop"
        elif sequence.num_tokens == sequence.limit:
            sequence.finish_reason = "length"
    return broken
