"""Parsers of tool calls. Each module of this folder has a `ToolParser` named PARSER. No list names the modules."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from apcbatch.data.output.tool_parser import ToolParser

DEFAULT = "hermes"  # the usual format of models whose template has no tool calls


@cache
def tool_parsers() -> dict[str, ToolParser]:
    """Return all parsers, by name in alphabetical order."""
    modules = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    found: list[ToolParser] = sorted((module.PARSER for module in modules), key=lambda parser: parser.name)
    return {parser.name: parser for parser in found}


def choose_tool_parser(name: str, *texts: str) -> ToolParser | None:
    """Return the parser with this name; None for `none`.

    `auto` chooses by the texts of the model: the first parser that detects its calls in one of them, or DEFAULT."""
    if name == "none":
        return None
    parsers = tool_parsers()
    if name != "auto":
        return parsers[name]
    detected = (parser for text in texts for parser in parsers.values() if parser.detects(text))
    return next(detected, parsers[DEFAULT])
