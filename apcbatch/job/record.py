"""The output record of one request: OpenAI's response body, and what was reused, as one JSON line.

Must not know: where lines go. Invariant: `error` is null if and only if the request succeeded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from apcbatch.data.render import Renderer
from apcbatch.data.tool_calls import parse_answer
from apcbatch.errors import RequestError
from apcbatch.types import Result


@dataclass(frozen=True, slots=True)
class Ticket:
    """One request's place in the job: its number in input order (from 0), line (from 1), turn, and names.

    turn is None where the record answers the line as a whole. completion: it came from /v1/completions.
    """

    number: int
    line: int
    turn: int | None
    custom_id: str | None
    conversation: str | None
    completion: bool = False

    @property
    def request_id(self) -> str:
        """`apc-000017`: the same in every part of a run."""
        return f"apc-{self.number:06d}"

    @property
    def shown(self) -> str:
        """What the terminal line calls it."""
        return self.custom_id or f"line-{self.line}"


def error_line(ticket: Ticket, error: RequestError) -> bytes:
    """The line of a request, or of a whole input line, that failed."""
    described = {
        "code": error.code,
        "message": error.message,
        "line": ticket.line if error.line is None else error.line,
        "retryable": error.retryable,
    }
    return _line(ticket, None, described, {"conversation": ticket.conversation})


def result_line(ticket: Ticket, result: Result, renderer: Renderer, model: str) -> bytes:
    """The line of a request that succeeded."""
    reuse = {
        "conversation": ticket.conversation,
        "cached_from": result.cached_from,
        "cached_tokens": result.cached_tokens,
        "computed_tokens": result.computed_tokens,
        "ideal_cached_tokens": result.ideal_cached_tokens,
        "boundary": result.boundary,
        "miss_reason": result.miss_reason,
        "prefill_ms": round(result.prefill_ms, 3),
        "decode_ms": round(result.decode_ms, 3),
        "completion_token_ids": result.token_ids,
    }
    body = {
        "object": "text_completion" if ticket.completion else "chat.completion",
        "model": model,
        "choices": [_choice(ticket, result, renderer)],
        "usage": {
            "prompt_tokens": result.prompt_tokens,
            "completion_tokens": len(result.token_ids),
            "total_tokens": result.prompt_tokens + len(result.token_ids),
            "prompt_tokens_details": {"cached_tokens": result.cached_tokens},
        },
    }
    response = {"status_code": 200, "request_id": ticket.request_id, "body": body}
    return _line(ticket, response, None, reuse)


def _choice(ticket: Ticket, result: Result, renderer: Renderer) -> dict[str, Any]:
    text = renderer.decode(result.token_ids)
    choice: dict[str, Any] = {"index": 0, "finish_reason": result.finish_reason}
    if ticket.completion:
        return {**choice, "text": text, "logprobs": _completion_logprobs(result, renderer)}
    answer = parse_answer(text)
    message = {"role": "assistant", "content": answer.content, "tool_calls": answer.tool_calls}
    return {**choice, "message": message, "logprobs": _chat_logprobs(result, renderer)}


def _chat_logprobs(result: Result, renderer: Renderer) -> dict[str, Any] | None:
    if result.logprobs is None:
        return None
    entries = []
    for token_id, logprob in zip(result.token_ids, result.logprobs, strict=True):
        text = _token_text(token_id, renderer)
        # A token that is a part of a character has no text, hence no bytes that could be told from its text.
        raw = None if "\ufffd" in text else list(text.encode())
        entries.append({"token": text, "logprob": logprob, "bytes": raw, "top_logprobs": []})
    return {"content": entries}


def _completion_logprobs(result: Result, renderer: Renderer) -> dict[str, Any] | None:
    if result.logprobs is None:
        return None
    tokens = [_token_text(token_id, renderer) for token_id in result.token_ids]
    offsets = [0]
    for text in tokens[:-1]:
        offsets.append(offsets[-1] + len(text))
    return {"tokens": tokens, "token_logprobs": result.logprobs, "top_logprobs": None, "text_offset": offsets}


def _token_text(token_id: int, renderer: Renderer) -> str:
    """One token as text, a special one by its name."""
    return str(renderer.tokenizer.source.decode([token_id], skip_special_tokens=False))


def _line(ticket: Ticket, response: Any, error: Any, reuse: Any) -> bytes:
    record = {
        "id": ticket.request_id,
        "custom_id": ticket.custom_id,
        "line": ticket.line,
        "turn": ticket.turn,
        "response": response,
        "error": error,
        "apcbatch": reuse,
    }
    return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
