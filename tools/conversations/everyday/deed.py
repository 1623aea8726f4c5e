"""Deed: an everyday function, what people say when they want it, and what its answer sounds like.

A deed draws all of its fields at once: those named like a parameter are the arguments, those in `results` come back.
Must not know: how a conversation goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from conversations import words
from conversations.toolset import Function
from conversations.words import word_list

Fields = dict[str, Any]
CITIES = word_list("cities")


@dataclass(frozen=True)
class Deed:
    """One function with its sayings; `key` is the field that a vague request leaves out, after `question`."""

    function: Function
    draw: Callable[[Random], Fields]
    results: tuple[str, ...]
    asks: tuple[str, ...]
    answers: tuple[str, ...]
    vague: str = ""
    question: str = ""
    key: str = ""

    def arguments(self, fields: Fields) -> Fields:
        """The fields that the call takes."""
        return {key: fields[key] for key in self.function.parameters}

    def returned(self, fields: Fields) -> Fields:
        """The fields that come back."""
        return {key: fields[key] for key in self.results}


def city(rng: Random) -> str:
    """A city that there is, or a town that there is not."""
    return rng.choice(CITIES) if rng.random() < 0.7 else words.town(rng)


def person(rng: Random) -> str:
    """A first name and sometimes a last one."""
    first = words.given_name(rng)
    return first if rng.random() < 0.5 else f"{first} {words.family_name(rng)}"


def time(rng: Random) -> str:
    """A time of the day."""
    return f"{rng.randrange(5, 24):02d}:{rng.choice(('00', '15', '30', '45', '05', '20'))}"
