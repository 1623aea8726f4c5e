"""Convert tool arguments from plain text to the types in the tool's schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from apcbatch.data.conversation import Tool
from apcbatch.data.json_text import read_json, schema_at, write_json
from apcbatch.data.output.python_values import python_value

_EXACT = 2**53  # below this, a whole float has exactly the value that was written
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
# Names of types that data sets such as BFCL use in place of those of JSON schema.
_ALIASES = {
    "dict": "object", "float": "number", "double": "number", "tuple": "array", "list": "array", "int": "integer",
    "long": "integer", "str": "string", "bool": "boolean",
}  # fmt: skip
_MOST_SCHEMAS = 256  # schemas that are looked at for the types of one parameter


class Parameters:
    """Schemas of the parameters of the tool `name`; without such a tool, or with a schema of no use, all are texts."""

    def __init__(self, tools: Sequence[Tool], name: str) -> None:
        functions = (tool.get("function", tool) for tool in tools)
        named = (one for one in functions if isinstance(one, dict) and one.get("name") == name)
        schema = next(named, {}).get("parameters")
        self._root: Mapping[str, Any] = schema if isinstance(schema, dict) else {}
        properties = self._root.get("properties")
        self._properties: Mapping[str, Any] = properties if isinstance(properties, dict) else {}

    def __contains__(self, name: str) -> bool:
        return name in self._properties

    def typed(self, name: str, text: str) -> Any:
        """Convert a text to the type of the parameter `name`.

        `null` and `none` become None if the schema allows null. Lists and objects may be in the syntax of Python.
        Otherwise the text is returned unchanged if the schema allows strings or gives no type, or if the text is no
        value of the allowed types.
        """
        schema = self._properties.get(name, self._root.get("additionalProperties"))
        types = self._types(schema, [_MOST_SCHEMAS])
        word = text.strip().lower()
        if "null" in types and word in ("null", "none"):
            return None
        if not types or "string" in types:
            return text
        if "boolean" in types and word in ("true", "false"):  # templates in Jinja write True and False
            return word == "true"
        value = _read(text)
        found = _TYPES.get(type(value))
        if found == "integer" and "integer" not in types:
            found = "number"
        elif found == "number" and "number" not in types and value.is_integer() and abs(value) < _EXACT:
            found, value = "integer", int(value)
        return value if found in types else text

    def _types(self, schema: object, left: list[int]) -> set[str]:
        """Return the types by `type`; else by `enum` or `const`; else by `$ref`, `allOf`, `anyOf` and `oneOf` together.
        left: number of schemas that may still be looked at."""
        if not isinstance(schema, dict) or not left[0]:
            return set()
        left[0] -= 1
        named = schema.get("type")
        if named is not None:
            names = (one for one in (named if isinstance(named, list) else [named]) if isinstance(one, str))
            return {_ALIASES.get(one.lower(), one.lower()) for one in names}
        if values := _list(schema.get("enum")) or ([schema["const"]] if "const" in schema else []):
            return {"null" if value is None else _TYPES.get(type(value), "") for value in values}
        reference = schema.get("$ref")
        found = self._types(schema_at(self._root, reference), left) if isinstance(reference, str) else set()
        for one in _list(schema.get("allOf")):
            found = _both(found, self._types(one, left))
        for key in ("anyOf", "oneOf"):
            found = _both(found, set[str]().union(*[self._types(one, left) for one in _list(schema.get(key))]))
        return found


def _read(text: str) -> Any:
    """Read a value as JSON, or a list or an object in the syntax of Python. Return the text if it is neither, or if
    JSON cannot express the value, as for 1e400."""
    try:
        value = read_json(text)
    except ValueError:
        if not text.lstrip().startswith(("[", "{", "(")):
            return text
        try:
            value = python_value(text)
        except ValueError:
            return text
    try:
        write_json(value)
    except ValueError:
        return text
    return value


def _both(one: set[str], other: set[str]) -> set[str]:
    """Intersect two sets of types, of which an empty one allows any type; return the first if nothing is left."""
    return one & other or one or other


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
