"""The answers of a pass: the next token of each sequence that is due one, and which chunks have numbers that broke.

Must not know: slots, pages, the order of requests.
"""

from __future__ import annotations

from collections.abc import Collection

from apcbatch.engine.forks import answers_due
from apcbatch.engine.runner import Chunk, Pass
from apcbatch.engine.sampler import NOT_FINITE, sample
from apcbatch.model.arena import StateArena


def extend_answers(current: Pass, eos_token_ids: Collection[int], arena: StateArena) -> list[Chunk]:
    """Give each sequence that is due a token its next one, and each that is scored its scores; returns the chunks whose
    numbers are not finite.

    A chunk whose logits are finite, or that has none, still breaks if a state that it keeps is not finite. What is not
    finite stays so: the last state of a chunk tells for all of them. Raises what the pass raised.
    """
    broken = list(dict.fromkeys(_sample(current, eos_token_ids) + _score(current)))
    keeping = (chunk for chunk in current.chunks if chunk.keep and chunk not in broken)
    return broken + [chunk for chunk in keeping if not arena.is_finite(chunk.keep[-1].slot)]


def _sample(current: Pass, eos_token_ids: Collection[int]) -> list[Chunk]:
    broken = []
    for chunk, row, token, logprob in current.read():
        if token == NOT_FINITE:
            broken.append(chunk)
            continue
        for sequence in answers_due(chunk.sequence):
            request, step = sequence.request, sequence.num_tokens - sequence.num_prompt
            if request.temperature > 0:
                token, logprob = sample(
                    current.logits[row], request.temperature, request.top_p, sequence.sampler_key, step
                )
            sequence.append(token, logprob)
            if token in eos_token_ids and not request.ignore_eos:
                sequence.finish_reason = "stop"
            elif sequence.num_tokens == sequence.limit:
                sequence.finish_reason = "length"
    return broken


def _score(current: Pass) -> list[Chunk]:
    """Note what the model says of the prompts; a prompt without an answer ends with its last token."""
    broken = []
    for chunk, scores in current.scores():
        if scores is None:
            broken.append(chunk)
            continue
        noted = chunk.sequence.scores
        assert noted is not None
        noted.logprobs += scores.logprobs
        noted.ranks += scores.ranks
        noted.top += scores.top
    for chunk in current.chunks:
        if chunk.end == chunk.sequence.num_prompt == chunk.sequence.limit:
            chunk.sequence.finish_reason = "length"
    return broken
