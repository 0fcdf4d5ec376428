"""JSON schemas (2020-12) of bodies and of a batch job's rows, made from the table of fields.

They say what shape a value has; what depends on several fields or on the model is refused in words when it is read.
"""

import json
from typing import Any

from ferrum_jax.openai.body_fields import BODIES, CLASSES, ROW_BODIES, fields_of
from ferrum_jax.openai.body_rules import rules_of
from ferrum_jax.openai.value_schemas import IDS, NULL, Schema, list_of, one_of, whole
from ferrum_jax.sampling_params import MAX_LOGPROBS

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_NAME = {"type": "string", "minLength": 1, "description": "names the row's answer"}


def body_schema(body: str, door: str) -> dict[str, Any]:
    """The schema of a body, one of those in `body_fields.py`, that comes through a door."""
    known = fields_of(body, door)
    needed = [name for name in _NEEDED.get(body, ()) if name in known]
    schemas = {name: _OF_ONE.get((body, name), field.schema) for name, field in known.items()}
    properties = {name: _value(field.says, schemas[name], name in needed) for name, field in known.items()}
    if body in BODIES:
        refused = rules_of(body, door).refused
        properties |= {name: _harmless(*said) for name, said in refused.items() if name not in known}
    return {
        "type": "object",
        "properties": {name: properties[name] for name in sorted(properties)},
        "required": needed,
        "additionalProperties": NULL,  # a null is a field that was not given
    }


def row_schema() -> dict[str, Any]:
    """The schema of one line of a batch job's input: OpenAI's form, or the body itself with its custom_id."""
    bodies = {body: body_schema(body, "row") for body in ROW_BODIES.values()}
    whole = [
        {
            "type": "object",
            "properties": {
                "custom_id": _NAME,
                "method": {"const": "POST"},
                "url": {"const": url},
                "body": {"$ref": f"#/$defs/{body}"},
            },
            "required": ["custom_id", "method", "url", "body"],
            "additionalProperties": False,
        }
        for url, body in ROW_BODIES.items()
    ]
    ids = {**bodies["completion"], "properties": {**bodies["completion"]["properties"], "prompt": NULL}}
    ids["properties"]["prompt_token_ids"] = one_of(IDS, list_of(IDS, minItems=1))
    own = [schema for body, schema in bodies.items() if body not in CLASSES]  # `input` alone asks for vectors
    short = [_short(schema) for schema in (*own, {**ids, "required": ["prompt_token_ids"]})]
    return {"$schema": DIALECT, "title": "a row of `ferrum-jax batch`", "anyOf": whole + short, "$defs": bodies}


def _short(schema: dict[str, Any]) -> dict[str, Any]:
    properties = {"custom_id": _NAME, **schema["properties"]}
    return {**schema, "properties": properties, "required": ["custom_id", *schema["required"]]}


_NEEDED = {
    "completion": ("prompt",),
    "chat": ("messages",),
    "response": ("input",),
    "embedding": ("input",),
    "score": ("text_1", "text_2"),
    "rerank": ("query", "documents"),
    "transcription": ("file",),
    "translation": ("file",),
    "detokenize": ("tokens",),
    "load_adapter": ("lora_name", "lora_path"),
    "unload_adapter": ("lora_name",),
    "update_weights": ("path",),
}


_OF_ONE = {  # values that one body alone takes, or does not
    ("completion", "logprobs"): whole(0, MAX_LOGPROBS),
    ("chat", "max_tokens"): whole(1),
}


def _value(says: str, schema: Schema, is_needed: bool) -> dict[str, Any]:
    """The schema of a field's values; null means the field is absent, except where a body must have it."""
    if is_needed or not schema:
        return {"description": says, **schema}
    return {"description": says, **one_of(schema, NULL)}


def _harmless(values: tuple[Any, ...], instead: str) -> dict[str, Any]:
    taken = [list(value) if isinstance(value, tuple) else value for value in values]
    return {"enum": [None, *(value for value in taken if value is not None)], "description": f"not here: {instead}"}


def in_words(schema: Schema, *, bounds: bool = True) -> str:
    """A schema's values, as tables show them."""
    if "anyOf" in schema:
        found = (in_words(each, bounds=bounds) for each in schema["anyOf"] if each != NULL)
        return " or ".join(dict.fromkeys(found))
    if "enum" in schema or "const" in schema:
        return ", ".join(json.dumps(value) for value in schema.get("enum", [schema.get("const")]) if value is not None)
    kind = schema.get("type", "anything")
    if kind == "array":
        items = in_words(schema["items"], bounds=False)
        return f"list of ({items})" if " or " in items else f"list of {items}"
    least, most = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    if not bounds or least is None or abs(least) >= 2**31 - 1:
        return kind
    is_above = "exclusiveMinimum" in schema
    if most is not None and most < 2**31 - 1:
        return f"{kind}, above {least:g} and up to {most:g}" if is_above else f"{kind}, {least:g} to {most:g}"
    return f"{kind}, above {least:g}" if is_above else f"{kind}, {least:g} or more"
