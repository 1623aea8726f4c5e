"""The ids of generated tool calls: a function of the answer's place in its conversation, without chance.

Must not know: texts, tokens, records. Invariant: no two calls of one conversation have the same id, those that its
messages record included; the same answer at the same place has the same ids in every run.
"""

from __future__ import annotations

import string
from collections.abc import Collection, Iterator, Sequence

from apcbatch.data.messages import Message
from apcbatch.data.tool_parser import Call, IdForm

_DIGITS = string.digits + string.ascii_lowercase
_NINE = 9
_MOST_CHOICES, _MOST_CALLS = 1 << 10, 1 << 16
MOST_CHARACTERS = 64


def recorded_ids(messages: Sequence[Message]) -> frozenset[str]:
    """The ids of calls that a conversation's messages have."""
    answered = (message["tool_call_id"] for message in messages if "tool_call_id" in message)
    made = (call["id"] for message in messages for call in message.get("tool_calls", ()) if "id" in call)
    return frozenset((*made, *answered))


def call_ids(calls: Sequence[Call], form: IdForm, turn: int, choice: int, used: Collection[str]) -> list[str]:
    """One id for each call: the one that the model wrote, if it has the form and is new; else one of our own.

    turn: the number of the answer among the assistant's messages, from 1. choice: which of several answers, from 0.
    used: ids that the conversation has already. `plain`: call_<turn>_<number>, and behind it _<choice> if that is not
    0. `nine`: nine letters and digits that say the same.
    """
    taken = set(used)
    found: list[str] = []
    for number, call in enumerate(calls, start=1):
        own = call.id if call.id is not None and _has_form(call.id, form) else None
        chosen = own if own is not None and own not in taken else _free(form, turn, choice, number, taken)
        taken.add(chosen)
        found.append(chosen)
    return found


def _has_form(call_id: str, form: IdForm) -> bool:
    if form == "nine":
        return len(call_id) == _NINE and call_id.isascii() and call_id.isalnum()
    return 0 < len(call_id) <= MOST_CHARACTERS and call_id.isprintable()


def _free(form: IdForm, turn: int, choice: int, number: int, taken: set[str]) -> str:
    return next(name for name in _names(form, turn, choice, number) if name not in taken)


def _names(form: IdForm, turn: int, choice: int, number: int) -> Iterator[str]:
    """The id of a place, and others for it, should that one be taken."""
    if form == "plain":
        name = f"call_{turn}_{number}" + (f"_{choice}" if choice else "")
        while True:
            yield name
            name += "x"
    place = (turn * _MOST_CHOICES + choice) * _MOST_CALLS + number
    while True:
        yield _in_nine(place)
        place += _MOST_CHOICES * _MOST_CALLS << 20


def _in_nine(value: int) -> str:
    digits = []
    for _ in range(_NINE):
        value, digit = divmod(value, len(_DIGITS))
        digits.append(_DIGITS[digit])
    return "".join(reversed(digits))
