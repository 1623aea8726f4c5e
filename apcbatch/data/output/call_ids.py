"""Make ids of tool calls: a deterministic function of the answer's place in its conversation.

Invariants: all calls of a conversation, recorded ones included, have different ids. The same answer at the same place
has the same ids in every run.
"""

from __future__ import annotations

import string
from collections.abc import Collection, Iterator, Sequence

from apcbatch.data.conversation import Message
from apcbatch.data.output.tool_parser import Call, IdFormat

_DIGITS = string.digits + string.ascii_lowercase
_NINE = 9
_MOST_CHOICES, _MOST_CALLS = 1 << 10, 1 << 16
MOST_CHARACTERS = 64


def recorded_ids(messages: Sequence[Message]) -> frozenset[str]:
    """Collect the call ids in a conversation's messages."""
    answered = (message["tool_call_id"] for message in messages if "tool_call_id" in message)
    made = (call["id"] for message in messages for call in message.get("tool_calls", ()) if "id" in call)
    return frozenset((*made, *answered))


def call_ids(calls: Sequence[Call], form: IdFormat, turn: int, choice: int, used: Collection[str]) -> list[str]:
    """Return an id for each call: the one that the model wrote if it is valid and unused, else a generated one.

    form: format of the ids. A generated `plain` id is call_<turn>_<number>, followed by _<choice> if that is not 0. A
    `nine` id encodes the same three numbers in nine letters and digits. turn: number of the answer among the
    assistant's messages, from 1. choice: index among the answers to one prompt. used: ids in the conversation.
    """
    taken = set(used)
    found: list[str] = []
    for number, call in enumerate(calls, start=1):
        chosen = call.id
        if chosen is None or not _is_valid(chosen, form) or chosen in taken:
            chosen = next(name for name in _candidates(form, turn, choice, number) if name not in taken)
        taken.add(chosen)
        found.append(chosen)
    return found


def _is_valid(call_id: str, form: IdFormat) -> bool:
    if form == "nine":
        return len(call_id) == _NINE and call_id.isascii() and call_id.isalnum()
    return 0 < len(call_id) <= MOST_CHARACTERS and call_id.isprintable()


def _candidates(form: IdFormat, turn: int, choice: int, number: int) -> Iterator[str]:
    """Yield the id of the call `number` in an answer, then alternatives in case it is used already."""
    if form == "plain":
        name = f"call_{turn}_{number}" + (f"_{choice}" if choice else "")
        while True:
            yield name
            name += "x"
    place = (turn * _MOST_CHOICES + choice) * _MOST_CALLS + number
    while True:
        yield _nine_characters(place)
        place += _MOST_CHOICES * _MOST_CALLS << 20


def _nine_characters(value: int) -> str:
    digits = []
    for _ in range(_NINE):
        value, digit = divmod(value, len(_DIGITS))
        digits.append(_DIGITS[digit])
    return "".join(reversed(digits))
