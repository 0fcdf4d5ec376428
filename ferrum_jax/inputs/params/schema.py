"""Which JSON schemas a grammar enforces: every word is known, an annotation, or refused with its place.

The grammar's compiler passes over words that it does not know, and a text could then break what its schema says. So a
schema is walked before it is compiled, what its references lead to included, wherever that stands.

Source: JSON Schema 2020-12, Core and Validation; keywords as llguidance 1.9 enforces them.
"""

import math
import sys
import urllib.parse
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from ferrum_jax.inputs.params.schema_words import (
    ENFORCED,
    ENFORCED_FORMATS,
    is_unknown,
    why_format_refused,
    why_refused,
)
from ferrum_jax.io.error_text import quoted

_OF_ONE = ("additionalProperties", "additionalItems", "items")
_OF_MANY = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
NAMES = ("$id", "id", "$anchor", "$dynamicAnchor")  # by which references may find a part
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_WRITABLE_CONTROLS = frozenset("\b\t\n\f\r")
_DEEPEST = 64
EXACT = 2**53  # whole numbers up to here are floats of 64 bits
MAX_WHOLE = 2.0**63 - 1024  # the largest float that the compiler can read as a whole number
MAX_PARTS = 2048  # schemas in a schema; what a compiler does for an object grows with the square of its properties
MAX_TEXT = 1024  # characters of a name or a value; what must come is looked through again at each of its tokens
_MAX_LOOKUPS = 200_000  # of references in parts with a name
_MOST_WARNINGS = 8
_MAX_UNKNOWN = 256  # different words; each is compared with all that are known


def check_schema(schema: object) -> tuple[str, ...]:
    """A warning for each word that is taken and means nothing.

    Raises ValueError for what is no schema or holds what no grammar enforces, all problems in one error.
    """
    problems: list[str] = []
    ignored: list[str] = []
    unknown: set[str] = set()
    for count, (place, part) in enumerate(subschemas(schema), 1):
        if count > MAX_PARTS:
            raise ValueError(f"the JSON schema has more than {MAX_PARTS:,} schemas in it; say fewer properties")
        if isinstance(part, bool):
            continue
        if not isinstance(part, Mapping):
            problems.append(f"at {place}: a schema is an object, true or false, not {quoted(part)}")
            continue
        unknown.update(key for key in part if isinstance(key, str) and is_unknown(key))
        if len(unknown) > _MAX_UNKNOWN:
            raise ValueError(f"the JSON schema has more than {_MAX_UNKNOWN} words that are unknown; leave them out")
        problems += [f"at {place}/{_escaped(key)}: {why}" for key, why in _refused(part)]
        ignored += [f"{place}/{_escaped(key)}" for key in part if isinstance(key, str) and is_unknown(key)]
        if says_no_format(part):
            ignored.append(f"{place}/format, {quoted(part['format'])}")
    if problems:
        more = f" (and {len(problems) - 8} more)" if len(problems) > 8 else ""
        raise ValueError(f"the JSON schema cannot be enforced: {'; '.join(problems[:8])}{more}")
    more = (
        [f"the JSON schema has {len(ignored) - _MOST_WARNINGS} more unknown words"]
        if len(ignored) > _MOST_WARNINGS
        else []
    )
    named = [f"the JSON schema has an unknown word, which enforces nothing: {each[:200]}" for each in ignored]
    return (*named[:_MOST_WARNINGS], *more)


def says_no_format(part: Mapping[str, Any]) -> bool:
    """Whether a schema has a format that is an annotation: one that JSON Schema does not have."""
    name = part.get("format")
    return isinstance(name, str) and name not in ENFORCED_FORMATS and why_format_refused(name) is None


def subschemas(schema: object) -> Iterator[tuple[str, Any]]:
    """Each schema in a schema with its place as a JSON pointer, itself first, and what references lead to.

    Raises ValueError if nested too deep.
    """
    walked: set[int] = set()
    references: set[str] = set()
    named: list[tuple[str, Any]] | None = None
    waiting: list[tuple[str, Any]] = [("#", schema)]
    while waiting:
        start, found = waiting.pop()
        if id(found) in walked:
            continue
        for place, part in _nested(found, start, 0):
            if isinstance(part, Mapping) and id(part) in walked:
                continue
            walked.add(id(part))
            yield place, part
            reference = part.get("$ref") if isinstance(part, Mapping) else None
            if isinstance(reference, str) and reference not in references:
                references.add(reference)
                named = list(_named_parts(schema)) if named is None else named
                if len(named) * len(references) > _MAX_LOOKUPS:
                    raise ValueError(
                        f"the JSON schema has {len(named)} parts with an id and {len(references)} references or more; "
                        "leave out ids that no reference needs"
                    )
                waiting += _targets(schema, named, reference)


def _nested(schema: object, place: str, depth: int) -> Iterator[tuple[str, Any]]:
    if depth > _DEEPEST:
        raise ValueError(f"the JSON schema is nested deeper than {_DEEPEST} at {place[:200]}; use $ref")
    yield place, schema
    if not isinstance(schema, Mapping):
        return
    for key in _OF_ONE:
        if key in schema and not (key == "items" and isinstance(schema[key], list)):
            yield from _nested(schema[key], f"{place}/{key}", depth + 1)
    for key in _OF_MANY:
        if isinstance(schema.get(key), list):
            for index, part in enumerate(schema[key]):
                yield from _nested(part, f"{place}/{key}/{index}", depth + 1)
    for key in _BY_NAME:
        if isinstance(schema.get(key), Mapping):
            for name, part in schema[key].items():
                yield from _nested(part, f"{place}/{key}/{_escaped(name)}", depth + 1)


