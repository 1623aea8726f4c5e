"""The parsers of tool calls: each module of this folder has one, a `ToolParser` named PARSER.

Must not know: what a parser consists of. A module that is put here is found: no list names it.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from apcbatch.data.tool_parser import ToolParser

DEFAULT = "hermes"  # what most models without a word about calls in their template were tuned on, if on any


@cache
def tool_parsers() -> dict[str, ToolParser]:
    """All parsers by name."""
    modules = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    found: list[ToolParser] = sorted((module.PARSER for module in modules), key=lambda parser: parser.name)
    return {parser.name: parser for parser in found}


def choose_tool_parser(name: str, *texts: str) -> ToolParser | None:
    """The parser of a name; None for `none`. `auto`: the one that the first telling text of the model tells."""
    if name == "none":
        return None
    parsers = tool_parsers()
    if name != "auto":
        return parsers[name]
    told = (parser for text in texts for parser in parsers.values() if parser.tells(text))
    return next(told, parsers[DEFAULT])
