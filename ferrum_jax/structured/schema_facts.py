"""What a conjunction of JSON schemas says at once: kinds, values, bounds, and schemas of properties and items.

What is not read here is passed over, so that a conjunction seems to allow more than it does, never less.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Side = Sequence[Any]
_ALL = frozenset(("null", "boolean", "integer", "fraction", "string", "array", "object"))
_KINDS = {name: frozenset((name,)) for name in _ALL} | {"number": frozenset(("integer", "fraction"))}


def kinds(parts: Side) -> frozenset[str]:
    """The kinds of value that can match."""
    values = listed(parts)
    return typed(parts) if values is None else typed(parts) & {kind_of(value) for value in values}


def typed(parts: Side) -> frozenset[str]:
    """The kinds of value that `type` allows."""
    found = _ALL
    for part in parts:
        asked = part.get("type")
        names = [asked] if isinstance(asked, str) else asked
        if isinstance(names, list):
            found &= frozenset().union(*(_KINDS.get(name, _ALL) for name in names))
    return found


def kind_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    return {float: "fraction", str: "string", list: "array"}.get(type(value), "object")


def listed(parts: Side) -> list[Any] | None:
    """All values that can match, where consts and enums say them: those that are in each list."""
    lists = lists_of(parts)
    if not lists:
        return None
    first, *others = sorted(lists, key=len)
    names = [{name_of(value) for value in each} for each in others]
    return [value for value in first if all(name_of(value) in each for each in names)]


def lists_of(parts: Side) -> list[list[Any]]:
    """The values of each const and enum."""
    return [[part["const"]] for part in parts if "const" in part] + [
        part["enum"] for part in parts if isinstance(part.get("enum"), list)
    ]


def name_of(value: Any) -> str:
    """A text that JSON values share where they are equal: 1 and 1.0 do, 1 and true do not."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return {name: _plain(each) for name, each in value.items()} if isinstance(value, Mapping) else value


def required(parts: Side) -> set[str]:
    """The names that an object must have."""
    lists = [part["required"] for part in parts if isinstance(part.get("required"), list)]
    return {name for name in itertools.chain(*lists) if isinstance(name, str)}


def of_name(parts: Side, name: str) -> list[Any]:
    """The schemas that the property of this name must match."""
    found: list[Any] = []
    for part in parts:
        own = part.get("properties")
        patterns = part.get("patternProperties")
        mine = [own[name]] if isinstance(own, Mapping) and name in own else []
        others = patterns.items() if isinstance(patterns, Mapping) else ()
        matches = [(_matches(pattern, name), schema) for pattern, schema in others]
        mine += [schema for is_match, schema in matches if is_match]
        unsure = any(is_match is None for is_match, _ in matches)
        found += mine
        if not mine and not unsure and "additionalProperties" in part:
            found.append(part["additionalProperties"])
    return found


def _matches(pattern: str, text: str) -> bool | None:
    """Whether a pattern matches; None where dialects of patterns may differ."""
    if not text.isascii() or not text.isprintable() or "\\p" in pattern or "(?" in pattern.replace("(?:", ""):
        return None
    try:
        return re.search(pattern, text, re.ASCII) is not None
    except (re.error, RecursionError):
        return None


def fits_text(text: str, parts: Side) -> bool:
    if not most(parts, "minLength") <= len(text) <= least(parts, "maxLength"):
        return False
    patterns = [part["pattern"] for part in parts if isinstance(part.get("pattern"), str)]
    return all(_matches(pattern, text) is not False for pattern in patterns)


def of_item(parts: Side, place: int) -> list[Any]:
    """The schemas that the item at a place must match."""
    found: list[Any] = []
    for part in parts:
        first = part.get("prefixItems", part["items"] if isinstance(part.get("items"), list) else [])
        rest = part.get("additionalItems") if isinstance(part.get("items"), list) else part.get("items")
        if isinstance(first, list) and place < len(first):
            found.append(first[place])
        elif rest is not None:
            found.append(rest)
    return found


def choices(parts: Side) -> Iterator[tuple[list[Any], list[Any]]]:
    """For each anyOf and oneOf: the rest of a side, and the branches."""
    for at, part in enumerate(parts):
        for key in ("anyOf", "oneOf"):
            if isinstance(part.get(key), list):
                rest = {name: value for name, value in part.items() if name != key}
                yield [*parts[:at], rest, *parts[at + 1 :]], part[key]


def _numbers(parts: Side, key: str) -> list[float]:
    return [part[key] for part in parts if isinstance(part.get(key), int | float) and not isinstance(part[key], bool)]


def most(parts: Side, key: str) -> float:
    return max(_numbers(parts, key), default=0)


def least(parts: Side, key: str) -> float:
    return min(_numbers(parts, key), default=math.inf)


def longer(left: Side, right: Side, what: str) -> bool:
    return most(left, f"min{what}") > least(right, f"max{what}")


def lowest(parts: Side) -> tuple[float, bool]:
    """The bound, and whether it is outside."""
    outside = _numbers(parts, "exclusiveMinimum")
    outside += [each for p in parts if p.get("exclusiveMinimum") is True for each in _numbers([p], "minimum")]
    return max([(each, True) for each in outside] + [(each, False) for each in _numbers(parts, "minimum")],
               default=(-math.inf, False))  # fmt: skip


def highest(parts: Side) -> tuple[float, bool]:
    outside = _numbers(parts, "exclusiveMaximum")
    outside += [each for p in parts if p.get("exclusiveMaximum") is True for each in _numbers([p], "maximum")]
    return min([(each, True) for each in outside] + [(each, False) for each in _numbers(parts, "maximum")],
               key=lambda bound: (bound[0], not bound[1]), default=(math.inf, False))  # fmt: skip


def beyond(left: Side, right: Side) -> bool:
    """Whether each number of `left` is above each of `right`."""
    (low, low_outside), (high, high_outside) = lowest(left), highest(right)
    return low > high or (low == high and (low_outside or high_outside))
