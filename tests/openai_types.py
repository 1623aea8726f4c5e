"""A record's response through the types of the `openai` package."""

from __future__ import annotations

import json
from typing import Any

from openai.types import Completion
from openai.types.chat import ChatCompletion
from pydantic import BaseModel


def parsed(record: dict[str, Any]) -> ChatCompletion | Completion:
    """The body of an answer as the package's type. ValidationError for a text in place of a number, and the like;
    AssertionError for a key that the type does not have, but for a message's `reasoning_content`, a text: that is what
    vLLM and DeepSeek call it, and the package keeps it."""
    assert list(record["response"]) == ["status_code", "request_id", "body"], record["response"].keys()
    body = record["response"]["body"]
    model = ChatCompletion if body["object"] == "chat.completion" else Completion
    completion = model.model_validate_json(json.dumps(body), strict=True)
    for choice in completion.choices if isinstance(completion, ChatCompletion) else []:
        assert isinstance((choice.message.model_extra or {}).pop("reasoning_content", ""), str)
    unknown = [one.model_extra for one in everything_in(completion) if one.model_extra]
    assert not unknown, f"keys that {model.__name__} does not have: {unknown}"
    assert completion.usage is not None and [choice.index for choice in completion.choices] == list(
        range(len(completion.choices))
    )
    return completion


def everything_in(model: BaseModel) -> list[BaseModel]:
    """A model and all models in it."""
    found = [model]
    for _, value in model:
        for one in value if isinstance(value, list) else [value]:
            found += everything_in(one) if isinstance(one, BaseModel) else []
    return found
