"""Choose the turns of a conversation that are requests, and the number of messages before each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from apcbatch.data.input.messages import Message
from apcbatch.errors import RequestError
from apcbatch.formats import Turns

# Limit of the messages rendered for a conversation: the sum over its turns of the messages before each.
MAX_RENDERED_MESSAGES = 1 << 24


class Turn(NamedTuple):
    """One turn to answer. number: its number among the assistant turns, from 1. num_messages: messages before it."""

    number: int
    num_messages: int


def choose_turns(messages: Sequence[Message], turns: Turns) -> list[Turn]:
    """Choose the turns to answer in a conversation of at least one message, in order.

    turns: with `each` and `rollout`, every assistant turn, and one more if the conversation ends with another role;
    with `last`, the turn after the last message that is not from the assistant. RequestError if there is no such turn,
    or if the messages before each turn, summed over the turns, are more than MAX_RENDERED_MESSAGES.
    """
    if turns == "last":
        return [_last_turn(messages)]
    chosen = _assistant_turns(messages)
    if messages[-1]["role"] != "assistant":
        chosen.append(Turn(len(chosen) + 1, len(messages)))
    return _checked(chosen)


def recorded_turns(messages: Sequence[Message], turns: Turns) -> list[Turn]:
    """Choose the turns with a recorded answer: all, or with `last` the last one.

    RequestError if there is none, or if the messages before each turn, summed over the turns, are more than
    MAX_RENDERED_MESSAGES."""
    chosen = _assistant_turns(messages)
    if not chosen:
        raise RequestError("invalid_request", "no message is from the assistant; there is no recorded answer to score")
    return _checked(chosen[-1:] if turns == "last" else chosen)


def _assistant_turns(messages: Sequence[Message]) -> list[Turn]:
    ends = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    return [Turn(number, end) for number, end in enumerate(ends, start=1)]


def _checked(turns: list[Turn]) -> list[Turn]:
    total = sum(turn.num_messages for turn in turns)
    if total > MAX_RENDERED_MESSAGES:
        raise RequestError(
            "invalid_request",
            f"the {len(turns):,} turns have {total:,} messages before them in all; at most "
            f"{MAX_RENDERED_MESSAGES:,} are rendered for one line: split the conversation, or give --turns last",
        )
    return turns


def _last_turn(messages: Sequence[Message]) -> Turn:
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    if not end:
        raise RequestError("invalid_request", "every message is from the assistant; there is no last turn to answer")
    return Turn(1 + sum(message["role"] == "assistant" for message in messages[:end]), end)
