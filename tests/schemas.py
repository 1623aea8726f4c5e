"""Random JSON schemas of what the grammar library does, whose answers end."""

from __future__ import annotations

import json
import random
from typing import Any

SCALARS: tuple[dict[str, Any], ...] = (
    {"type": "boolean"},
    {"type": "null"},
    {"type": "string", "maxLength": 6},
    {"type": "string", "minLength": 2, "maxLength": 9},
    {"type": "string", "format": "date"},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{2,4}$"},
    {"enum": ["red", "green", 3, None, [1, 2]]},
    {"const": {"a": 'é"\n'}},
    {"type": ["boolean", "null"]},
    {"type": "number", "minimum": 0, "maximum": 9},
)


def random_schema(source: random.Random, depth: int = 3, kind: str | None = None) -> dict[str, Any]:
    """A schema, nested up to `depth` deep. kind: `object`, or any."""
    schema = _schema(source, depth, kind)
    return {**schema, "$defs": {"one": dict(source.choice(SCALARS))}} if '"$ref"' in json.dumps(schema) else schema


def _schema(source: random.Random, depth: int, kind: str | None = None) -> dict[str, Any]:
    kind = kind or source.choice(("scalar", "integer", "array", "object", "anyOf", "ref") if depth else ("scalar",))
    if kind == "scalar":
        return dict(source.choice(SCALARS))
    if kind == "integer":
        low = source.randrange(-2000, 2000)
        return {"type": "integer", "minimum": low, "maximum": low + source.randrange(500)}
    if kind == "array":
        least = source.randrange(3)
        items = _schema(source, depth - 1)
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + source.randrange(3)}
    if kind == "anyOf":
        return {"anyOf": [_schema(source, depth - 1) for _ in range(source.randrange(1, 4))]}
    if kind == "ref":
        return {"type": "array", "items": {"$ref": "#/$defs/one"}, "maxItems": 2}
    names = source.sample(["name", "a b", "ü", "x-1", "$id_", "value"], source.randrange(4))
    properties = {name: _schema(source, depth - 1) for name in names}
    required = [name for name in names if source.random() < 0.6]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