def _targets(root: object, named: list[tuple[str, Any]], reference: str) -> list[tuple[str, Any]]:
    """All that a reference may lead to: a pointer from the root or from a part with a name, or such a part."""
    fragment = reference.partition("#")[2]
    if not fragment.startswith("/"):
        return [] if reference == "#" else named
    below = [(f"{place}{fragment}", pointed(part, fragment)) for place, part in [("#", root), *named]]
    return [(place, found[0]) for place, found in below if found is not None]


def pointed(root: object, pointer: str) -> tuple[Any] | None:
    """The value at a JSON pointer, in a tuple of one; None where there is no such place."""
    found: Any = root
    for name in urllib.parse.unquote(pointer).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return (found,)


def _named_parts(root: object) -> Iterator[tuple[str, Any]]:
    """Each object below the root, wherever it stands, that has a name of its own."""
    waiting = [("#", root)]
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, Mapping):
            if value is not root and any(isinstance(value.get(key), str) for key in NAMES):
                yield place, value
            waiting += [(f"{place}/{_escaped(name)}", part) for name, part in value.items()]
        elif isinstance(value, list):
            waiting += [(f"{place}/{index}", part) for index, part in enumerate(value)]


def _refused(part: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The keywords of one schema that cannot be taken, and why."""
    for key, value in part.items():
        if not isinstance(key, str):
            yield str(key), "a keyword must be a text"
            continue
        why = _wrong_value(key, value, part) if key in ENFORCED else why_refused(key, part)
        if why:
            yield key, why


def _wrong_value(key: str, value: Any, part: Mapping[str, Any]) -> str | None:
    """Why a known keyword cannot have this value; the compiler refuses further ones."""
    if key in _BY_NAME and not isinstance(value, Mapping):
        return f"it must be an object, not {quoted(value)}"
    if key in ("allOf", "anyOf", "oneOf", "prefixItems", "enum", "required") and not isinstance(value, list):
        return f"it must be a list, not {quoted(value)}"
    if key == "format":
        return why_format_refused(value)
    if key == "type":
        wrong = [name for name in (value if isinstance(value, list) else [value]) if name not in _TYPES]
        return f"{quoted(wrong[0])} is no type; types are {', '.join(_TYPES)}" if wrong else None
    if key in ("const", "enum"):
        for each in _scalars(value):
            if isinstance(each, int | float) and not is_kept(each):
                return f"{each!r} would be rounded to 64 bits; give it as a text, or give bounds"
            if isinstance(each, str) and len(each) > MAX_TEXT:
                return f"{quoted(each)} is too long; at most {MAX_TEXT:,} characters are allowed"
            if isinstance(each, str) and any(letter < " " and letter not in _WRITABLE_CONTROLS for letter in each):
                return "it holds a control character that is not written as one of \\b \\t \\n \\f \\r"
    if key == "properties" and (long := next((name for name in value if len(str(name)) > MAX_TEXT), None)):
        return f"the name {quoted(long)} is too long; at most {MAX_TEXT:,} characters are allowed"
    required = part.get("required")
    least = len(required) if isinstance(required, list) else 0
    if key == "minProperties" and isinstance(value, int | float) and value > least + 1:
        return "a name could come twice; give at most one more than the properties that are required"
    return None


def _scalars(value: object) -> Iterator[Any]:
    """The texts, numbers and other single values in a JSON value, but no names."""
    waiting: list[Any] = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, list):
            waiting += each
        elif isinstance(each, Mapping):
            waiting += each.values()
        else:
            yield each


class RoundedNumber(float):
    """A number of a JSON text that has more digits than a float of 64 bits keeps."""

    text: str


def number_of(text: str) -> float:
    """The number of a JSON text; a RoundedNumber where the float is another."""
    found = float(text)
    if math.isinf(found) or Decimal(text) == Decimal(repr(found)):
        return found
    rounded = RoundedNumber(found)
    rounded.text = text
    return rounded


def refuse_rounded(value: object) -> None:
    """Raises ValueError for a JSON value in which a number was rounded when it was read."""
    for each in _scalars(value):
        if isinstance(each, RoundedNumber):
            raise ValueError(f"the number {each.text[:80]} in a schema is kept as {each!r}; write that, or a text")


def is_kept(number: float) -> bool:
    """Whether the compiler writes just this number: it reads digits and exponent into floats of 64 bits, one by one.

    True for those that are no JSON.
    """
    if isinstance(number, int) and abs(number) < MAX_WHOLE:
        return float(number) == number
    if abs(number) > sys.float_info.max or math.isnan(number):
        return not isinstance(number, int)
    shortest = Decimal(repr(float(number)))
    _, digits, exponent = shortest.as_tuple()
    whole, power = int("".join(map(str, digits))), float(f"1e{abs(int(exponent))}")
    read = whole * power if int(exponent) > 0 else whole / power
    return read == abs(number) and (read < EXACT or shortest == number)


def _escaped(name: object) -> str:
    """A name in a JSON pointer (RFC 6901)."""
    return str(name).replace("~", "~0").replace("/", "~1")
