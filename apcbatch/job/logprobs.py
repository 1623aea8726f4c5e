"""Log-probabilities in the shapes of OpenAI's bodies.

Must not know: how they were computed, where records go. Entries are of the answer's first tokens, up to the end of its
text; the model's own stop token is one of them.
"""

from __future__ import annotations

from typing import Any

from apcbatch.data.render import Renderer
from apcbatch.job.shown_prompt import ShownPrompt
from apcbatch.types import Result


def chat_logprobs(result: Result, num_tokens: int, renderer: Renderer) -> dict[str, Any] | None:
    """Those of the first num_tokens tokens of a chat's answer; None if they were not asked for."""
    if result.logprobs is None:
        return None
    likely = result.top_logprobs or [[]] * num_tokens
    entries = [
        _entry(token_id, logprob, renderer) | {"top_logprobs": [_entry(one, value, renderer) for one, value in top]}
        for token_id, logprob, top in zip(result.token_ids[:num_tokens], result.logprobs, likely, strict=False)
    ]
    return {"content": entries, "refusal": None}


def completion_logprobs(
    result: Result, num_tokens: int, renderer: Renderer, echoed: ShownPrompt | None = None
) -> dict[str, Any] | None:
    """Those of the first num_tokens tokens of a completion; None if they were not asked for. echoed: the prompt whose
    tokens come before them, the first one without any, as nothing comes before it.

    top_logprobs: for each token an object of the likeliest ones and itself, by their texts. Of two with the same text
    the less likely one is called `token_id:<id>`.
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
    """The text of one token; a special token is shown by its name."""
    return renderer.tokenizer.decode_all([token_id])
