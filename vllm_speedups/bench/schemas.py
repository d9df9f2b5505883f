"""JSON schemas to guide with, by name."""

from __future__ import annotations

import json

BOUNDED = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 2, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}

SCHEMAS = {"bounded": json.dumps(BOUNDED)}
