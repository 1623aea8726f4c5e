"""Lines of an OpenAI Batch file: method, url and body become messages or a prompt, and settings.

Must not know: lines, files, templates, tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from apcbatch.data.checks import (
    invalid,
    is_integer,
    missing,
    need_object,
    need_string,
    shown,
    wrong,
)
from apcbatch.data.fields import check_body
from apcbatch.data.messages import Message, Tool, Unread, check_messages
from apcbatch.data.settings import Settings, check_settings, shown_tools
from apcbatch.data.structure import given_structure
from apcbatch.data.tools import check_tools
from apcbatch.formats import CHAT_URL, COMPLETIONS_URL


@dataclass(slots=True)
class BatchBody:
    """What a batch line asks for: messages and tools for a chat, or a prompt (text or ids) for a completion. warnings:
    sentences about what of it is not read."""

    custom_id: str
    messages: list[Message]
    tools: list[Tool] | None
    prompt: str | list[int] | None
    settings: Settings
    warnings: tuple[str, ...] = ()


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
    if url == COMPLETIONS_URL:
        check_body(body, "completions")
        settings = check_settings(body, "body.", counts_logprobs=True)
        settings.params.update(given_structure(body, None, "body."))
        return BatchBody(custom_id, [], None, _check_prompt(body), settings)
    check_body(body, "chat")
    settings = check_settings(body, "body.")
    if "messages" not in body:
        raise missing("body.messages", "a list of messages")
    unread = Unread()
    messages = check_messages(body["messages"], "body.messages", unread)
    tools = shown_tools(body, check_tools(body.get("tools"), "body.tools", unread))
    settings.params.update(given_structure(body, tools, "body."))
    return BatchBody(custom_id, messages, tools, None, settings, unread.warnings())


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
