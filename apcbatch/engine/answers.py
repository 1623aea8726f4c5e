"""The answers of a pass: the next token of each sequence that is due one, and which chunks have none for what reason.

Must not know: slots, pages, the order of requests.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch

from apcbatch.engine.chooser import Chooser
from apcbatch.engine.failures import failed_choice, not_finite
from apcbatch.engine.forks import answers_due
from apcbatch.engine.runner import Chunk, Pass
from apcbatch.engine.sampler import NOT_FINITE, top_logprobs
from apcbatch.engine.sequence import Sequence
from apcbatch.errors import RequestError
from apcbatch.kernels.cpu.choose import token_logprob


def extend_answers(current: Pass, eos_token_ids: Collection[int]) -> dict[Chunk, RequestError]:
    """Give each sequence that is due a token its next one, and each that is scored its scores; returns the chunks that
    fail, with the reason.

    A chunk fails if its logits are not finite, or if its settings leave no token. One whose logits are finite, or that
    has none, still fails if a state that it keeps is not finite. Raises what the pass raised.
    """
    failed: dict[Chunk, RequestError] = {}
    due = current.read()
    for chunk, row, token, logprob in due:
        if token == NOT_FINITE:
            failed[chunk] = not_finite()
            continue
        try:
            for sequence in answers_due(chunk.sequence) if chunk.sequence.is_trunk else (chunk.sequence,):
                _extend(sequence, current.logits, row, token, logprob, eos_token_ids)
        except Exception as error:  # what makes an Ending or a Constraint, and they themselves, are the request's own
            failed[chunk] = failed_choice(error)
    if current.scores() or len(due) < len(current.chunks):
        failed |= dict.fromkeys(_score(current), not_finite())
    for chunk in current.not_finite():
        if chunk in current.chunks:
            failed.setdefault(chunk, not_finite())
    return failed


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


def _extend(
    sequence: Sequence, logits: torch.Tensor, row: int, token: int, logprob: float, eos_token_ids: Collection[int]
) -> None:
    """Give a sequence its next token. logits: the model's (rows, vocabulary) float32, of which it has the row; token,
    logprob: the likeliest of that row and its log-probability."""
    if sequence.is_plain:
        sequence.append(token, logprob)
        ends, reason = token in eos_token_ids and not sequence.request.ignore_eos, None
    else:
        ends, reason = _choose(sequence, logits[row], token, logprob, eos_token_ids)
    if ends:
        sequence.finish_reason, sequence.stop_reason = "stop", reason
    elif sequence.num_tokens == sequence.limit:
        sequence.finish_reason = "length"


def _choose(
    sequence: Sequence, row: torch.Tensor, likeliest: int, logprob: float, eos_token_ids: Collection[int]
) -> tuple[bool, int | str | None]:
    """Append the token that the request's settings choose; whether the answer ends with it, and its stop_reason."""
    request, step = sequence.request, sequence.num_tokens - sequence.num_prompt
    if sequence.chooser is None:
        prompt = sequence.tokens[: sequence.num_prompt]
        sequence.chooser = Chooser(request, prompt, row.numel(), eos_token_ids, sequence.sampler_key)
    token = likeliest
    if sequence.needs_logits:
        row = row.cpu()
        token = sequence.chooser.choose(row.numpy(), step)
        if token != likeliest:
            logprob = float(token_logprob(row, token)) if request.logprobs else math.nan
        if request.top_logprobs:
            likely = top_logprobs(row.numpy(), request.top_logprobs)
            sequence.top_logprobs.append([(one, logprob if one == token else value) for one, value in likely])
    sequence.append(token, logprob)
    return sequence.chooser.ends_with(token, step)
