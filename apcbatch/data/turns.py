"""Which turns of a conversation are requests, and how much of the history each one sees.

Must not know: templates, tokens. Every function is pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from apcbatch.data.messages import Message
from apcbatch.errors import RequestError
from apcbatch.formats import Turns

# Each turn's prompt is rendered from its own history. This bounds the messages of all turns of a conversation together.
MAX_RENDERED_MESSAGES = 1 << 24


class Turn(NamedTuple):
    """One request of a conversation: the number of the assistant turn, from 1, and the messages before it."""

    number: int
    num_messages: int


def choose_turns(messages: Sequence[Message], turns: Turns) -> list[Turn]:
    """The requests of a conversation of at least one message, in order.

    each, rollout: every assistant turn, and one more for the missing answer if the conversation ends with another role.
    last: the turn after the last message that is not from the assistant. Raises RequestError if there is no such turn,
    and for more turns than can be rendered: their work grows with their square.
    """
    ends = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if turns == "last":
        return [_last_turn(messages)]
    if messages[-1]["role"] != "assistant":
        ends.append(len(messages))
    chosen = [Turn(number, end) for number, end in enumerate(ends, start=1)]
    _check_rendered(chosen)
    return chosen


def recorded_turns(messages: Sequence[Message], turns: Turns) -> list[Turn]:
    """The turns whose answer is recorded: each of them, or the last one. Raises RequestError if there is none, and for
    more than can be rendered."""
    ends = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not ends:
        raise RequestError("invalid_request", "no message is from the assistant; there is no recorded answer to score")
    chosen = [Turn(number, end) for number, end in enumerate(ends, start=1)]
    chosen = chosen[-1:] if turns == "last" else chosen
    _check_rendered(chosen)
    return chosen


def _check_rendered(turns: Sequence[Turn]) -> None:
    total = sum(turn.num_messages for turn in turns)
    if total > MAX_RENDERED_MESSAGES:
        raise RequestError(
            "invalid_request",
            f"the {len(turns):,} turns have {total:,} messages before them in all; at most "
            f"{MAX_RENDERED_MESSAGES:,} are rendered for one line: split the conversation, or give --turns last",
        )


def _last_turn(messages: Sequence[Message]) -> Turn:
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    if not end:
        raise RequestError("invalid_request", "every message is from the assistant; there is no last turn to answer")
    return Turn(1 + sum(message["role"] == "assistant" for message in messages[:end]), end)
