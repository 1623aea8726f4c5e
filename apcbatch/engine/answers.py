"""The answers of a pass: the next token of each sequence that is due one, and which chunks have numbers that broke.

Must not know: slots, pages, the order of requests.
"""

from __future__ import annotations

from collections.abc import Collection

from apcbatch.engine.runner import Chunk, Pass
from apcbatch.engine.sampler import NOT_FINITE, sample
from apcbatch.model.arena import StateArena


def extend_answers(current: Pass, eos_token_ids: Collection[int], arena: StateArena) -> list[Chunk]:
    """Give each sequence that is due a token its next one; returns the chunks whose numbers are not finite.

    A chunk without logits breaks if a state that it keeps is not finite. What is not finite stays so: the last state
    of a chunk tells for all of them. Raises what the pass raised.
    """
    broken = _sample(current, eos_token_ids)
    silent = (chunk for chunk in current.chunks if chunk.keep and not chunk.samples)
    return broken + [chunk for chunk in silent if not arena.is_finite(chunk.keep[-1].slot)]


def _sample(current: Pass, eos_token_ids: Collection[int]) -> list[Chunk]:
    broken = []
    for chunk, row, token, logprob in current.read():
        sequence = chunk.sequence
        request, step = sequence.request, sequence.num_tokens - sequence.num_prompt
        if token == NOT_FINITE:
            broken.append(chunk)
            continue
        if request.temperature > 0:
            token, logprob = sample(current.logits[row], request.temperature, request.top_p, sequence.sampler_key, step)
        sequence.append(token, logprob)
        if token in eos_token_ids and not request.ignore_eos:
            sequence.finish_reason = "stop"
        elif sequence.num_tokens == sequence.limit:
            sequence.finish_reason = "length"
    return broken
