"""Check the parts of an OpenAI Batch line: custom_id, method, url and body, and the prompt of a completion."""

from __future__ import annotations

from typing import Any

from apcbatch.data.checks import invalid, is_integer, need_object, need_string, required, shown, wrong
from apcbatch.data.fields import Shape, check_body
from apcbatch.formats import CHAT_URL, COMPLETIONS_URL

_SHAPES: dict[str, Shape] = {CHAT_URL: "chat", COMPLETIONS_URL: "completions"}


def check_batch(record: dict[str, Any]) -> tuple[str, Shape, dict[str, Any]]:
    """Check a batch line; return (custom_id, shape of the body by its url, body). RequestError for an invalid part."""
    custom_id = need_string(record, "custom_id", "custom_id", "a string that is not empty")
    if not custom_id:
        raise wrong("custom_id", custom_id, "a string that is not empty")
    if need_string(record, "method", "method", "POST") != "POST":
        raise invalid(f"method is {shown(record['method'])}; expected POST")
    urls = " or ".join(_SHAPES)
    url = need_string(record, "url", "url", urls)
    if url not in _SHAPES:
        raise wrong("url", url, urls)
    expected = "an object with messages or a prompt"
    body = need_object(required(record, "body", "body", expected), "body", expected)
    check_body(body, _SHAPES[url])
    return custom_id, _SHAPES[url], body


def check_prompt(body: dict[str, Any]) -> str | list[int]:
    """Return the prompt of a completion: a text, or a list of token ids. RequestError for any other value."""
    expected = "a string or a list of token ids"
    prompt = required(body, "prompt", "body.prompt", expected)
    if not isinstance(prompt, (str, list)):
        raise wrong("body.prompt", prompt, expected)
    if not prompt:
        raise invalid("body.prompt is empty; expected at least one token")
    for index, item in enumerate(prompt if isinstance(prompt, list) else ()):
        if not is_integer(item) or item < 0:
            raise wrong(f"body.prompt[{index}]", item, "a token id; one line asks for one completion")
    return prompt
