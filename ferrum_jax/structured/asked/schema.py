"""Which JSON schemas a grammar enforces: every keyword is known, or refused with its place.

The grammar's compiler passes over keywords that it does not know, and a text could then break what its schema says. So
a schema is walked before it is compiled: a keyword is enforced, says nothing of what is valid, or is refused by name.

Source: JSON Schema 2020-12, Core and Validation; keywords as llguidance 1.9 enforces them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ferrum_jax.quoting import quoted

# fmt: off
_ENFORCED = frozenset((
    "type", "enum", "const", "properties", "required", "additionalProperties", "patternProperties",
    "minProperties", "maxProperties", "items", "prefixItems", "additionalItems", "minItems", "maxItems",
    "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "multipleOf", "allOf", "anyOf", "oneOf", "$ref", "$defs", "definitions",
))
_SAY_NOTHING = frozenset((  # of what is valid
    "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment",
    "$schema", "$id", "id", "$anchor", "contentEncoding", "contentMediaType", "discriminator",
))
# fmt: on
_INSTEAD = {
    "nullable": 'give "null" as one of the types',
    "uniqueItems": "list the items with prefixItems, or check it afterwards",
    "not": "say what is allowed instead",
    "if": "use anyOf with a const in each branch",
    "then": "use anyOf with a const in each branch",
    "else": "use anyOf with a const in each branch",
    "propertyNames": "use patternProperties with additionalProperties false",
    "$dynamicRef": "use $ref",
    "x-guidance": "options of the compiler are fields of structured_outputs",
}
_OF_ONE = ("additionalProperties", "additionalItems", "items")
_OF_MANY = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_WRITABLE_CONTROLS = frozenset("\b\t\n\f\r")
_DEEPEST = 64
MOST_PARTS = 2048  # schemas in a schema; what a compiler does for an object grows with the square of its properties
MOST_TEXT = 1024  # characters of a name or a value; what must come is looked through again at each of its tokens


def check_schema(schema: object) -> None:
    """Raises ValueError for what is no schema or holds what no grammar enforces, all problems in one error."""
    problems: list[str] = []
    for count, (place, part) in enumerate(subschemas(schema), 1):
        if count > MOST_PARTS:
            raise ValueError(f"the JSON schema has more than {MOST_PARTS:,} schemas in it; say fewer properties")
        if isinstance(part, bool):
            continue
        if not isinstance(part, Mapping):
            problems.append(f"at {place}: a schema is an object, true or false, not {quoted(part)}")
            continue
        problems += [f"at {place}/{_escaped(key)}: {why}" for key, why in _refused(part)]
    if problems:
        more = f" (and {len(problems) - 8} more)" if len(problems) > 8 else ""
        raise ValueError(f"the JSON schema cannot be enforced: {'; '.join(problems[:8])}{more}")


def subschemas(schema: object, place: str = "#", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Each schema in a schema with its place as a JSON pointer, itself first. Raises ValueError if nested too deep."""
    if depth > _DEEPEST:
        raise ValueError(f"the JSON schema is nested deeper than {_DEEPEST} at {place[:200]}; use $ref")
    yield place, schema
    if not isinstance(schema, Mapping):
        return
    for key in _OF_ONE:
        if key in schema and not (key == "items" and isinstance(schema[key], list)):
            yield from subschemas(schema[key], f"{place}/{key}", depth + 1)
    for key in _OF_MANY:
        if isinstance(schema.get(key), list):
            for index, part in enumerate(schema[key]):
                yield from subschemas(part, f"{place}/{key}/{index}", depth + 1)
    for key in _BY_NAME:
        if isinstance(schema.get(key), Mapping):
            for name, part in schema[key].items():
                yield from subschemas(part, f"{place}/{key}/{_escaped(name)}", depth + 1)


def _refused(part: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The keywords of one schema that cannot be taken, and why."""
    for key, value in part.items():
        if not isinstance(key, str):
            yield str(key), "a keyword must be a text"
        elif key in _ENFORCED:
            why = _wrong_value(key, value, part)
            if why:
                yield key, why
        elif key in _INSTEAD or (key not in _SAY_NOTHING and not key.startswith("x-")):
            yield key, f"{key} cannot be enforced: {_INSTEAD.get(key, 'leave it out, or check it afterwards')}"


def _wrong_value(key: str, value: Any, part: Mapping[str, Any]) -> str | None:
    """Why a known keyword cannot have this value; the compiler refuses further ones."""
    if key in _BY_NAME and not isinstance(value, Mapping):
        return f"it must be an object, not {quoted(value)}"
    if key in ("allOf", "anyOf", "oneOf", "prefixItems", "enum", "required") and not isinstance(value, list):
        return f"it must be a list, not {quoted(value)}"
    if key == "type":
        wrong = [name for name in (value if isinstance(value, list) else [value]) if name not in _TYPES]
        return f"{quoted(wrong[0])} is no type; types are {', '.join(_TYPES)}" if wrong else None
    if key in ("const", "enum"):
        for text in _texts(value):
            if len(text) > MOST_TEXT:
                return f"{quoted(text)} is too long; at most {MOST_TEXT:,} characters are allowed"
            if _has_other_controls(text):
                return "it holds a control character that is not written as one of \\b \\t \\n \\f \\r"
    if key == "properties" and (long := next((name for name in value if len(str(name)) > MOST_TEXT), None)):
        return f"the name {quoted(long)} is too long; at most {MOST_TEXT:,} characters are allowed"
    if key == "minProperties" and isinstance(value, int) and value > len(part.get("required", ())) + 1:
        return "a name could come twice; give at most one more than the properties that are required"
    return None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)


def _has_other_controls(text: str) -> bool:
    return any(character < " " and character not in _WRITABLE_CONTROLS for character in text)


def _escaped(name: object) -> str:
    """A name in a JSON pointer (RFC 6901)."""
    return str(name).replace("~", "~0").replace("/", "~1")
