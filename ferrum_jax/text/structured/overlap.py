"""Whether JSON schemas may match one value together: proved to be impossible, or taken to be possible.

A side is a conjunction: schemas that all must match. What a schema says that is not read here is passed over, which
makes a side larger, so a proof never errs. Whole numbers are ints. Work is counted, never timed.
"""

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ferrum_jax.inputs.params.schema import NAMES, pointed

Side = Sequence[Any]
_ALL = frozenset(("null", "boolean", "integer", "fraction", "string", "array", "object"))
_KINDS = {name: frozenset((name,)) for name in _ALL} | {"number": frozenset(("integer", "fraction"))}
_MAX_STEPS = 100_000  # of one schema
_DEEPEST = 12


class Overlap:
    """Proofs within one schema, whose references it follows."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._steps = 0

    @property
    def is_exhausted(self) -> bool:
        """Whether nothing more is proved."""
        return self._steps > _MAX_STEPS

    def is_impossible(self, side: Side, depth: int = 0) -> bool:
        """Whether no value can match all of a side."""
        if depth > _DEEPEST or self.is_exhausted:
            return False
        parts = self.parts(side)
        if parts is None:
            return True
        if (values := self.listed(parts)) is not None:
            rest = [{key: part[key] for key in part if key not in ("const", "enum")} for part in parts]
            return not any(self.may_match(value, rest, depth + 1) for value in values)
        left = {kind for kind in typed(parts) if not _is_empty(kind, parts)}
        names = sorted(required(parts)) if left == {"object"} else ()
        if not left or any(self.is_impossible(_of_name(parts, name), depth + 1) for name in names):
            return True
        return any(
            all(self.is_impossible([*rest, branch], depth + 1) for branch in branches)
            for rest, branches in _choices(parts)
        )

    def parts(self, side: Side, depth: int = 0) -> list[Mapping[str, Any]] | None:
        """The schemas of a side without references and allOf; None where no value can match.

        Keywords beside a reference are left out: older drafts pass over them.
        """
        found: list[Mapping[str, Any]] = []
        for schema in side:
            self._steps += 1
            if schema is False:
                return None
            if not isinstance(schema, Mapping) or depth > _DEEPEST or self.is_exhausted:
                continue
            is_plain = "$ref" not in schema
            below = self.parts(schema.get("allOf", ()) if is_plain else self._referred(schema["$ref"]), depth + 1)
            if below is None:
                return None
            found += [{key: schema[key] for key in schema if key != "allOf"}, *below] if is_plain else below
        return found

    def _referred(self, reference: Any) -> list[Any]:
        """The schema of a reference; none where it may be another than it seems."""
        if not isinstance(reference, str) or (reference != "#" and not reference.startswith("#/")):
            return []
        part = self._root
        for name in reference[2:].split("/") if reference != "#" else ():
            found = pointed(part, f"/{name}")
            if found is None:
                return []
            part = found[0]
            if isinstance(part, Mapping) and any(isinstance(part.get(key), str) for key in NAMES):
                return []  # a base of its own
        return [part]

    def may_match(self, value: Any, side: Side, depth: int = 0) -> bool:
        """False where a value surely does not match all of a side."""
        self._steps += 1
        parts = self.parts(side)
        if parts is None:
            return False
        if depth > _DEEPEST or self.is_exhausted:
            return True
        listed = self.listed(parts)
        if listed is not None and _name_of(value) not in map(_name_of, listed):
            return False
        kind = kind_of(value)
        size = value if kind in ("integer", "fraction") else len(value) if kind in ("string", "array") else 0
        low, high = _BOUNDS.get(kind, ("", ""))
        if kind not in typed(parts) or _is_empty(kind, [*parts, {low: size, high: size}]):
            return False
        if kind == "string":
            return all(_matches(part["pattern"], value) is not False for part in parts if "pattern" in part)
        if kind == "object":
            own = ((each, _of_name(parts, name)) for name, each in value.items())
            return required(parts) <= set(value) and all(self.may_match(*each, depth + 1) for each in own)
        return True

    def listed(self, parts: Side) -> list[Any] | None:
        """The values that each const and enum has, or None without any."""
        lists = [[part["const"]] for part in parts if "const" in part]
        lists += [part["enum"] for part in parts if "enum" in part]
        self._steps += sum(map(len, lists))
        if not lists:
            return None
        first, *others = sorted(lists, key=len)
        names = [set(map(_name_of, each)) for each in others]
        return [value for value in first if all(_name_of(value) in each for each in names)]


def typed(parts: Side) -> frozenset[str]:
    """The kinds of value that `type` allows."""
    found = _ALL
    for part in parts:
        names = part.get("type", ())
        names = [names] if isinstance(names, str) else names
        found &= frozenset().union(*(_KINDS.get(name, _ALL) for name in names)) if names else _ALL
    return found


def kind_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    return {int: "integer", float: "fraction", str: "string", list: "array"}.get(type(value), "object")


def _name_of(value: Any) -> str:
    """A text that JSON values share where they are equal."""
    return json.dumps(value, sort_keys=True)


def required(parts: Side) -> set[str]:
    """The names that an object must have."""
    return {name for part in parts for name in part.get("required", ()) if isinstance(name, str)}


def _of_name(parts: Side, name: str) -> list[Any]:
    """The schemas that the property of this name must match."""
    found: list[Any] = []
    for part in parts:
        own = part.get("properties", {})
        patterns = part.get("patternProperties", {}).items()
        matches = [(_matches(pattern, name), schema) for pattern, schema in patterns]
        mine = ([own[name]] if name in own else []) + [schema for is_match, schema in matches if is_match]
        found += mine
        if not mine and all(is_match is False for is_match, _ in matches) and "additionalProperties" in part:
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


def _choices(parts: Side) -> Iterator[tuple[list[Any], list[Any]]]:
    """For each anyOf and oneOf: the rest of a side, and the branches."""
    for (at, part), key in itertools.product(enumerate(parts), ("anyOf", "oneOf")):
        if isinstance(part.get(key), list):
            rest = {name: value for name, value in part.items() if name != key}
            yield [*parts[:at], rest, *parts[at + 1 :]], part[key]


_BOUNDS = {
    "integer": ("minimum", "maximum"),
    "fraction": ("minimum", "maximum"),
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
}


def _is_empty(kind: str, parts: Side) -> bool:
    """Whether the bounds of numbers, lengths or counts leave nothing."""
    if kind not in _BOUNDS:
        return False
    low, high = _BOUNDS[kind]
    above, below = (_numbers(parts, f"exclusive{name.capitalize()}") for name in (low, high))
    least, most = (
        max(_numbers(parts, low) + above, default=-math.inf),
        min(_numbers(parts, high) + below, default=math.inf),
    )
    return least > most or (least == most and (least in above or most in below))


def _numbers(parts: Side, key: str) -> list[float]:
    return [part[key] for part in parts if isinstance(part.get(key), int | float) and not isinstance(part[key], bool)]


class CannotTellApartError(ValueError):
    """Two branches may both match, and neither can be narrowed."""


def narrowed(beside: Mapping[str, Any], branches: Sequence[Any], overlap: Overlap) -> dict[int, list[Any]]:
    """The branches of a oneOf whose union is written, with schemas that narrow each. beside: the rest of their schema.

    A value that two branches match is invalid, and no grammar looks back. So a branch that may overlap another is
    narrowed: an optional property that the other requires is left out, or one that tells them apart is demanded. All
    that is written is valid; some valid values are not written. Raises CannotTellApartError naming two branches.
    """
    found: dict[int, list[Any]] = {}
    for at, branch in enumerate(branches):
        others = {
            place: other
            for place, other in enumerate(branches)
            if place != at and not overlap.is_impossible([beside, branch, other])
        }
        more: list[Any] = []
        for place, other in others.items():
            mine = [beside, branch, *more]
            if overlap.is_impossible([*mine, other]):
                continue
            step = next((each for each in _steps(overlap, mine, other) if _tells(each, overlap, mine, other)), None)
            if step is None and overlap.is_exhausted:
                raise CannotTellApartError("it has too many branches to be told apart: say fewer, or use anyOf")
            if step is None:
                raise CannotTellApartError(
                    f"branches {min(at, place)} and {max(at, place)} may both match: give them a required property "
                    "with another const in each, or use anyOf"
                )
            more.append(step)
        found[at] = more
    return found


def _tells(step: Any, overlap: Overlap, mine: list[Any], other: Any) -> bool:
    """Whether some value may match `mine` with the step, and none may match the other branch too."""
    return not overlap.is_impossible([*mine, step]) and overlap.is_impossible([*mine, step, other])


def _steps(overlap: Overlap, mine: list[Any], other: Any) -> Iterator[Any]:
    """Schemas that narrow one branch so that it no longer overlaps another."""
    parts, others = overlap.parts(mine) or [], overlap.parts([mine[0], other]) or []
    own = _declared(overlap.parts(mine[1:]) or [])
    is_object = {"type": "object"} if "object" in typed(parts) else {}  # properties say nothing of other types
    for name in sorted(required(others) - required(parts), key=lambda name: (name in own, name)):
        yield {**is_object, "properties": {name: False}}
    yield from ({**is_object, "required": [name]} for name in _declared(parts) if name not in required(parts))
    if (values := overlap.listed(parts)) is not None:
        yield {"enum": [value for value in values if not overlap.may_match(value, others)]}


def _declared(parts: Sequence[Mapping[str, Any]]) -> dict[str, None]:
    return {name: None for part in parts for name in part.get("properties", ())}
