"""Lines of an OpenAI Batch file: method, url and body become messages or a prompt, and parameters.

Must not know: lines, files, templates, tokens. A parameter that would change the answer and is not supported is
refused, unless its value changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from apcbatch.data.checks import (
    invalid,
    is_integer,
    missing,
    need_object,
    need_string,
    optional_flag,
    optional_integer,
    optional_number,
    optional_string,
    shown,
    wrong,
)
from apcbatch.data.messages import Message, Tool, check_messages, check_tools
from apcbatch.formats import CHAT_URL, COMPLETIONS_URL

_MAX_TEMPERATURE = 2.0
_UINT64_MAX = 2**64 - 1


@dataclass(slots=True)
class BatchBody:
    """What a batch line asks for: messages and tools for a chat, or a prompt (text or ids) for a completion."""

    custom_id: str
    messages: list[Message]
    tools: list[Tool] | None
    prompt: str | list[int] | None
    params: dict[str, Any]


def check_batch(record: dict[str, Any]) -> BatchBody:
    """Check a batch line; RequestError invalid_request for anything that cannot be answered."""
    custom_id = need_string(record, "custom_id", "custom_id", "a string that is not empty")
    if not custom_id:
        raise wrong("custom_id", custom_id, "a string that is not empty")
    if need_string(record, "method", "method", "POST") != "POST":
        raise invalid(f"method is {shown(record['method'])}; expected POST")
    urls = f"{CHAT_URL} or {COMPLETIONS_URL}"
    url = need_string(record, "url", "url", urls)
    if url not in (CHAT_URL, COMPLETIONS_URL):
        raise wrong("url", url, urls)
    if "body" not in record:
        raise missing("body", "an object with messages or a prompt")
    body = need_object(record["body"], "body", "an object with messages or a prompt")
    _refuse_unsupported(body)
    params = check_params(body, url)
    if url == COMPLETIONS_URL:
        return BatchBody(custom_id, [], None, _check_prompt(body), params)
    if "messages" not in body:
        raise missing("body.messages", "a list of messages")
    messages = check_messages(body["messages"], "body.messages")
    tools = check_tools(body.get("tools"), "body.tools")
    if body.get("tool_choice") == "none":
        tools = None
    return BatchBody(custom_id, messages, tools, None, params)


def _check_prompt(body: dict[str, Any]) -> str | list[int]:
    expected = "a string or a list of token ids"
    if "prompt" not in body:
        raise missing("body.prompt", expected)
    prompt = body["prompt"]
    if isinstance(prompt, str):
        if not prompt:
            raise invalid("body.prompt is empty; expected at least one token")
        return prompt
    if not isinstance(prompt, list):
        raise wrong("body.prompt", prompt, expected)
    if not prompt:
        raise invalid("body.prompt is empty; expected at least one token")
    for index, item in enumerate(prompt):
        if not is_integer(item) or item < 0:
            raise wrong(f"body.prompt[{index}]", item, "a token id; one line asks for one completion")
    return prompt


def check_params(body: dict[str, Any], url: str) -> dict[str, Any]:
    """The request parameters that the body sets; null sets nothing."""
    max_tokens = optional_integer(body, "max_tokens", "body.max_tokens", least=1)
    newer = optional_integer(body, "max_completion_tokens", "body.max_completion_tokens", least=1)
    top_p = optional_number(body, "top_p", "body.top_p", 0.0, 1.0)
    if top_p == 0.0:
        raise wrong("body.top_p", body["top_p"], "a number above 0 and up to 1")
    seed = optional_integer(body, "seed", "body.seed")
    params = {
        "max_tokens": max_tokens if newer is None else newer,
        "temperature": optional_number(body, "temperature", "body.temperature", 0.0, _MAX_TEMPERATURE),
        "top_p": top_p,
        "seed": None if seed is None else seed & _UINT64_MAX,
        "logprobs": _check_logprobs(body, url),
        "ignore_eos": optional_flag(body, "ignore_eos", "body.ignore_eos"),
    }
    return {key: value for key, value in params.items() if value is not None}


def _check_logprobs(body: dict[str, Any], url: str) -> bool | None:
    """Chats turn logprobs on with true, completions with a number of alternatives, of which none are given."""
    if url == CHAT_URL:
        return optional_flag(body, "logprobs", "body.logprobs")
    value = body.get("logprobs")
    if value is None:
        return None
    if not is_integer(value) or value not in (0, 1):
        raise wrong("body.logprobs", value, "0 or 1: only the chosen token's log-probability is given")
    return True


def _refuse_unsupported(body: dict[str, Any]) -> None:
    """Refuse every unsupported parameter, unless its value changes nothing."""
    if optional_flag(body, "stream", "body.stream"):
        raise invalid("body.stream is true; a batch is answered in one piece: leave stream out")
    for key in ("n", "best_of"):
        count = optional_integer(body, key, f"body.{key}", least=1)
        if count not in (None, 1):
            raise wrong(f"body.{key}", count, "1: one line asks for one answer")
    optional_string(body, "model", "body.model")
    for key, (is_neutral, neutral) in _NEUTRAL.items():
        value = body.get(key)
        if value is not None and not is_neutral(value):
            raise invalid(f"body.{key} is {shown(value)}, which is not supported; leave it out or give {neutral}")


def _zero(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float)) and value == 0


def _one(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float)) and value == 1


def _empty(value: object) -> bool:
    return isinstance(value, (str, list, dict)) and not value


_NEUTRAL: dict[str, tuple[Callable[[Any], bool], str]] = {
    "stop": (_empty, "null"),
    "stop_token_ids": (_empty, "null"),
    "suffix": (_empty, "null"),
    "logit_bias": (_empty, "null"),
    "frequency_penalty": (_zero, "0"),
    "presence_penalty": (_zero, "0"),
    "repetition_penalty": (_one, "1"),
    "min_tokens": (_zero, "0"),
    "min_p": (_zero, "0"),
    "top_k": (lambda value: is_integer(value) and value in (-1, 0), "0"),
    "top_logprobs": (_zero, "0"),
    "echo": (lambda value: value is False, "false"),
    "functions": (_empty, "null"),
    "function_call": (lambda value: value in ("none", "auto"), "null"),
    "tool_choice": (lambda value: value in ("none", "auto"), '"auto" or "none"'),
    "response_format": (lambda value: value == {"type": "text"}, '{"type": "text"}'),
    "modalities": (lambda value: value == ["text"], '["text"]'),
}
