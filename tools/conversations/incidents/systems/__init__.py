"""Incidents in the examples' three systems, with other faults, alerts and times than the examples' incidents.

Must not know: the held-out incidents themselves.
"""

from __future__ import annotations

from random import Random

from examples_text.script import Script

from conversations.incidents.systems import search
from conversations.incidents.systems.checkout import CHECKOUT
from conversations.incidents.systems.login import LOGIN
from conversations.incidents.systems.mail import MAIL

SYSTEMS = (CHECKOUT, MAIL, LOGIN)


def conversation(rng: Random, name: str) -> Script:
    """A search for a cause in one of the systems."""
    return search.conversation(rng, name, rng.choice(SYSTEMS))
