"""Keywords of a JSON schema: enforced ones, those without an effect, and assertions that no grammar enforces.

Any other word is an annotation (JSON Schema 2020-12, Core 6.5): it is taken with a warning. One that nearly is a known
assertion is refused, since a text could break what its writer meant.
"""

import functools
import re
from collections.abc import Mapping
from typing import Any

# fmt: off
ENFORCED = frozenset((
    "type", "enum", "const", "properties", "required", "additionalProperties", "patternProperties",
    "minProperties", "maxProperties", "items", "prefixItems", "additionalItems", "minItems", "maxItems",
    "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "multipleOf", "allOf", "anyOf", "oneOf", "$ref", "$defs", "definitions",
))
_SAY_NOTHING = frozenset((  # of what is valid
    "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment",
    "$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary", "contentEncoding",
    "contentMediaType", "contentSchema", "discriminator", "xml", "externalDocs",
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
    "$recursiveRef": "use $ref",
    "x-guidance": "options of the compiler are fields of structured_outputs",
    **dict.fromkeys(
        ("contains", "minContains", "maxContains", "dependencies", "dependentRequired", "dependentSchemas"),
        "leave it out, or check it afterwards",
    ),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), "name what is allowed, and close the rest"),
    **dict.fromkeys(("disallow", "extends", "divisibleBy"), "it is of an older draft; say it in words of 2020-12"),
}
_BESIDE = {  # words that say something beside one of these alone
    "if": ("then", "else"),
    "then": ("if",),
    "else": ("if",),
    "minContains": ("contains",),
    "maxContains": ("contains",),
}
_NOTHING_AS = {  # values that allow everything
    "nullable": (False,),
    "uniqueItems": (False,),
    "not": (False,),
    "propertyNames": (True, {}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
}
ENFORCED_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
_OTHER_FORMATS = frozenset(  # that JSON Schema defines
    ("idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template", "json-pointer",
     "relative-json-pointer", "regex")
)  # fmt: skip
_WORDS = ENFORCED.union(_INSTEAD)
_FORMATS = ENFORCED_FORMATS | _OTHER_FORMATS
_MIN_LETTERS = 5  # of words that one letter too many makes another


def why_refused(key: str, part: Mapping[str, Any]) -> str | None:
    """Why a word that is not enforced cannot be taken in this schema; None where it says nothing of what is valid."""
    if key in _SAY_NOTHING or says_nothing(key, part) or (key.startswith("x-") and key != "x-guidance"):
        return None
    if key in _INSTEAD:
        return f"{key} cannot be enforced: {_INSTEAD[key]}"
    meant = near(key, _WORDS)
    return None if meant is None else f"{key} is no keyword, and {meant} is one; say that, or another name"


def says_nothing(key: str, part: Mapping[str, Any]) -> bool:
    """Whether a known assertion asserts nothing here: a lone `then`, `uniqueItems` that is false."""
    if key in _BESIDE and not any(other in part for other in _BESIDE[key]):
        return True
    return any(type(part[key]) is type(value) and part[key] == value for value in _NOTHING_AS.get(key, ()))


def is_unknown(key: str) -> bool:
    """Whether JSON Schema and OpenAPI do not have the word, and it is none of an extension."""
    return key not in ENFORCED and key not in _SAY_NOTHING and key not in _INSTEAD and not key.startswith("x-")


def why_format_refused(name: Any) -> str | None:
    """Why a format cannot be taken; None of one that is enforced, or that JSON Schema does not have."""
    if not isinstance(name, str):
        return "it must be a text"
    if name in _OTHER_FORMATS:
        known = ", ".join(sorted(ENFORCED_FORMATS))
        return f"the format {name} cannot be enforced: use a pattern; enforced are {known}"
    meant = None if name in ENFORCED_FORMATS else near(name, _FORMATS)
    return None if meant is None else f"{name[:80]!r} is no format, and {meant} is one; say that"


@functools.lru_cache(maxsize=1024)
def near(word: str, known: frozenset[str]) -> str | None:
    """The known word that a word is but for case, signs, a plural or, where it is long, one letter."""
    letters = _letters(word)
    for each in sorted(known):
        other = _letters(each)
        if letters == other or letters == f"{other}s" or other == f"{letters}s":
            return each
        if min(len(letters), len(other)) >= _MIN_LETTERS and _differ_by_one(letters, other):
            return each
    return None


def _letters(word: str) -> str:
    return re.sub(r"[^a-z0-9]", "", word.lower())


def _differ_by_one(left: str, right: str) -> bool:
    """Whether one letter more, less, another, or two that changed places makes one of the other."""
    if abs(len(left) - len(right)) > 1:
        return False
    same = next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    one, other = left[same:], right[same:]
    return (
        one[1:] == other[1:]
        or one[1:] == other
        or one == other[1:]
        or (one[:2] == other[1::-1] and one[2:] == other[2:])
    )
