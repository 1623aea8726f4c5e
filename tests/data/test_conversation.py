"""Turns: which requests a conversation makes."""

from __future__ import annotations

import pytest

from apcbatch.data.conversation import choose_turns, recorded_turns
from apcbatch.errors import RequestError
from apcbatch.formats import Turns
from tests.effort import table

ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}


@table("roles, each, last", [
    ("ua", [(1, 1)], (1, 1)), ("u", [(1, 1)], (1, 1)), ("s", [(1, 1)], (1, 1)), ("suau", [(1, 2), (2, 4)], (2, 4)),
    ("suauatata", [(1, 2), (2, 4), (3, 6), (4, 8)], (4, 8)),
    ("suaat", [(1, 2), (2, 3), (3, 5)], (3, 5)), ("uaa", [(1, 1), (2, 2)], (1, 1)),
    ("auau", [(1, 0), (2, 2), (3, 4)], (3, 4)), ("aa", [(1, 0), (2, 1)], None),
])  # fmt: skip
def test_turns(roles: str, each: list[tuple[int, int]], last: tuple[int, int] | None) -> None:
    """Every assistant turn and an answer that is missing at the end; or the last such place alone."""
    messages = [{"role": ROLES[role]} for role in roles]
    ways: tuple[Turns, ...] = ("each", "rollout")
    for turns in ways:
        assert choose_turns(messages, turns) == each
    if last is None:
        with pytest.raises(RequestError, match="every message is from the assistant"):
            choose_turns(messages, "last")
    else:
        assert choose_turns(messages, "last") == [last]


def test_the_work_of_one_line_is_bounded() -> None:
    """Catches one line of a million short turns: each renders all before it, which never ends."""
    messages = [{"role": role, "content": ""} for role in ("user", "assistant")] * 4_096
    assert len(choose_turns(messages, "each")) == 4_096
    beyond = "4,096 turns have 16,781,312 messages before them in all; at most 16,777,216 are rendered"
    with pytest.raises(RequestError, match=beyond):
        recorded_turns([{"role": "system", "content": ""}, *messages], "each")
    many = messages * 2
    for turns in ("each", "rollout"):
        with pytest.raises(RequestError, match="8,192 turns have .* split the conversation, or give --turns last"):
            choose_turns(many, turns)
    assert choose_turns(many, "last")[0].number == 8_192
    assert recorded_turns(many, "last") == [(8_192, 16_383)]
