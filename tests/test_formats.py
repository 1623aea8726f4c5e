"""The closed sets of input formats, and the format that a record's keys tell."""

from __future__ import annotations

from apcbatch.formats import CONTENT_KEYS, FORMAT_CHOICES, FORMATS, ROLE_ALIASES, ROLES, SPEAKERS, TURNS, detect_format
from tests.effort import table


def test_the_sets_are_closed() -> None:
    """Fault: a choice of format or turns is added, dropped or renamed, which breaks commands that give it; a format has
    no key of its content, so that JSON text in a table's column stays a text."""
    assert FORMAT_CHOICES == ("auto", *FORMATS) == ("auto", "messages", "batch", "sharegpt")
    assert {detect_format({key: None}): key for key in CONTENT_KEYS.values()} == CONTENT_KEYS
    assert TURNS == ("each", "last", "rollout", "live")
    assert set(ROLE_ALIASES.values()) == set(SPEAKERS.values()) == set(ROLES)


@table("keys, found", [
    (["id", "messages"], "messages"), (["messages", "conversations"], "messages"),
    (["custom_id", "method", "url", "body"], "batch"),
    (["body"], "batch"), (["custom_id", "url"], "batch"), (["id", "conversations"], "sharegpt"), (["custom_id"], None),
    ([], None),
])  # fmt: skip
def test_the_keys_tell_the_format(keys: list[str], found: str | None) -> None:
    """A batch line without its body or its id is a faulty batch line, not a line of no format."""
    assert detect_format(dict.fromkeys(keys)) == found
