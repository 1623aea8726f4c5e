"""What a record tells of its prompt's tokens: its text before an answer, their log-probabilities, a recorded answer.

Must not know: how scores are computed, where records go. Shapes: `prompt_logprobs` is vLLM's, `score` is our own.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from apcbatch.data.render import Renderer
from apcbatch.prefix import TokenArray
from apcbatch.types import Result, Scores


@dataclass(frozen=True, slots=True, eq=False)
class ShownPrompt:
    """token_ids: the prompt's. text: as it was given, or None if it came as token ids. echo: it stands before the
    answer, with the num_top likeliest tokens for each one where there are log-probabilities. prompt_logprobs: how many
    of the likeliest tokens are told of each one; None if nothing is told. answer_begin: where the recorded answer
    begins that was scored, or None."""

    token_ids: TokenArray
    text: str | None = None
    echo: bool = False
    num_top: int = 0
    prompt_logprobs: int | None = None
    answer_begin: int | None = None

    def shown_text(self, renderer: Renderer) -> str:
        """The prompt's text; of token ids, special ones by their names."""
        return self.text if self.text is not None else _text(self.token_ids.tolist(), renderer)

    def recorded_answer(self, result: Result, eos_token_ids: Collection[int]) -> Result:
        """The recorded answer with its log-probabilities, as a result of its own."""
        assert result.scores is not None
        token_ids = self.token_ids[self.answer_begin :].tolist()
        ended = token_ids[-1] in eos_token_ids
        return replace(
            result,
            token_ids=token_ids,
            logprobs=result.scores.logprobs,
            finish_reason="stop" if ended else "length",
        )

    def told(self, result: Result, renderer: Renderer) -> dict[str, Any]:
        """The keys of the record beside the body that tell of the prompt."""
        scores, told = result.scores, dict[str, Any]()
        if scores is not None and self.prompt_logprobs is not None:
            told["prompt_logprobs"] = self._prompt_logprobs(scores, self.prompt_logprobs, renderer)
        if scores is not None and self.answer_begin is not None:
            told["score"] = self._score(scores)
        return told

    def _prompt_logprobs(self, scores: Scores, count: int, renderer: Renderer) -> list[dict[str, Any] | None]:
        """For each token, by their ids, itself and the likeliest ones; nothing is known of the first."""
        entries: list[dict[str, Any] | None] = [None]
        tops = scores.top or [[]] * len(scores.logprobs)
        for token, logprob, rank, top in zip(
            self.token_ids[1:].tolist(), scores.logprobs, scores.ranks, tops, strict=True
        ):
            places = {token: (logprob, rank)}
            places |= {one: (value, place) for place, (one, value) in enumerate(top[:count], start=1)}
            entries.append(
                {
                    str(one): {"logprob": value, "rank": place, "decoded_token": _text([one], renderer)}
                    for one, (value, place) in places.items()
                }
            )
        return entries

    def _score(self, scores: Scores) -> dict[str, Any]:
        matches = sum(rank == 1 for rank in scores.ranks)
        return {
            "tokens": len(scores.logprobs),
            "logprob_sum": sum(scores.logprobs),
            "greedy_matches": matches,
            "exact_match": matches == len(scores.ranks),
            "token_ids": self.token_ids[self.answer_begin :].tolist(),
            "token_logprobs": scores.logprobs,
            "token_ranks": scores.ranks,
        }


def _text(token_ids: list[int], renderer: Renderer) -> str:
    return renderer.tokenizer.decode_all(token_ids)
