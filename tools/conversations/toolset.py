"""Toolset: functions whose names, parameters and descriptions are drawn anew for each conversation.

A domain names its functions and parameters once, for itself, and writes alternatives for what the model sees; so
the model has to read the list of tools instead of knowing it. Must not know: what the functions do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from typing import Any

from examples_text.script import Call, Script

from conversations.words import say

Schema = dict[str, Any]
STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}
STRINGS: Schema = {"type": "array", "items": {"type": "string"}}
DAY: Schema = {"type": "string", "format": "date"}


@dataclass(frozen=True)
class Parameter:
    """Alternatives of its name and of its description, each between bars; its JSON schema without a description."""

    names: str
    about: str
    schema: Schema
    optional: bool = False


@dataclass(frozen=True)
class Function:
    """Alternatives of its name and of its description, each between bars; its parameters by the domain's own names."""

    names: str
    about: str
    parameters: dict[str, Parameter]


def needs(names: str, about: str, schema: Schema | None = None) -> Parameter:
    """A parameter that every call has; a string unless a schema is given."""
    return Parameter(names, about, schema or STRING)


def may(names: str, about: str, schema: Schema | None = None) -> Parameter:
    """A parameter that a call may leave out."""
    return Parameter(names, about, schema or STRING, optional=True)


def camel(name: str) -> str:
    """find_slots as findSlots."""
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


class Toolset:
    """The functions of one conversation under their drawn names."""

    def __init__(self, rng: Random, functions: dict[str, Function], others: Iterable[Function] = ()) -> None:
        """Draw names for functions, and for some of the others, which nobody calls; the order is drawn too."""
        style = rng.choices(("snake", "camel"), (3, 1))[0]
        self.tools: list[Schema] = []
        self._names: dict[str, str] = {}
        self._parameters: dict[tuple[str, str], str] = {}
        spare = [function for function in others if rng.random() < 0.4]
        rows = [*functions.items(), *(("", function) for function in spare)]
        described = rng.random() < 0.8  # whether parameters have descriptions
        taken: set[str] = set()
        for own, function in rng.sample(rows, len(rows)):
            self._add(rng, own, function, style, described, taken)

    def _add(self, rng: Random, own: str, function: Function, style: str, described: bool, taken: set[str]) -> None:
        """Draw one function; a name that another one has already drawn is drawn again."""
        spell = camel if style == "camel" else str
        choices = [name for name in map(spell, function.names.split("|")) if name not in taken]
        name = rng.choice(choices)
        taken.add(name)
        self._names[own] = name
        properties: Schema = {}
        required: list[str] = []
        for key, parameter in function.parameters.items():
            free = [shown for shown in map(spell, parameter.names.split("|")) if shown not in properties]
            shown = rng.choice(free)
            self._parameters[own, key] = shown
            told = {"description": rng.choice(parameter.about.split("|"))} if described else {}
            properties[shown] = {**parameter.schema, **told}
            if not parameter.optional:
                required.append(shown)
        parameters = {"type": "object", "properties": properties, "required": required}
        about = rng.choice(function.about.split("|"))
        shown_function = {"name": name, "description": about, "parameters": parameters}
        self.tools.append({"type": "function", "function": shown_function})

    def name(self, own: str) -> str:
        """The drawn name of a function."""
        return self._names[own]

    def call(self, own: str, returned: Any, **arguments: Any) -> Call:
        """A call of one of the functions, ready for Script.call; its arguments by the domain's own names."""
        shown = {self._parameters[own, key]: value for key, value in arguments.items()}
        return self._names[own], shown, returned


class Talk:
    """A Script that is spoken in drawn phrasings and calls the functions of a Toolset."""

    def __init__(self, rng: Random, script: Script, toolset: Toolset) -> None:
        self.rng = rng
        self.script = script
        self.toolset = toolset

    def user(self, *texts: str, **values: object) -> None:
        """The user says one of the texts."""
        self.script.user(say(self.rng, texts, **values))

    def say(self, *texts: str, **values: object) -> None:
        """The assistant says one of the texts."""
        self.script.say(say(self.rng, texts, **values))

    def call(self, own: str, returned: Any, **arguments: Any) -> None:
        """The assistant calls one function without a remark."""
        self.script.call(None, self.toolset.call(own, returned, **arguments))

    def chance(self, share: float) -> bool:
        """True in about this share of the draws."""
        return self.rng.random() < share
