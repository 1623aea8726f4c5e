"""Conversations without end: what the bundled model learns from, and what it is evaluated on.

A domain is a module that makes one conversation from a stream of draws; it is drawn again while one of its answers is
too long. Conversation i of a seed depends on the seed and i alone, so any worker can make any part. Nothing is stored
and nothing is copied from a dataset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from random import Random

from examples_text.script import Script

from conversations import calendars, coding, everyday, files, incidents, library, plain, rail, shops, support, tables
from conversations.lengths import is_short

# Each domain with its weight: how many conversations of it there are beside those of the others.
_WEIGHTED: tuple[tuple[str, Callable[[Random, str], Script], int], ...] = (
    ("support", support.conversation, 7),
    ("shops", shops.conversation, 4),
    ("rail", rail.conversation, 6),
    ("coding", coding.conversation, 7),
    ("incidents", incidents.conversation, 6),
    ("calendars", calendars.conversation, 2),
    ("files", files.conversation, 2),
    ("everyday", everyday.conversation, 2),
    ("library", library.conversation, 2),
    ("tables", tables.conversation, 2),
    ("plain", plain.conversation, 2),
)
DOMAINS: dict[str, Callable[[Random, str], Script]] = {name: make for name, make, _ in _WEIGHTED}
WEIGHTS: dict[str, int] = {name: weight for name, _, weight in _WEIGHTED}


def conversation(seed: str, index: int, domains: Sequence[str] | None = None) -> Script:
    """Conversation `index` of the seed, from one of the domains (all by default), named DOMAIN-SEED-INDEX.

    Raises KeyError for a domain that there is not.
    """
    names = list(DOMAINS) if domains is None else list(domains)
    rng = Random(f"{seed}/{index}")
    domain = rng.choices(names, [WEIGHTS[name] for name in names])[0]
    while not is_short(script := DOMAINS[domain](rng, f"{domain}-{seed}-{index}")):
        pass
    return script


def conversations(seed: str, domains: Sequence[str] | None = None) -> Iterator[Script]:
    """The conversations of the seed, one after the other, without end."""
    return (conversation(seed, index, domains) for index in count())
