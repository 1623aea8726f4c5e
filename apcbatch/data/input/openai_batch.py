"""Check the parts of an OpenAI Batch line: custom_id, method, url and body, and the prompt of a completion.

Together, Mistral and Fireworks leave out method and url, and the urls of Azure have no `/v1`.
"""

from __future__ import annotations

from typing import Any

from apcbatch.data.checks import invalid, is_integer, need_object, need_string, required, shown, wrong
from apcbatch.data.fields import Shape, check_body
from apcbatch.data.input.known_formats import known_format
from apcbatch.formats import CHAT_URL, COMPLETIONS_URL

_SHAPES: dict[str, Shape] = {CHAT_URL: "chat", COMPLETIONS_URL: "completions"}
_SHAPES |= {url.removeprefix("/v1"): shape for url, shape in _SHAPES.items()}


def check_batch(record: dict[str, Any]) -> tuple[str, Shape, dict[str, Any]]:
    """Check a batch line; return (custom_id, shape of the body by its url, body). RequestError for an invalid part."""
    custom_id = need_string(record, "custom_id", "custom_id", "a string that is not empty")
    if not custom_id:
        raise wrong("custom_id", custom_id, "a string that is not empty")
    if record.get("method") not in (None, "POST"):
        raise invalid(f"method is {shown(record['method'])}; expected POST")
    expected = "an object with messages or a prompt"
    body = need_object(required(record, "body", "body", expected), "body", expected)
    shape = shape_of(record.get("url"), body)
    if shape is None:
        known = known_format(record)
        error = wrong("url", record["url"], f"{CHAT_URL} or {COMPLETIONS_URL}").message
        raise invalid(f"{error}; it seems to be {known}" if known else error)
    check_body(body, shape)
    return custom_id, shape, body


def shape_of(url: object, body: dict[str, Any]) -> Shape | None:
    """Return the shape of a body: by the url or, without one, by its keys. None for an unknown url."""
    if url is None:
        return "completions" if "prompt" in body and "messages" not in body else "chat"
    return _SHAPES.get(url) if isinstance(url, str) else None


def check_prompt(body: dict[str, Any]) -> str | list[int]:
    """Return the prompt of a completion: a text, or a list of token ids. A list of one of these is that one.
    RequestError for any other value."""
    expected = "a string or a list of token ids"
    prompt = required(body, "prompt", "body.prompt", expected)
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        [prompt] = prompt
    if not isinstance(prompt, (str, list)):
        raise wrong("body.prompt", prompt, expected)
    if not prompt:
        raise invalid("body.prompt is empty; expected at least one token")
    for index, item in enumerate(prompt if isinstance(prompt, list) else ()):
        if not is_integer(item) or item < 0:
            raise wrong(f"body.prompt[{index}]", item, "a token id; one line asks for one completion")
    return prompt
