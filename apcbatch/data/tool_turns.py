"""In a rollout, the recorded messages of tools answer the calls that were generated: their ids follow.

Must not know: texts, tokens, templates.
"""

from __future__ import annotations

from collections.abc import Sequence

from apcbatch.data.messages import Message
from apcbatch.data.tool_parser import Call


def follow_calls(
    recorded: Message, calls: Sequence[Call], rest: Sequence[Message], turn: int
) -> tuple[list[Message], tuple[str, ...]]:
    """The messages behind an answer, with the ids of its calls, and a sentence if their numbers differ.

    recorded: the assistant's message that the answer stands for. calls: those that were generated. rest: the messages
    up to the next answer. Each message of a tool gets the first call with its tool's name that is left, else the first
    that is left; without one it stays as it is recorded.
    """
    places = [place for place, message in enumerate(rest) if message["role"] == "tool"]
    names = {
        call["id"]: call["function"]["name"] for call in recorded.get("tool_calls", ()) if call.get("id") is not None
    }
    left = list(calls)
    chosen: dict[int, Call] = {}
    for place in places:
        name = rest[place].get("name") or names.get(rest[place].get("tool_call_id"))
        call = next((call for call in left if call.name == name), None)
        if call is not None:
            left.remove(call)
            chosen[place] = call
    for place in places:
        if place not in chosen and left:
            chosen[place] = left.pop(0)
    messages = [
        {**message, "tool_call_id": chosen[place].id} if place in chosen else message
        for place, message in enumerate(rest)
    ]
    if len(calls) == len(places):
        return messages, ()
    made = "1 tool call" if len(calls) == 1 else f"{len(calls):,} tool calls"
    answers = (
        "1 recorded message of a tool follows"
        if len(places) == 1
        else (f"{len(places):,} recorded messages of tools follow")
    )
    return messages, (f"turn {turn} generated {made}, and {answers}",)
