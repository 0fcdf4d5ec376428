"""JSON schemas of the values of bodies: numbers, texts, prompts, messages, tools, structures."""

from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]


def whole(least: int, most: int | None = None) -> Schema:
    return {"type": "integer", "minimum": least, **({} if most is None else {"maximum": most})}


def one_of(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def list_of(item: Schema, **bounds: int) -> Schema:
    return {"type": "array", "items": item, **bounds}


def object_of(properties: Mapping[str, Schema], *required: str, **more: Any) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required), **more}


BOOLEAN, STRING, OBJECT, NULL = ({"type": name} for name in ("boolean", "string", "object", "null"))
FILLED = {"type": "string", "minLength": 1}
IDS = list_of(whole(0, 2**31 - 1), minItems=1)
PROMPTS = one_of(STRING, IDS, list_of(one_of(STRING, IDS), minItems=1))
DOCUMENTS = list_of(one_of(FILLED, object_of({"text": FILLED}, "text", additionalProperties=False)), minItems=1)
BIASES = {
    "type": "object",
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    "propertyNames": {"pattern": "^[0-9]+$"},
    "maxProperties": 300,
}

_IMAGE = object_of({"url": STRING, "detail": {"enum": [None, "auto", "high"]}}, "url", additionalProperties=False)
_URL = object_of({"url": STRING}, "url", additionalProperties=False)
_AUDIO = object_of({"data": STRING, "format": FILLED}, "data", "format", additionalProperties=False)
_PART = one_of(
    object_of({"type": {"const": "text"}, "text": STRING}, "type", "text"),
    object_of({"type": {"const": "image_url"}, "image_url": _IMAGE}, "type", "image_url", additionalProperties=False),
    object_of({"type": {"const": "video_url"}, "video_url": _URL}, "type", "video_url", additionalProperties=False),
    object_of({"type": {"const": "audio_url"}, "audio_url": _URL}, "type", "audio_url", additionalProperties=False),
    object_of({"type": {"const": "input_audio"}, "input_audio": _AUDIO}, "type", "input_audio"),
)
_CALL = object_of({"function": object_of({"name": STRING}, "name")}, "function")
_SAID = {
    "role": FILLED,
    "content": one_of(STRING, list_of(_PART), NULL),
    "tool_calls": one_of(list_of(_CALL), NULL),
    "reasoning": one_of(STRING, NULL),
    "reasoning_content": one_of(STRING, NULL),
    "name": {},
    "tool_call_id": {},
}
_HAS_CONTENT = object_of({"content": one_of(STRING, list_of({}))}, "content")
_HAS_CALLS = object_of({"tool_calls": list_of({}, minItems=1)}, "tool_calls")
MESSAGES = list_of(
    object_of(_SAID, "role", additionalProperties=NULL, anyOf=[_HAS_CONTENT, _HAS_CALLS]), minItems=1, maxItems=16_384
)

_NAME = {"type": "string", "pattern": r"^[A-Za-z0-9_.\-]{1,64}$"}
_FUNCTION = object_of({"name": _NAME, "parameters": one_of(OBJECT, NULL)}, "name")
TOOLS = list_of(object_of({"type": {"const": "function"}, "function": _FUNCTION}, "function"), maxItems=128)
TOOL_CHOICE = one_of(
    {"enum": ["none", "auto", "required"]},
    object_of({"type": {"const": "function"}, "function": object_of({"name": STRING}, "name")}, "type", "function"),
)
STRUCTURE = object_of({"choice": one_of(list_of(FILLED, minItems=1), NULL)}, minProperties=1)
_SCHEMA_OF = object_of({"strict": one_of(BOOLEAN, NULL), "schema": one_of(OBJECT, BOOLEAN)}, "schema")
FORMAT = one_of(
    object_of({"type": {"enum": ["text", "json_object", "structural_tag"]}}, "type"),
    object_of({"type": {"const": "json_schema"}, "json_schema": _SCHEMA_OF}, "type", "json_schema"),
)
