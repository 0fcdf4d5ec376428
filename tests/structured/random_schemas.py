"""Schemas and regular expressions drawn at random, bounded so that a text drawn at random comes to its end."""

import random
from typing import Any

_NAMES = ("a", "name", "größe", "x y", "k1", "ключ", "/p", "n_0")
_PATTERNS = ("^[a-c]{1,4}$", "^\\d{2}-\\d{2}$", "^(ab|cd)+e{0,2}$", "^[A-Z][a-z]{1,5}$", "^é{1,3}$")
_FORMATS = ("date", "uuid", "ipv4", "time")
_REGEXES = ("[a-z]{{1,{0}}}", "(ab|cd){{1,{0}}}e", "[0-9]{{2}}-[0-9]{{1,{0}}}", "(ü|ö|x){{0,{0}}}!", "a?b?c{{1,{0}}}")


def random_regex(rng: random.Random) -> str:
    return rng.choice(_REGEXES).format(rng.randint(1, 9))


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema of every accepted keyword, the deeper the fewer; recursion ends where it may."""
    if depth == 3 and rng.random() < 0.15:
        return _tree(rng)
    makers = [_integer, _number, _text, _enum, _const, _simple]
    if depth:
        makers += [_object, _object, _array, _any, _all, _patterns, _map]
    return rng.choice(makers)(rng, depth)


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-200, 200)
    more = {"multipleOf": rng.choice((2, 5, 7))} if rng.random() < 0.3 else {}
    if rng.random() < 0.5:
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(10, 500), **more}
    return {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + rng.randint(20, 90), **more}


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    return {"type": "number", "minimum": low, "maximum": low + rng.randint(1, 9), "multipleOf": rng.choice((0.25, 0.5))}


def _text(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.random()
    if kind < 0.3:
        return {"type": "string", "pattern": rng.choice(_PATTERNS), "maxLength": 6}
    if kind < 0.5:
        return {"type": "string", "format": rng.choice(_FORMATS)}
    low = rng.randint(0, 3)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 6)}


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": rng.sample(["a", "ß", 'q"', "", 1, -2.5, None, True, {"a": [1]}, []], rng.randint(1, 4))}


def _const(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"const": rng.choice([{"a": ["é", None]}, "x\\\\y", 17, False, [1, [2]]])}


def _simple(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": rng.sample(["null", "boolean"], rng.randint(1, 2)), "title": "T", "default": None}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_NAMES, rng.randint(1, 3))
    required = [name for name in names if rng.random() < 0.6]
    properties = {name: random_schema(rng, depth - 1) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _map(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": _simple(rng, 0), "minProperties": 1, "maxProperties": 1}


def _patterns(rng: random.Random, depth: int) -> dict[str, Any]:
    patterns = {"^k[0-9]$": _integer(rng, 0), "^z": _simple(rng, 0)} if rng.random() < 0.5 else {"^[ab]$": {"const": 1}}
    keys = {key: value for key, value in patterns.items() if key != "^z"}
    return {"type": "object", "patternProperties": keys, "additionalProperties": False, "maxProperties": 2}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.3:
        return {"type": "array", "prefixItems": [_simple(rng, 0), _integer(rng, 0)], "items": False, "minItems": 1}
    low = rng.randint(0, 1)
    return {
        "type": "array",
        "items": random_schema(rng, depth - 1),
        "minItems": low,
        "maxItems": low + rng.randint(0, 2),
    }


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.3:
        return {"oneOf": [{"type": "null"}, _integer(rng, 0), {"type": "boolean"}]}
    return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}


def _all(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": rng.randint(3, 99)}]}


def _tree(rng: random.Random) -> dict[str, Any]:
    node = {
        "type": "object",
        "properties": {"v": random_schema(rng, 0), "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
        "required": ["v", "next"],
        "additionalProperties": False,
    }
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}
