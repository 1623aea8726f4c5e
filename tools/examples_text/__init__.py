"""The example conversations: an invented shop, small projects, a railway and three incidents.

Nothing here is copied from a dataset. Every draw comes from `random.Random` seeded with a conversation's own
name, so adding a conversation never changes another.
"""

from __future__ import annotations

from collections.abc import Iterator

from examples_text import coding, search_incident, search_rail, support
from examples_text.script import Script


def all_conversations() -> Iterator[Script]:
    """All kinds by turns, so that the beginning of the file shows each of them."""
    waiting = [support.conversations(), coding.conversations(), search_rail.conversations()]
    waiting.append(search_incident.conversations())
    while waiting:
        for kind in list(waiting):
            script = next(kind, None)
            if script is None:
                waiting.remove(kind)
            else:
                yield script
