"""Parsers of tool calls: each module of this folder has a `ToolParser` named PARSER, and is found without a list."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from apcbatch.data.output.tool_parser import ToolParser

DEFAULT = "hermes"  # the usual format of models whose template does not mention calls


@cache
def tool_parsers() -> dict[str, ToolParser]:
    """All parsers by name."""
    modules = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    found: list[ToolParser] = sorted((module.PARSER for module in modules), key=lambda parser: parser.name)
    return {parser.name: parser for parser in found}


def choose_tool_parser(name: str, *texts: str) -> ToolParser | None:
    """The parser of a name; None for `none`. `auto`: the first that detects its calls in one of the model's texts."""
    if name == "none":
        return None
    parsers = tool_parsers()
    if name != "auto":
        return parsers[name]
    detected = (parser for text in texts for parser in parsers.values() if parser.detects(text))
    return next(detected, parsers[DEFAULT])
