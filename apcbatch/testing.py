"""Play an episode of tools with given answers, so that the user's code is tested without a model."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from apcbatch.tools import MOST_RESULT_BYTES, EpisodeCode, Message, tool_message, unknown_tool


@dataclass
class Played:
    """A played episode. messages: the whole transcript in OpenAI's form, beginning with those of the line. end: `done`,
    or `max_turns` if the answers were used up before. score: what `score` returned."""

    messages: list[Message] = field(default_factory=list)
    end: str = "max_turns"
    score: dict[str, Any] = field(default_factory=dict)


def play(factory: Callable[..., Any], line: Mapping[str, Any], answers: Iterable[Any], *, sample: int = 0) -> Played:
    """Play an episode, and close it.

    factory: as for --tools. line: the parsed line of INPUT. answers: what the model says, one for each turn: a text, a
    list of calls as (name, arguments), or a message in OpenAI's form. Raises ToolError, with the exception of the
    user's code as its cause, where a run would write an error record. Warns of a result that is cut.
    """
    with closing(EpisodeCode(factory, line, sample)) as code:
        body = line if "messages" in line else line.get("body") or {}
        tools = body.get("tools") or () if code.tools is None else code.tools
        played = Played([dict(message) for message in body.get("messages") or ()])
        for turn, answer in enumerate(answers, start=1):
            message = _message(answer, turn)
            played.messages.append(message)
            calls = message.get("tool_calls") or ()
            texts = [unknown_tool(call["function"]["name"], tools) for call in calls]
            known = [call["function"] for call, text in zip(calls, texts, strict=True) if text is None]
            found = code.call([(one["name"], json.loads(one["arguments"])) for one in known])
            for one in (one for one, (_, is_cut, _) in zip(known, found, strict=True) if is_cut):
                warnings.warn(f"the result of {one['name']} is cut at {MOST_RESULT_BYTES:,} bytes", stacklevel=2)
            results = iter(found)
            played.messages += [
                tool_message(call["id"], next(results)[0] if text is None else text)
                for call, text in zip(calls, texts, strict=True)
            ]
            said = None if calls else code.next(played.messages)
            if said is not None:
                played.messages.append(said)
            elif not calls:
                played.end = "done"
                break
        played.score = code.score(played.messages)
    return played


def _message(answer: Any, turn: int) -> Message:
    """Return an answer as a message in OpenAI's form, with an id for each call."""
    content, calls = (answer, []) if isinstance(answer, str) else (None, answer)
    if isinstance(answer, Mapping):
        content = answer.get("content")
        calls = [(one["function"]["name"], one["function"]["arguments"]) for one in answer.get("tool_calls") or ()]
    functions = [{"name": name, "arguments": one if isinstance(one, str) else json.dumps(one)} for name, one in calls]
    made = [
        {"id": f"call_{turn}_{index}", "type": "function", "function": function}
        for index, function in enumerate(functions)
    ]
    return {"role": "assistant", "content": content} | ({"tool_calls": made} if made else {})
