"""Play an episode of tools with given answers, so that the user's code is tested without a model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from apcbatch.tools import EpisodeCode, Message, tool_message, unknown_tool


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
    user's code as its cause, where a run would write an error record.
    """
    loop = asyncio.new_event_loop()
    try:
        code = EpisodeCode(factory, line, sample, loop.run_until_complete)
        body = line if "messages" in line else line.get("body") or {}
        tools = body.get("tools") or () if code.tools is None else code.tools
        played = Played([dict(message) for message in body.get("messages") or ()])
        try:
            for turn, answer in enumerate(answers, start=1):
                message = _message(answer, turn)
                played.messages.append(message)
                for call in message.get("tool_calls") or ():
                    name, arguments = call["function"]["name"], call["function"]["arguments"]
                    text = unknown_tool(name, tools) or code.call(name, json.loads(arguments))[0]
                    played.messages.append(tool_message(call["id"], text))
                if not message.get("tool_calls"):
                    said = code.next(played.messages)
                    if said is None:
                        played.end = "done"
                        break
                    played.messages.append(said)
            played.score = code.score(played.messages)
        finally:
            code.close()
        return played
    finally:
        loop.close()


def _message(answer: Any, turn: int) -> Message:
    """Return an answer as a message in OpenAI's form, with an id for each call."""
    if isinstance(answer, str):
        return {"role": "assistant", "content": answer}
    if isinstance(answer, Mapping):
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in answer.get("tool_calls") or ()]
        content = answer.get("content")
    else:
        calls, content = list(answer), None
    made = [
        {
            "id": f"call_{turn}_{index}",
            "type": "function",
            "function": {"name": name, "arguments": given if isinstance(given, str) else json.dumps(given)},
        }
        for index, (name, given) in enumerate(calls)
    ]
    return {"role": "assistant", "content": content} | ({"tool_calls": made} if made else {})
