"""JSON schemas to guide with, by name, and from files."""

from __future__ import annotations

import json
from pathlib import Path

_LINE = {
    "type": "object",
    "properties": {
        "product": {"type": "string", "maxLength": 16},
        "count": {"type": "integer", "minimum": 1, "maximum": 99},
        "price": {"type": "number"},
    },
    "required": ["product", "count", "price"],
    "additionalProperties": False,
}


def _object(**properties) -> dict:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_SCHEMAS = {
    "flat": _object(
        id={"type": "integer"}, name={"type": "string"}, active={"type": "boolean"}, score={"type": "number"}
    ),
    "bounded": _object(
        name={"type": "string", "maxLength": 20},
        age={"type": "integer", "minimum": 0, "maximum": 120},
        tags={"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 2, "maxItems": 3},
    ),
    "nested": _object(
        order=_object(
            customer=_object(name={"type": "string", "maxLength": 24}, city={"type": "string", "maxLength": 24}),
            lines={"type": "array", "items": _LINE, "minItems": 1, "maxItems": 4},
        )
    ),
    "enums": _object(
        color={"enum": ["red", "green", "blue", "black", "white"]},
        size={"enum": ["small", "medium", "large"]},
        days={
            "type": "array",
            "items": {"enum": ["monday", "tuesday", "wednesday", "thursday", "friday"]},
            "minItems": 1,
            "maxItems": 5,
        },
    ),
    "union": _object(
        shape={
            "anyOf": [
                _object(circle=_object(radius={"type": "number"})),
                _object(box=_object(width={"type": "number"}, height={"type": "number"})),
                {"type": "string", "maxLength": 12},
                {"type": "null"},
            ]
        }
    ),
    "recursive": {
        "$defs": {
            "node": _object(
                name={"type": "string", "maxLength": 12},
                children={"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 3},
            )
        },
        "$ref": "#/$defs/node",
    },
}

SCHEMAS = {name: json.dumps(schema) for name, schema in _SCHEMAS.items()}


class NoSchema(ValueError):
    """Raised where a name is neither a built-in schema nor a readable file with a JSON object."""


def find(name: str) -> tuple:
    """(name, JSON text) of a built-in schema or of a file. Raises NoSchema with what to do."""
    if name in SCHEMAS:
        return name, SCHEMAS[name]
    file = Path(name)
    try:
        schema = json.loads(file.read_text())
    except OSError:
        raise NoSchema(f"{name}: no file, and no built-in schema (those are {', '.join(SCHEMAS)})") from None
    except ValueError as error:
        raise NoSchema(f"{name}: not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise NoSchema(f"{name}: a schema is a JSON object, this is a {type(schema).__name__}")
    return file.stem, json.dumps(schema)
