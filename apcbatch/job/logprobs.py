"""Put log-probabilities into a record: answers in OpenAI's format, `prompt_logprobs` in vLLM's, `score` in our own.

An answer has an entry for each token up to the end of its text, and for the model's own stop token.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from apcbatch.data.chat.render import Renderer
from apcbatch.prefix import TokenArray
from apcbatch.types import Result, Scores


@dataclass(frozen=True, slots=True, eq=False)
class PromptFields:
    """Data of a prompt that its record shows.

    token_ids: the prompt; for scoring, followed by the recorded answer. text: the prompt as it was given; None for
    token ids and chats. echo: put the prompt before the answer; with log-probabilities, list the num_top likeliest
    tokens at each of its positions. prompt_logprobs: number of likeliest tokens listed at each prompt position; None
    for no list. answer_begin: position of the recorded answer to score, or None. shows_ids: the body has the token ids
    of prompt and answers.
    """

    token_ids: TokenArray
    text: str | None = None
    echo: bool = False
    num_top: int = 0
    prompt_logprobs: int | None = None
    answer_begin: int | None = None
    shows_ids: bool = False

    def shown_text(self, renderer: Renderer) -> str:
        """Return the prompt's text; token ids are decoded, special tokens as their names."""
        return self.text if self.text is not None else renderer.tokenizer.decode_all(self.token_ids.tolist())

    def recorded_answer(self, result: Result, eos_token_ids: Collection[int]) -> Result:
        """Return the recorded answer and its log-probabilities as a Result."""
        assert result.scores is not None
        token_ids = self.token_ids[self.answer_begin :].tolist()
        ended = token_ids[-1] in eos_token_ids
        return replace(
            result,
            token_ids=token_ids,
            logprobs=result.scores.logprobs,
            finish_reason="stop" if ended else "length",
        )

    def record_fields(self, result: Result, renderer: Renderer) -> dict[str, Any]:
        """Return `prompt_logprobs` and `score` of the record, each only if it was asked for."""
        scores, found = result.scores, dict[str, Any]()
        if scores is not None and self.prompt_logprobs is not None:
            found["prompt_logprobs"] = self._prompt_logprobs(scores, self.prompt_logprobs, renderer)
        if scores is not None and self.answer_begin is not None:
            found["score"] = self._score(scores)
        return found

    def _prompt_logprobs(self, scores: Scores, count: int, renderer: Renderer) -> list[dict[str, Any] | None]:
        """Return an entry for each prompt token. It maps token ids (as text) to log-probability, rank and text, for the
        token itself and the `count` likeliest. The first token's entry is None."""
        entries: list[dict[str, Any] | None] = [None]
        tops = scores.top or [[]] * len(scores.logprobs)
        for token, logprob, rank, top in zip(
            self.token_ids[1:].tolist(), scores.logprobs, scores.ranks, tops, strict=True
        ):
            places = {token: (logprob, rank)}
            places |= {one: (value, place) for place, (one, value) in enumerate(top[:count], start=1)}
            entries.append(
                {
                    str(one): {"logprob": value, "rank": place, "decoded_token": _text(one, renderer)}
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


def chat_logprobs(result: Result, num_tokens: int, renderer: Renderer) -> dict[str, Any] | None:
    """Return the log-probabilities of the first num_tokens tokens of a chat answer; None if not asked for."""
    if result.logprobs is None:
        return None
    likely = result.top_logprobs or [[]] * num_tokens
    entries = [
        _entry(token_id, logprob, renderer) | {"top_logprobs": [_entry(one, value, renderer) for one, value in top]}
        for token_id, logprob, top in zip(result.token_ids[:num_tokens], result.logprobs, likely, strict=False)
    ]
    return {"content": entries, "refusal": None}


def completion_logprobs(
    result: Result, num_tokens: int, renderer: Renderer, echoed: PromptFields | None
) -> dict[str, Any] | None:
    """Return the log-probabilities of the first num_tokens tokens of a completion; None if not asked for. echoed: the
    prompt, whose tokens come first. Its first token has no log-probability, because nothing precedes it.

    top_logprobs: for each token, an object from text to log-probability of the likeliest tokens and the token itself.
    Of two tokens with the same text, the less likely one is called `token_id:<id>`.
    """
    if result.logprobs is None:
        return None
    token_ids = result.token_ids[:num_tokens]
    logprobs: list[float | None] = [*result.logprobs[:num_tokens]]
    likely = result.top_logprobs
    if echoed is not None and result.scores is not None:
        token_ids = echoed.token_ids.tolist() + token_ids
        logprobs = [None, *result.scores.logprobs, *logprobs]
        if likely is not None:
            likely = [[], *(top[: echoed.num_top] for top in result.scores.top), *likely]
    tokens = [_text(token_id, renderer) for token_id in token_ids]
    offsets = [0]
    for text in tokens[:-1]:
        offsets.append(offsets[-1] + len(text))
    top = None
    if likely is not None:
        chosen = zip(token_ids, logprobs, likely, strict=False)
        top = [
            None if logprob is None else _by_text([*likely, (token, logprob)], renderer)
            for token, logprob, likely in chosen
        ]
    return {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": top,
        "text_offset": offsets[: len(tokens)],
    }


def _entry(token_id: int, logprob: float, renderer: Renderer) -> dict[str, Any]:
    text = _text(token_id, renderer)
    # A token that is only part of a character has no text of its own, so its bytes are not known.
    return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}


def _by_text(likely: list[tuple[int, float]], renderer: Renderer) -> dict[str, float]:
    found: dict[str, float] = {}
    for token_id, logprob in dict(likely).items():
        text = _text(token_id, renderer)
        found[text if text not in found else f"token_id:{token_id}"] = logprob
    return found


def _text(token_id: int, renderer: Renderer) -> str:
    """Return the text of one token; a special token is shown by its name."""
    return renderer.tokenizer.decode_all([token_id])
