"""Convert tool arguments from plain text to the types in the tool's schema."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from apcbatch.data.input.messages import Tool
from apcbatch.data.json_text import read_json

_EXACT = 2**53  # below this, a whole float has exactly the value that was written
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def parameters_of(tools: Sequence[Tool], name: str) -> Mapping[str, Any]:
    """Return the schemas of the parameters of the tool `name`, by parameter; empty without such a tool or a schema."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, dict) and function.get("name") == name:
            schema = function.get("parameters")
            properties = schema.get("properties") if isinstance(schema, dict) else None
            return properties if isinstance(properties, dict) else {}
    return {}


def typed(text: str, schema: object) -> Any:
    """Convert a text to the type in its parameter's schema.

    `null` and `none` become None if the schema allows null. Otherwise the text is returned unchanged if the schema
    allows strings or gives no type, or if the text is no value of the allowed types.
    """
    types = types_of(schema)
    word = text.strip().lower()
    if "null" in types and word in ("null", "none"):
        return None
    if not types or "string" in types:
        return text
    if "boolean" in types and word in ("true", "false"):  # templates in Jinja write True and False
        return word == "true"
    try:
        value = read_json(text)
    except ValueError:
        return text
    if value in (math.inf, -math.inf):  # 1e400, which write_json refuses
        return text
    found = _TYPES.get(type(value))
    if found == "integer" and "integer" not in types:
        found = "number"
    elif found == "number" and "number" not in types and value.is_integer() and abs(value) < _EXACT:
        found, value = "integer", int(value)
    return value if found in types else text


def types_of(schema: object) -> set[str]:
    """Return the types that a schema allows: by `type`, else by `enum` or `const`, else by `anyOf` or `oneOf`."""
    if not isinstance(schema, dict):
        return set()
    named = schema.get("type")
    if named is not None:
        return {one for one in (named if isinstance(named, list) else [named]) if isinstance(one, str)}
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    if values:
        return {"null" if value is None else _TYPES.get(type(value), "") for value in values}
    choices = schema.get("anyOf", schema.get("oneOf"))
    found: set[str] = set()
    for choice in choices if isinstance(choices, list) else []:
        if isinstance(choice, dict) and "type" in choice:
            found |= types_of(choice)
    return found
