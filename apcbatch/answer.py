"""Answer: one output record as an object, for programs; the kinds of its warnings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from apcbatch.errors import RequestError
from apcbatch.types import FinishReason

WarningKind = Literal[
    "unread_keys",
    "unread_options",
    "changed_content",
    "tools",
    "tool_results",
    "removed_nulls",
    "cut_reasoning",
    "unread_call",
    "dropped_calls",
    "unknown_tool",
    "rendered_again",
]
WARNING_KINDS: dict[WarningKind, str] = {
    "unread_keys": "keys of a message, or of what it holds, that nothing reads",
    "unread_options": "variables and other options that the chat template does not read",
    "changed_content": "a message that the template is given otherwise than it stands in the line",
    "tools": "a tool whose schema is not known",
    "tool_results": "messages of tools without a call, recorded ones or those of a rollout",
    "removed_nulls": "nulls that a table put into a JSON line, and that its prompt does not have",
    "cut_reasoning": "an answer that ends before its reasoning does",
    "unread_call": "an answer in which a tool call begins that cannot be read",
    "unknown_tool": "an answer that calls what the request does not offer as a tool",
    "rendered_again": "an answer whose text, in place of its tokens, is in the prompts of a live episode",
    "dropped_calls": "an answer with more calls than `parallel_tool_calls` allows",
}
"""Kind -> what its warnings are about."""
FINISH_REASONS = (*get_args(FinishReason), "tool_calls")


class AnswerWarning(str):
    """A sentence of a record's `apcbatch.warnings`, with its kind, by which a run sums warnings up."""

    __slots__ = ("kind",)

    def __new__(cls, kind: WarningKind, sentence: str) -> AnswerWarning:
        made = super().__new__(cls, sentence)
        made.kind = kind
        return made

    kind: WarningKind


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request, or its error.

    custom_id, line, turn: identify the request; line counts the given conversations, from 1. text: the answer without
    its tool calls and its reasoning. reasoning: the model's reasoning before the answer. tool_calls: in OpenAI's form,
    arguments as JSON text. message: the answer as a message, to be appended to the conversation; empty for a
    completion. finish_reason: `stop`, `length` or `tool_calls`. token_ids: the new tokens, the stop token included.
    logprobs: their log-probabilities up to the end of the text, if requested.

    cached_tokens: number of prompt tokens whose state was restored. cached_from: where that state was: `memory`, `disk`
    or `none`. miss_reason: why no more tokens were restored. warnings: what was honoured or read only in part. error:
    set if the request failed; the fields from text to warnings then have no meaning. record: the line that `apcbatch
    run` would write; its `response.body` parses as the `openai` package's types. With several choices, the fields here
    are those of the first.
    """

    custom_id: str | None
    line: int
    turn: int | None
    text: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    message: dict[str, Any] = field(default_factory=dict)
    finish_reason: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cached_from: str = "none"
    miss_reason: str | None = None
    warnings: list[str] = field(default_factory=list)
    error: RequestError | None = None
    record: dict[str, Any] = field(default_factory=dict, repr=False)


def answer_of(record: dict[str, Any]) -> Answer:
    """Convert an output record to an Answer."""
    place = (record["custom_id"], record["line"], record["turn"])
    if record["error"] is not None:
        error = record["error"]
        return Answer(*place, error=RequestError(error["code"], error["message"], error["line"]), record=record)
    body, reuse = record["response"]["body"], record["apcbatch"]
    choice = body["choices"][0]
    message = choice.get("message") or {}
    given = {name: value for name, value in message.items() if value not in (None, [])}
    text = choice.get("text") or message.get("content") or ""
    return Answer(
        *place,
        text,
        message.get("reasoning_content") or "",
        message.get("tool_calls") or [],
        given | {"content": text} if given else {},
        choice["finish_reason"],
        reuse["completion_token_ids"],
        _logprobs(choice["logprobs"]),
        body["usage"]["prompt_tokens"],
        reuse["cached_tokens"],
        reuse["cached_from"],
        reuse["miss_reason"],
        reuse["warnings"],
        record=record,
    )


def _logprobs(found: dict[str, Any] | None) -> list[float] | None:
    """Return the log-probability of each token, from the form of a chat or of a completion."""
    if found is None:
        return None
    if "content" in found:
        return [entry["logprob"] for entry in found["content"]]
    return list(found["token_logprobs"])
